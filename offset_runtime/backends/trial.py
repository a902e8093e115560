"""A backend on trial: what the behaviours of the conformance suite have in common."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from offset_runtime.backends.base import Backend, Chunk, LogitsWanted, SequenceId
from offset_runtime.errors import InvalidRequestError
from offset_runtime.offset import Anchor, DomainOffset
from offset_runtime.placement import Placement

Logits = npt.NDArray[np.float32]

# Longest prompt of the suite. A test model with a sliding window should have a shorter one.
PROMPT_TOKENS = 20


class ContractError(AssertionError):
    """The backend breaks its contract; the message names the behaviour."""


@dataclass(slots=True)
class Trial:
    """A backend under test: what all behaviours of the suite need, and how they judge."""

    behaviour: str
    backend: Backend
    tolerance: float
    offset_size: float
    opened: list[SequenceId] = field(default_factory=list)

    def open(self) -> SequenceId:
        self.opened.append(self.backend.allocate())
        return self.opened[-1]

    def fork(self, sequence: SequenceId) -> SequenceId:
        self.opened.append(self.backend.fork(sequence))
        return self.opened[-1]

    def restore(self, tensors: Mapping[str, npt.NDArray[Any]]) -> SequenceId:
        self.opened.append(self.backend.import_state(tensors))
        return self.opened[-1]

    def close(self) -> None:
        for sequence in self.opened:
            self.backend.free(sequence)

    def prompt(self, seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
        """Random token ids, away from the special tokens at both ends of the vocabulary."""
        size = self.backend.identity.vocab_size
        return [int(i) for i in np.random.default_rng(seed).integers(int(size * 0.05), int(size * 0.9), tokens)]

    def offset(self, seed: int, positions: int = 3, anchor: Anchor = "turn") -> DomainOffset:
        """A random offset, `offset_size` times as large as rows of the embedding table."""
        identity = self.backend.identity
        sketch = np.frombuffer(base64.b64decode(identity.sketch), dtype="<f2").astype(np.float32)
        rows = (
            np.random.default_rng(seed).normal(size=(positions, identity.hidden_size)) * self.offset_size * sketch.std()
        )
        return DomainOffset(f"d{seed}", rows.astype(np.float32), anchor, "raw", identity)

    def feed(
        self, sequence: SequenceId, ids: Sequence[int], placements: Sequence[Placement] = (), kind: LogitsWanted = "all"
    ) -> Logits:
        return self.backend.forward([Chunk(sequence, ids, placements, kind)])[0]

    def run(self, ids: Sequence[int], placements: Sequence[Placement] = (), cuts: Sequence[int] = ()) -> Logits:
        """Logits of all positions of `ids`, fed to a new sequence in chunks cut at `cuts`."""
        sequence = self.open()
        bounds = [0, *cuts, len(ids)]
        rows = [self.feed(sequence, ids[a:b], placements) for a, b in pairwise(bounds)]
        self.backend.free(sequence)
        return np.concatenate(rows)

    def expect(self, condition: bool, message: str) -> None:
        if not condition:
            raise ContractError(f"backend {self.backend.name!r} breaks {self.behaviour!r}: {message}")

    def expect_equal(self, found: Logits, expected: Logits, what: str) -> None:
        self.expect(found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}")
        gap = float(np.abs(found - expected).max(initial=0.0))
        limit = self.tolerance * max(1.0, float(np.abs(expected).max(initial=0.0)))
        self.expect(gap <= limit, f"{what}: logits differ by {gap:.3g} (allowed: {limit:.3g})")

    def expect_different(self, found: Logits, expected: Logits, what: str) -> None:
        gap = np.abs(found - expected).max(axis=-1)
        limit = 5 * self.tolerance * max(1.0, float(np.abs(expected).max()))
        self.expect(bool((gap > limit).all()), f"{what}: rows {np.flatnonzero(gap <= limit).tolist()} are unchanged")

    def expect_refused(self, what: str, act: Callable[..., object], *arguments: object) -> None:
        try:
            act(*arguments)
        except InvalidRequestError:
            return
        except Exception as error:
            self.expect(False, f"{what} raises {error!r}, expected InvalidRequestError")
        self.expect(False, f"{what} is accepted, expected InvalidRequestError")
