"""The training loss as a function of δ, with everything that does not depend on δ computed once.

With a turn anchor nothing before the anchor depends on δ, so its keys and values are computed once,
without gradient. So are the base's own log-probabilities for the retention term.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from offset_runtime.backends.base import Chunk, SequenceId
from offset_runtime.backends.executors import Feed
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.layout import Example
from offset_runtime.offset import Anchor
from offset_runtime.placement import anchor_index

# Tokens in one differentiable pass; larger batches are split and their gradients added up. On
# SmolLM2-135M in float32 a pass keeps about 1.1 MB of activations a token (docs/evaluation.md).
PASS_TOKENS = 640

# State of prefixes that is kept between steps; examples beyond it are fed from their first token in
# every step, which costs time and not memory.
PREFIX_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """An example ready for differentiable passes.

    `start`: first position fed with gradient; the positions before it are in `prefix`. `anchor`:
    position of δ's first row. `base`: the base's log-probabilities (targets, vocabulary), float16.
    """

    example: Example
    start: int
    anchor: int
    prefix: Any
    base: Tensor | None = None

    @property
    def fed_tokens(self) -> int:
        return len(self.example.token_ids) - 1 - self.start


class Objective:
    """Losses of prepared examples under δ (K, d). Holds the prefixes' state until `close`."""

    def __init__(self, backend: TorchBackend, domain: str, anchor: Anchor, positions: int) -> None:
        self._backend, self._domain, self._anchor, self._positions = backend, domain, anchor, positions
        self._sequences: list[SequenceId] = []
        self._prefix_bytes = 0
        self.hidden_size = backend.identity.hidden_size

    def close(self) -> None:
        """Free the state of all prefixes."""
        while self._sequences:
            self._backend.free(self._sequences.pop())

    def prepare(self, examples: Sequence[Example], *, keep_base: bool = False) -> list[Prepared]:
        """Compute the prefixes of `examples`, and with `keep_base` the base's log-probabilities.

        Raises `PlacementError` where a prompt has fewer tokens than a turn-anchored offset has positions.
        """
        prepared = [self._prepare(example) for example in examples]
        if not keep_base:
            return prepared
        zero = torch.zeros(self._positions, self.hidden_size)
        with torch.no_grad():
            bases = [logits.log_softmax(-1).half() for part in _passes(prepared) for logits in self._logits(part, zero)]
        return [replace(item, base=base) for item, base in zip(prepared, bases, strict=True)]

    def document_step(self, batch: Sequence[Prepared], delta: Tensor) -> float:
        """Add the gradient of the mean next-token loss (nats) of `batch` to δ's; return the loss."""
        return self._accumulate(batch, delta, self._summed_nll)

    def retention_step(self, batch: Sequence[Prepared], delta: Tensor, weight: float) -> float:
        """Add the gradient of `weight` times the mean KL(base || with offset); return that value."""
        return self._accumulate(batch, delta, lambda part, d: weight * self._summed_kl(part, d))

    def penalty_step(self, delta: Tensor, weight: float) -> float:
        """Add the gradient of `weight` times the sum of squares of δ; return that value."""
        loss = weight * delta.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def document_loss(self, batch: Sequence[Prepared], delta: Tensor) -> float:
        """Mean next-token loss of `batch` in nats, without gradient."""
        with torch.no_grad():
            return sum(self._summed_nll(part, delta).item() for part in _passes(batch)) / _targets(batch)

    def divergence(self, batch: Sequence[Prepared], delta: Tensor) -> float:
        """Mean KL(base || with offset) over the target tokens of `batch` in nats, without gradient."""
        with torch.no_grad():
            return sum(self._summed_kl(part, delta).item() for part in _passes(batch)) / _targets(batch)

    def _accumulate(self, batch: Sequence[Prepared], delta: Tensor, summed: Any) -> float:
        total, count = 0.0, _targets(batch)
        for part in _passes(batch):
            loss = summed(part, delta) / count
            loss.backward()
            total += loss.item()
        return total

    def _summed_nll(self, batch: Sequence[Prepared], delta: Tensor) -> Tensor:
        logits = torch.cat(self._logits(batch, delta)).float()
        targets = torch.tensor([t for item in batch for t in item.example.targets], device=logits.device)
        return functional.cross_entropy(logits, targets, reduction="sum")

    def _summed_kl(self, batch: Sequence[Prepared], delta: Tensor) -> Tensor:
        ours = torch.cat(self._logits(batch, delta)).float().log_softmax(-1)
        base = torch.cat([item.base for item in batch if item.base is not None]).float()
        return functional.kl_div(ours, base, log_target=True, reduction="sum")

    def _logits(self, batch: Sequence[Prepared], delta: Tensor) -> list[Tensor]:
        feeds = []
        for item in batch:
            embeddings = self._backend.embed(item.example.token_ids[item.start : -1])
            count = embeddings.shape[0]
            row = item.anchor - item.start
            rows = min(self._positions, count - row)
            shift = functional.pad(delta[:rows], (0, 0, row, count - row - rows)).to(embeddings)
            targets = len(item.example.targets)
            feeds.append(Feed(item.prefix, embeddings + shift, range(count - targets, count)))
        return self._backend.executor.forward_grad(feeds)

    def _prepare(self, example: Example) -> Prepared:
        anchor = anchor_index(self._anchor, self._positions, example.anchored_tokens, domain=self._domain)
        # A recurrent state cannot be shared by passes with gradient, so such models start at 0.
        start = anchor if self._backend.capabilities.truncate else 0
        if start == 0 or self._prefix_bytes > PREFIX_BYTES:
            return Prepared(example, 0, anchor, self._backend.executor.new_state())
        sequence = self._backend.allocate()
        self._sequences.append(sequence)
        self._backend.forward([Chunk(sequence, example.token_ids[:start], (), "none")])
        state = self._backend.state(sequence)
        self._prefix_bytes += state.bytes()
        return Prepared(example, start, anchor, state)


def _targets(batch: Sequence[Prepared]) -> int:
    return sum(len(item.example.targets) for item in batch)


def _passes(batch: Sequence[Prepared]) -> Iterator[list[Prepared]]:
    """Split a batch into parts of at most PASS_TOKENS tokens (or one example)."""
    part: list[Prepared] = []
    tokens = 0
    for item in batch:
        if part and tokens + item.fed_tokens > PASS_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(item)
        tokens += item.fed_tokens
    if part:
        yield part
