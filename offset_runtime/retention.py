"""Retention: how far an offset leaves the base model's behaviour on everything else as it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import numpy as np

from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.chat import chat_prompt
from offset_runtime.layout import Example
from offset_runtime.offset import DomainOffset
from offset_runtime.scoring import perplexity, target_distributions

Split = Literal["train", "validation", "test"]
REPLY_TOKENS = 32
BATCH = 16


@dataclass(frozen=True, slots=True)
class Retention:
    """How the base's own replies to generic instructions fare under an offset.

    `kl`: mean over reply tokens of KL(base || with offset), in nats. `reply_perplexity_without` and
    `reply_perplexity_with`: perplexity of the replies without and with the offset.
    """

    kl: float
    reply_perplexity_without: float
    reply_perplexity_with: float

    def as_json(self) -> dict[str, Any]:
        return {
            "kl": self.kl,
            "reply_perplexity_without": self.reply_perplexity_without,
            "reply_perplexity_with": self.reply_perplexity_with,
        }


@cache
def instructions(split: Split) -> tuple[str, ...]:
    """Return the generic instructions of a split; no instruction is in two."""
    data = resources.files("offset_runtime").joinpath("data/instructions.json").read_text(encoding="utf-8")
    return tuple(json.loads(data)[split])


def base_replies(backend: Backend, split: Split, *, reply_tokens: int = REPLY_TOKENS) -> list[Example]:
    """The base's own greedy replies to the instructions of `split`, at most `reply_tokens` tokens each."""
    prompts = [instruction_prompt(backend, text) for text in instructions(split)]
    examples: list[Example] = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        replies = greedy_replies(backend, part, reply_tokens)
        examples.extend(Example(tuple(p), tuple(r)) for p, r in zip(part, replies, strict=True))
    return examples


def instruction_prompt(backend: Backend, text: str) -> list[int]:
    """Token ids of one instruction, under the chat template or as plain text where there is none."""
    tokenizer = backend.tokenizer
    if tokenizer.has_chat_template:
        return chat_prompt(tokenizer, [{"role": "user", "content": text}])
    return tokenizer.encode(text + "\n")


def measure_retention(backend: Backend, replies: Sequence[Example], offset: DomainOffset) -> Retention:
    """Compare the base with and without `offset` on the base's own replies."""
    divergences, without, with_offset = [], [], []
    pairs = zip(target_distributions(backend, replies, None), target_distributions(backend, replies, offset), strict=True)
    for example, (base, ours) in zip(replies, pairs, strict=True):
        divergences.append((np.exp(base) * (base - ours)).sum(axis=1))
        rows, targets = np.arange(len(example.targets)), list(example.targets)
        without.append(base[rows, targets])
        with_offset.append(ours[rows, targets])
    return Retention(
        kl=max(0.0, float(np.concatenate(divergences).mean())),
        reply_perplexity_without=perplexity(without),
        reply_perplexity_with=perplexity(with_offset),
    )


def greedy_replies(backend: Backend, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy replies of the base, without offset; the token that ends a reply belongs to it."""
    sequences = [backend.allocate() for _ in prompts]
    replies: list[list[int]] = [[] for _ in prompts]
    try:
        chunks = [Chunk(s, list(p)) for s, p in zip(sequences, prompts, strict=True)]
        active = list(range(len(prompts)))
        while active:
            logits = backend.forward([chunks[i] for i in active])
            going = []
            for i, rows in zip(active, logits, strict=True):
                token = int(rows[0].argmax())
                replies[i].append(token)
                if token not in backend.tokenizer.eos_token_ids and len(replies[i]) < max_tokens:
                    chunks[i] = Chunk(sequences[i], [token])
                    going.append(i)
            active = going
        return replies
    finally:
        for sequence in sequences:
            backend.free(sequence)
