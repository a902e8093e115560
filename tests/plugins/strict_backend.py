"""A fake backend that holds to all its limits, and counts what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from offset_runtime.backends.base import Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import KVCacheFullError

Logits = list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]


class StrictBackend(FakeBackend):
    """Refuses tokens beyond its capacity, each sequence counted as if it shared nothing."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.read_tokens = self.passes = 0

    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        new = sum(len(chunk.token_ids) for chunk in chunks)
        capacity = self.capabilities.kv_capacity_tokens
        if capacity is not None and sum(map(len, self._sequences.values())) + new > capacity:
            raise KVCacheFullError("the cache is full")
        found = super().forward(chunks)
        self.read_tokens += new
        self.passes += 1
        return found
