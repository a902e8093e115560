"""When two greedy replies count as the same: invariant 5."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.backends.conformance import NEAR_TIE
from offset_runtime.request import Request


def parted(
    backend: Backend, request: Request, found: Sequence[int], expected: Sequence[int], near: float = NEAR_TIE
) -> str | None:
    """Say where two greedy replies part, unless the two best logits there are so close that either may win."""
    for step, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            sequence = backend.allocate()
            ids = [*request.prompt_ids, *expected[:step]]
            [rows] = backend.forward([Chunk(sequence, ids, request.placements)])
            backend.free(sequence)
            best, second = np.sort(rows[0])[[-1, -2]]
            return None if best - second <= near else f"token {step}: {one}, alone {other} ({best} / {second})"
    return None if len(found) == len(expected) else f"{len(found)} tokens, alone {len(expected)}"
