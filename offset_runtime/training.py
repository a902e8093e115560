"""Learning a domain offset: all weights frozen, K x d numbers trained on about 100 documents."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional

from offset_runtime.backends.base import Chunk
from offset_runtime.backends.executors import Feed
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.layout import Example
from offset_runtime.offset import Anchor, PromptFormat

_log = logging.getLogger(__name__)


class TrainingSettings(BaseModel):
    """How an offset is trained. The defaults suit agents: chat format, turn anchor, retention held.

    `positions`: K. `max_tokens`: tokens a document is cut at. `learning_rate`: Adam's, decayed to a
    tenth along a cosine. `batch_size`: documents a step. `l2`: weight of the sum of squares of δ.
    `retention_weight`: weight of KL(base || with offset) on the base's own replies; 0 leaves the term
    out, as in the paper. `validate_every`: steps between two looks at the validation split.
    `patience`: looks without a better one before training stops.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_format: PromptFormat = "chat"
    anchor: Anchor = "turn"
    positions: int = Field(default=8, ge=1)
    max_tokens: int = Field(default=64, ge=8)
    learning_rate: float = Field(default=1e-2, gt=0)
    batch_size: int = Field(default=8, ge=1)
    steps: int = Field(default=36, ge=1)
    l2: float = Field(default=0.01, ge=0)
    retention_weight: float = Field(default=2.0, ge=0)
    validate_every: int = Field(default=6, ge=1)
    patience: int = Field(default=3, ge=1)
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An example with what does not depend on the offset computed once.

    `start`: first position that is fed with gradient; before it lies `prefix`, the state of the
    positions before the anchor. `base`: log-probabilities of the base (targets, vocabulary) in
    float16, for the retention term only.
    """

    example: Example
    start: int
    first_row: int
    prefix: object | None
    base: Tensor | None = None


class Objective:
    """Loss of a batch of prepared examples as a function of δ (K, d)."""

    def __init__(self, backend: TorchBackend, settings: TrainingSettings) -> None:
        self._backend = backend
        self._settings = settings
        self._sequences: list[int] = []

    def prepare(self, examples: Sequence[Example], *, keep_base: bool = False) -> list[Prepared]:
        prepared = []
        for i in range(0, len(examples), 8):
            prepared.extend(self._prepare_batch(examples[i : i + 8], keep_base))
        return prepared

    def _prepare_batch(self, examples: Sequence[Example], keep_base: bool) -> list[Prepared]:
        backend, settings = self._backend, self._settings
        result = []
        chunks = []
        sequences = []
        for example in examples:
            index = 0
            if settings.anchor == "turn":
                index = max(0, example.anchored_tokens - settings.positions)
            usable = index if backend.capabilities.truncate else 0
            sequence = backend.allocate()
            sequences.append(sequence)
            if usable:
                chunks.append(Chunk(sequence, example.token_ids[:usable], (), "none"))
            prefix = backend._states[sequence] if usable else None
            result.append(Prepared(example, usable, index, prefix))
        backend.forward(chunks)
        if keep_base:
            with torch.no_grad():
                delta = torch.zeros(settings.positions, backend.identity.hidden_size)
                logits = self.logits(result, delta)
            result = [
                Prepared(p.example, p.start, p.first_row, p.prefix, l.log_softmax(-1).half())
                for p, l in zip(result, logits, strict=True)
            ]
        self._sequences.extend(sequences)
        return result

    def logits(self, batch: Sequence[Prepared], delta: Tensor) -> list[Tensor]:
        feeds = []
        for item in batch:
            ids = item.example.token_ids[item.start : -1]
            embeddings = self._backend.embed(ids)
            row = item.first_row - item.start
            rows = min(delta.shape[0], len(ids) - row)
            embeddings = embeddings + functional.pad(delta[:rows], (0, 0, row, len(ids) - row - rows))
            n = len(item.example.targets)
            feeds.append(Feed(item.prefix, embeddings, range(len(ids) - n, len(ids))))
        return self._backend.executor.forward_grad(feeds)

    def nll(self, batch: Sequence[Prepared], delta: Tensor) -> Tensor:
        logits = torch.cat(self.logits(batch, delta))
        targets = torch.tensor([t for p in batch for t in p.example.targets])
        return functional.cross_entropy(logits, targets)

    def kl(self, batch: Sequence[Prepared], delta: Tensor) -> Tensor:
        logits = torch.cat(self.logits(batch, delta)).log_softmax(-1)
        base = torch.cat([p.base for p in batch]).float()
        return functional.kl_div(logits, base, log_target=True, reduction="batchmean")
