"""Log-likelihood of given tokens under offsets, on any backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offset_runtime.backends.base import Backend, Chunk, SequenceId
from offset_runtime.layout import Example
from offset_runtime.offset import DomainOffset
from offset_runtime.placement import Placement, place
from offset_runtime.sampling import log_softmax

BATCH_TOKENS = 512

# Log-probabilities held at once: 128 MiB in float32. Large vocabularies get smaller batches.
BATCH_LOGITS = 1 << 25

Array = npt.NDArray[np.float32]
Column = DomainOffset | None


def target_logprobs(backend: Backend, examples: Sequence[Example], offset: Column) -> list[Array]:
    """Log-probability of each target token of each example: arrays (targets,), float32, natural log."""
    return [pick_targets(e, d) for e, d in zip(examples, target_distributions(backend, examples, offset), strict=True)]


def target_distributions(backend: Backend, examples: Sequence[Example], offset: Column) -> Iterator[Array]:
    """Yield for each example the log-probabilities (targets, vocabulary) before each target token."""
    for _, _, distributions in distributions_under(backend, examples, [offset]):
        yield from distributions


def distributions_under(
    backend: Backend, examples: Sequence[Example], offsets: Sequence[Column]
) -> Iterator[tuple[list[Example], int, list[Array]]]:
    """Yield (a batch of examples, index into `offsets`, log-probabilities (targets, vocabulary) of each).

    Every batch comes under each offset in turn, None being the plain base; the tokens before the
    first placement are fed once for all of them.
    """
    sizes = [len(example.token_ids) for example in examples]
    # A shared head and its fork are open at the same time.
    most = backend.capabilities.max_sequences
    for run in batches(sizes, tokens=_batch_tokens(backend), sequences=most and max(1, most // 2)):
        batch = [examples[i] for i in run]
        placed = [[None if offset is None else place(offset, e.anchored_tokens) for offset in offsets] for e in batch]
        items = [_Item(e, _split(backend, e, row)) for e, row in zip(batch, placed, strict=True)]
        heads: dict[int, SequenceId] = {}
        try:
            if len(offsets) > 1 and backend.capabilities.fork and most != 1:
                _feed_heads(backend, items, heads)
            for column in range(len(offsets)):
                yield batch, column, _distributions(backend, items, heads, [row[column] for row in placed])
        finally:
            for sequence in heads.values():
                backend.free(sequence)


def pick_targets(example: Example, distributions: Array) -> Array:
    """Pick the log-probabilities (targets,) of the target tokens out of (targets, vocabulary)."""
    return distributions[np.arange(len(example.targets)), list(example.targets)]


def batches(sizes: Sequence[int], *, tokens: int, sequences: int | None = None) -> Iterator[range]:
    """Split items of these sizes, in order, into runs of at most `tokens` (or one item) and `sequences` items."""
    first, held = 0, 0
    for at, size in enumerate(sizes):
        if at > first and (held + size > tokens or at - first == sequences):
            yield range(first, at)
            first, held = at, 0
        held += size
    if sizes:
        yield range(first, len(sizes))


def perplexity(logprobs: Sequence[Array]) -> float:
    """exp of the mean negative log-probability over all tokens of all arrays."""
    return float(np.exp(-np.concatenate(logprobs).mean(dtype=np.float64)))


@dataclass(frozen=True, slots=True)
class _Item:
    """An example, and how many of its tokens are fed first, before every placement that does not begin there."""

    example: Example
    head: int

    @property
    def fed(self) -> tuple[int, ...]:
        return self.example.token_ids[:-1]


def _batch_tokens(backend: Backend) -> int:
    limits = [BATCH_TOKENS, BATCH_LOGITS // backend.identity.vocab_size]
    if backend.capabilities.kv_capacity_tokens is not None:
        # A shared head and its fork are open at the same time.
        limits.append(backend.capabilities.kv_capacity_tokens // 2)
    return max(1, min(limits))


def _split(backend: Backend, example: Example, placements: Sequence[Placement | None]) -> int:
    if not backend.capabilities.split_prefill:
        return 0
    before_targets = len(example.token_ids) - 1 - len(example.targets)
    turns = [p.index for p in placements if p is not None and p.offset.anchor == "turn"]
    return min([before_targets, *turns])


def _feed_heads(backend: Backend, items: Sequence[_Item], heads: dict[int, SequenceId]) -> None:
    """Feed the head of each item that has one, without offset; put the sequences into `heads`, by item index."""
    for i, item in enumerate(items):
        if item.head:
            # One by one, so that those already open are known when there is no room for the next.
            heads[i] = backend.allocate()
    if heads:
        backend.forward([Chunk(s, items[i].fed[: items[i].head], (), "none") for i, s in heads.items()])


def _distributions(
    backend: Backend, items: Sequence[_Item], heads: dict[int, SequenceId], placements: Sequence[Placement | None]
) -> list[Array]:
    opened: list[SequenceId] = []
    own_heads, tails = [], []
    try:
        for i, (item, placement) in enumerate(zip(items, placements, strict=True)):
            placed = () if placement is None else (placement,)
            if i in heads and all(p.index >= item.head for p in placed):
                opened.append(backend.fork(heads[i]))
            else:
                opened.append(backend.allocate())
                if item.head:
                    own_heads.append(Chunk(opened[-1], item.fed[: item.head], placed, "none"))
            tails.append(Chunk(opened[-1], item.fed[item.head :], placed, "all"))
        if own_heads:
            backend.forward(own_heads)
        logits = backend.forward(tails)
        return [log_softmax(rows[-len(i.example.targets) :]) for rows, i in zip(logits, items, strict=True)]
    finally:
        for sequence in opened:
            backend.free(sequence)
