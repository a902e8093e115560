"""Retention: how far an offset leaves the base model's behaviour on everything else as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

import numpy as np

from offset_runtime.backends.base import Backend, Chunk, SequenceId
from offset_runtime.chat import chat_prompt
from offset_runtime.errors import InvalidRequestError
from offset_runtime.layout import Example
from offset_runtime.offset import DomainOffset
from offset_runtime.scoring import Array, batches, distributions_under, perplexity, pick_targets

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
Progress = Callable[[int], None]
REPLY_TOKENS = 32
BATCH = 16

# Most nats of KL at which the base still follows instructions as before (docs/evaluation.md).
KL_BUDGET = 0.05


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
def instructions(split: Split) -> tuple[tuple[str | None, str], ...]:
    """Return the (system prompt or None, generic instruction) pairs of a split; no two splits share one."""
    data = json.loads(resources.files("offset_runtime").joinpath("data/instructions.json").read_text(encoding="utf-8"))
    systems = data["system_prompts"][split]
    # Agents speak under a system prompt, a plain chat without one: every second has one.
    return tuple(
        (systems[i // 2 % len(systems)] if i % 2 else None, instruction) for i, instruction in enumerate(data[split])
    )


def base_replies(backend: Backend, split: Split, *, reply_tokens: int = REPLY_TOKENS) -> list[Example]:
    """The base's own greedy replies to the instructions of `split`, at most `reply_tokens` tokens each.

    Instructions that fill the context are left out. Raises `InvalidRequestError` where all of them do.
    """
    prompts = [instruction_prompt(backend, text, system) for system, text in instructions(split)]
    context = backend.capabilities.context_tokens
    prompts = [prompt for prompt in prompts if len(prompt) < context]
    if not prompts:
        raise InvalidRequestError(f"retention cannot be measured: no instruction fits the context of {context} tokens")
    examples: list[Example] = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        replies = greedy_replies(backend, part, reply_tokens)
        examples.extend(Example(tuple(p), tuple(r)) for p, r in zip(part, replies, strict=True))
    return examples


def instruction_prompt(backend: Backend, text: str, system: str | None = None) -> list[int]:
    """Token ids of one instruction, under the chat template or as plain text where there is none."""
    tokenizer = backend.tokenizer
    if not tokenizer.has_chat_template:
        return tokenizer.encode(f"{system}\n{text}\n" if system else f"{text}\n")
    messages = [{"role": "system", "content": system}] if system else []
    return chat_prompt(tokenizer, [*messages, {"role": "user", "content": text}])


def measure_retention(backend: Backend, replies: Sequence[Example], offset: DomainOffset) -> Retention:
    """Compare the base with and without `offset` on the base's own replies."""
    return measure_retentions(backend, replies, [offset])[0]


def measure_retentions(
    backend: Backend, replies: Sequence[Example], offsets: Sequence[DomainOffset], *, progress: Progress | None = None
) -> list[Retention]:
    """Compare the base with each of `offsets`; the base itself runs once.

    `progress` is called with the number of (reply, offset or base) pairs just done.
    """
    tallies = [_Tally() for _ in offsets]
    base: list[Array] = []
    for batch, column, distributions in distributions_under(backend, replies, [None, *offsets]):
        if column == 0:
            base = distributions
        else:
            for example, without, ours in zip(batch, base, distributions, strict=True):
                tallies[column - 1].add(example, without, ours)
        if progress:
            progress(len(batch))
    return [tally.retention() for tally in tallies]


class _Tally:
    """What has been measured of one offset so far."""

    def __init__(self) -> None:
        self._divergences: list[Array] = []
        self._without: list[Array] = []
        self._with: list[Array] = []

    def add(self, example: Example, base: Array, ours: Array) -> None:
        self._divergences.append((np.exp(base) * (base - ours)).sum(axis=1))
        self._without.append(pick_targets(example, base))
        self._with.append(pick_targets(example, ours))

    def retention(self) -> Retention:
        return Retention(
            # Rounding can leave a tiny negative sum where the two agree.
            kl=max(0.0, float(np.concatenate(self._divergences).mean(dtype=np.float64))),
            reply_perplexity_without=perplexity(self._without),
            reply_perplexity_with=perplexity(self._with),
        )


def greedy_replies(backend: Backend, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy replies of the base, without offset; the token that ends a reply belongs to it.

    A reply ends with its end token, at `max_tokens` or at the end of the context.
    """
    found = backend.capabilities
    sizes = [len(prompt) + max_tokens for prompt in prompts]
    room = found.kv_capacity_tokens or sum(sizes)
    replies: list[list[int]] = []
    for run in batches(sizes, tokens=room, sequences=found.max_sequences):
        replies.extend(_replies_together(backend, [prompts[i] for i in run], max_tokens))
    return replies


def _replies_together(backend: Backend, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    context = backend.capabilities.context_tokens
    sequences: list[SequenceId] = []
    replies: list[list[int]] = [[] for _ in prompts]
    try:
        sequences.extend(backend.allocate() for _ in prompts)
        chunks = [Chunk(s, list(p)) for s, p in zip(sequences, prompts, strict=True)]
        active = list(range(len(prompts)))
        while active:
            logits = backend.forward([chunks[i] for i in active])
            going = []
            for i, rows in zip(active, logits, strict=True):
                token = int(rows[0].argmax())
                replies[i].append(token)
                limit = min(max_tokens, context - len(prompts[i]))
                if token not in backend.tokenizer.eos_token_ids and len(replies[i]) < limit:
                    chunks[i] = Chunk(sequences[i], [token])
                    going.append(i)
            active = going
        return replies
    finally:
        for sequence in sequences:
            backend.free(sequence)
