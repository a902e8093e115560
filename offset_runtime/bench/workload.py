"""What the cases run: prompts, random offsets, and groups of requests whose every token is timed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from offset_runtime.backends.base import Backend, Tokenizer
from offset_runtime.bench.case import LeftOutError
from offset_runtime.engine import Engine, EngineSettings
from offset_runtime.identity import BaseIdentity
from offset_runtime.offset import Anchor, DomainOffset
from offset_runtime.placement import place
from offset_runtime.request import Completion, Delta, Event, Request
from offset_runtime.sampling import SamplingParams

ROWS = 8
# Requests, and domains, of the cases that run several at once.
GROUP = 8
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 32

# Prompts repeat in most cases, and both sides of a ratio must read them.
NO_CACHE = EngineSettings(cache_bytes=0)
# What a case of the cache asks of it fits whatever the model: the memory alone is the limit.
CACHE = EngineSettings(cache_bytes=2**50)

SENTENCE = "The harbour lies at the mouth of the river, where the old road from the hills comes down to the sea."
PARAGRAPH = (
    f"{SENTENCE} In spring "
    "the boats go out before it is light and come home with the tide. On the quay there is a market every Saturday, "
    "and people walk over from the villages to buy fish, bread and news. The school stands behind the church, and "
    "from its upper windows the children see the ferry long before anyone else does. When the fog is thick the "
    "keeper of the lighthouse rings a bell, once a minute, until the last boat is in. "
)


def prompt(tokenizer: Tokenizer, tokens: int, *, start: int = 0) -> tuple[int, ...]:
    """The first `tokens` token ids of a fixed English text that repeats, read from token `start` of it on."""
    text = tokenizer.encode(PARAGRAPH)
    return tuple(text[(start + at) % len(text)] for at in range(tokens))


def random_offset(identity: BaseIdentity, number: int = 0, anchor: Anchor = "turn") -> DomainOffset:
    """A random offset of `ROWS` rows, each of norm 1, about that of a trained one.

    `number` seeds it and names its domain ``bench-<number>``.
    """
    rows = np.random.default_rng(number).normal(size=(ROWS, identity.hidden_size))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return DomainOffset(
        domain=f"bench-{number}",
        tensor=rows.astype(np.float32),
        anchor=anchor,
        prompt_format="raw",
        base=identity,
    )


def request(
    token_ids: Sequence[int], offset: DomainOffset | None = None, output_tokens: int = OUTPUT_TOKENS
) -> Request:
    """A greedy request for `output_tokens` tokens."""
    placements = () if offset is None else (place(offset, len(token_ids)),)
    return Request(tuple(token_ids), placements, SamplingParams(max_tokens=output_tokens))


def check_room(backend: Backend, tokens: int, *, sequences: int = 1) -> None:
    """Raise `LeftOutError` unless `sequences` sequences of `tokens` tokens each fit the model at once.

    The engine would run them a few at a time, and another thing would be measured.
    """
    found = backend.capabilities
    if found.context_tokens < tokens:
        raise LeftOutError(f"needs a context of {tokens} tokens; this model has {found.context_tokens}")
    if found.max_sequences is not None and found.max_sequences < sequences:
        raise LeftOutError(f"needs {sequences} sequences at once; this model is loaded for {found.max_sequences}")
    if found.kv_capacity_tokens is not None and found.kv_capacity_tokens < sequences * tokens:
        raise LeftOutError(
            f"needs a KV cache of {sequences * tokens} tokens; this model is loaded with {found.kv_capacity_tokens}"
        )


def check_cache(backend: Backend, entries: int) -> None:
    """Raise `LeftOutError` unless the engine can keep the state of `entries` ended requests beside running ones."""
    found, running = backend.capabilities, CACHE.max_running
    if not (found.fork and found.split_prefill):
        raise LeftOutError("needs a prefix cache; the state of this model cannot be kept for other requests")
    if found.max_sequences is not None and found.max_sequences < running + entries:
        raise LeftOutError(
            f"needs room for {entries} cached sequences beside {running} running ones; this model is loaded for "
            f"{found.max_sequences} in all"
        )


@contextmanager
def endless_engine(backend: Backend, settings: EngineSettings = NO_CACHE) -> Iterator[Engine]:
    """An engine in which no reply ends before its most tokens, so that both sides of a ratio do equal work.

    Unless `settings` give it a prefix cache it has none: a prompt that repeats is read again.
    """
    with Engine(cast(Backend, _EndlessBackend(backend)), settings) as engine:
        yield engine


class _EndlessTokenizer:
    """A tokenizer whose end tokens are tokens as any other."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _EndlessBackend:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.tokenizer = _EndlessTokenizer(backend.tokenizer)
        # Kept here, so that the engine's steps do not pay for the detour.
        self.forward = backend.forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@dataclass(slots=True)
class _Reply:
    """What came of one request: when each token came, in seconds of the performance counter, and how it ended."""

    token_times: list[float] = field(default_factory=list)
    end: Completion | Exception | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that ran together.

    `seconds`: from their submission, all at once, to the last one's end. `first_token_s`: until every request
    had its first token. `decode_tokens`, `decode_s`: tokens, and time, after that.
    """

    completions: tuple[Completion, ...]
    seconds: float
    first_token_s: float
    decode_tokens: int
    decode_s: float


def run_together(engine: Engine, requests: Sequence[Request]) -> Group:
    """Run requests in one batch, and wait for them. Raises what a request ends with, if it is an error."""
    replies = [_Reply() for _ in requests]
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def sink(reply: _Reply, event: Event) -> None:
        if isinstance(event, Delta):
            reply.token_times.append(time.perf_counter())
        else:
            reply.end = event
            ended.put(None)

    # A single one needs no holding; and what holds the engine would be in the cache before it.
    with _held(engine, requests[0].prompt_ids[:1]) if len(requests) > 1 else nullcontext():
        began = time.perf_counter()
        for reply, wanted in zip(replies, requests, strict=True):
            engine.submit(wanted, lambda event, reply=reply: sink(reply, event))  # type: ignore[misc]
    for _ in requests:
        ended.get()
    return _group(replies, began, time.perf_counter())


def _group(replies: Sequence[_Reply], began: float, ended: float) -> Group:
    completions = []
    for reply in replies:
        if isinstance(reply.end, Exception):
            raise reply.end
        assert reply.end is not None
        completions.append(reply.end)
    decoding = max(reply.token_times[0] for reply in replies)
    tokens = sum(at > decoding for reply in replies for at in reply.token_times)
    decode_s = max(reply.token_times[-1] for reply in replies) - decoding
    return Group(tuple(completions), ended - began, decoding - began, tokens, decode_s)


@contextmanager
def _held(engine: Engine, token_ids: Sequence[int]) -> Iterator[None]:
    """Hold the engine's thread while requests are submitted: otherwise the first ones would run alone for a while."""
    held, release = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        held.set()
        release.wait()

    engine.submit(Request(tuple(token_ids), sampling=SamplingParams(max_tokens=0)), hold)
    held.wait()
    try:
        yield
    finally:
        release.set()
