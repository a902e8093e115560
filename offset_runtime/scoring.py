"""Log-likelihood of given tokens under an offset, on any backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.layout import Example
from offset_runtime.offset import DomainOffset
from offset_runtime.placement import place
from offset_runtime.sampling import log_softmax

BATCH_TOKENS = 512

Array = npt.NDArray[np.float32]


def target_logprobs(backend: Backend, examples: Sequence[Example], offset: DomainOffset | None) -> list[Array]:
    """Log-probability of each target token of each example: arrays (targets,), float32, natural log."""
    results: list[Array] = []
    for example, logprobs in zip(examples, target_distributions(backend, examples, offset), strict=True):
        results.append(logprobs[np.arange(len(example.targets)), list(example.targets)])
    return results


def target_distributions(
    backend: Backend, examples: Sequence[Example], offset: DomainOffset | None
) -> Iterator[Array]:
    """Yield for each example the log-probabilities (targets, vocabulary) before each target token."""
    for batch in token_batches(examples, BATCH_TOKENS):
        yield from _batch_distributions(backend, batch, offset)


def token_batches(examples: Sequence[Example], limit: int) -> Iterator[list[Example]]:
    """Split examples, in order, into batches of at most `limit` tokens (or one example)."""
    batch: list[Example] = []
    size = 0
    for example in examples:
        tokens = len(example.token_ids)
        if batch and size + tokens > limit:
            yield batch
            batch, size = [], 0
        batch.append(example)
        size += tokens
    if batch:
        yield batch


def _batch_distributions(backend: Backend, batch: Sequence[Example], offset: DomainOffset | None) -> list[Array]:
    sequences = [backend.allocate() for _ in batch]
    try:
        heads, tails = [], []
        for sequence, example in zip(sequences, batch, strict=True):
            placements = () if offset is None else (place(offset, example.anchored_tokens),)
            fed = example.token_ids[:-1]
            head = len(fed) - len(example.targets)
            if head:
                heads.append(Chunk(sequence, fed[:head], placements, "none"))
            tails.append(Chunk(sequence, fed[head:], placements, "all"))
        if not backend.capabilities.split_prefill:
            tails = [Chunk(s, e.token_ids[:-1], t.placements, "all") for s, e, t in zip(sequences, batch, tails, strict=True)]
            heads = []
        if heads:
            backend.forward(heads)
        logits = backend.forward(tails)
        return [log_softmax(rows[-len(e.targets) :]) for rows, e in zip(logits, batch, strict=True)]
    finally:
        for sequence in sequences:
            backend.free(sequence)


def perplexity(logprobs: Sequence[Array]) -> float:
    """exp of the mean negative log-probability over all tokens of all arrays."""
    return float(np.exp(-np.concatenate(logprobs).mean(dtype=np.float64)))
