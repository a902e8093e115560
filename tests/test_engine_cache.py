"""The engine's prefix cache: what is read once is not read again, and no reply shows that it was not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offset_runtime import DomainOffset, EngineSettings, LlamaCppOptions, Request, SamplingParams
from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.engine import Engine
from offset_runtime.errors import GenerationError, InvalidRequestError, KVCacheFullError, RequestCancelledError
from offset_runtime.placement import place
from offset_runtime.request import Completion
from offset_runtime.stream import Stream

MakeOffset = Callable[..., DomainOffset]
Logits = list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]

IDENTITY = FakeBackend().identity
NO_CACHE = EngineSettings(cache_bytes=0)


class StrictBackend(FakeBackend):
    """A fake that holds to all its limits, counts the tokens it reads, and may lack truncate."""

    def __init__(self, *, truncates: bool = True, **limits: int | None) -> None:
        super().__init__(**limits)  # type: ignore[arg-type]
        self.read_tokens = 0
        if not truncates:
            self.capabilities = replace(self.capabilities, truncate=False)

    def truncate(self, sequence: int, tokens: int) -> None:
        if not self.capabilities.truncate:
            raise InvalidRequestError("cannot cut a sequence back")
        super().truncate(sequence, tokens)

    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        new = sum(len(chunk.token_ids) for chunk in chunks)
        capacity = self.capabilities.kv_capacity_tokens
        if capacity is not None and sum(map(len, self._sequences.values())) + new > capacity:
            raise KVCacheFullError("the cache is full")
        found = super().forward(chunks)
        self.read_tokens += new
        return found


def offset(seed: int, anchor: str, positions: int = 3, domain: str = "x") -> DomainOffset:
    rows = np.random.default_rng(seed).normal(size=(positions, IDENTITY.hidden_size)).astype(np.float32)
    return DomainOffset(domain, rows, anchor, "chat", IDENTITY)  # type: ignore[arg-type]


def ask(
    ids: Sequence[int], found: DomainOffset | None = None, *, max_tokens: int = 4, score_from: int | None = None
) -> Request:
    placements = () if found is None else (place(found, len(ids)),)
    return Request(tuple(ids), placements, SamplingParams(max_tokens=max_tokens), None, score_from)


def run(engine: Engine, request: Request) -> Completion:
    return Stream(engine, request).result()


def cold(request: Request) -> Completion:
    with Engine(FakeBackend(), NO_CACHE) as engine:
        return run(engine, request)


# Any tree of agents


@dataclass(frozen=True)
class Step:
    """One agent's call: which transcript it goes on from, what it adds, its domain, and whether it is stopped."""

    parent: int
    keeps: int
    turn: tuple[int, ...]
    domain: int
    max_tokens: int
    scored: bool
    cancelled: bool
    waits: bool


STEPS = st.builds(
    Step,
    parent=st.integers(0, 30),
    keeps=st.integers(0, 60),
    # Few different tokens, so that turns often begin alike.
    turn=st.lists(st.integers(65, 67), min_size=1, max_size=8).map(tuple),
    domain=st.integers(0, 5),
    max_tokens=st.integers(0, 5),
    scored=st.booleans(),
    cancelled=st.sampled_from([False, False, False, True]),
    waits=st.booleans(),
)


@given(
    steps=st.lists(STEPS, min_size=14, max_size=24),
    renewed=st.integers(0, 24),
    cache_bytes=st.sampled_from([600, 3_000, 20_000, 10**9]),
    capacity=st.sampled_from([None, 90, 150]),
    max_sequences=st.sampled_from([None, 1, 4, 9]),
    max_step_tokens=st.integers(1, 40),
    truncates=st.booleans(),
)
@settings(max_examples=150)
def test_every_reply_in_any_tree_of_agents_is_what_a_cold_run_gives(
    steps: list[Step],
    renewed: int,
    cache_bytes: int,
    capacity: int | None,
    max_sequences: int | None,
    max_step_tokens: int,
    truncates: bool,
) -> None:
    backend = StrictBackend(
        truncates=truncates, context_tokens=80, kv_capacity_tokens=capacity, max_sequences=max_sequences
    )
    limits = EngineSettings(max_running=3, max_step_tokens=max_step_tokens, cache_bytes=cache_bytes)
    transcripts: list[tuple[int, ...]] = [(66,) * 10]
    running: list[tuple[Request, Stream, bool]] = []
    with Engine(backend, limits) as engine:
        for number, step in enumerate(steps):
            history = transcripts[step.parent % len(transcripts)][: step.keeps]
            ids = (*history, *step.turn)[:70]
            # A domain is registered anew half way: the same name and anchor, other rows.
            seed = step.domain + (100 if number >= renewed else 0)
            anchor = "turn" if step.domain % 2 else "sequence"
            domain = None if step.domain > 3 else offset(seed, anchor, min(3, len(ids)), f"d{step.domain}")
            scored = step.scored and len(ids) > 1
            request = ask(
                ids,
                domain,
                max_tokens=0 if scored else step.max_tokens,
                score_from=max(1, len(ids) // 2) if scored else None,
            )
            stream = Stream(engine, request)
            running.append((request, stream, step.cancelled))
            if step.cancelled:
                stream.cancel()
            elif step.waits:
                transcripts.append((*ids, *stream.result().token_ids))
            figures = engine.cache_figures
            assert figures.bytes <= cache_bytes
            if max_sequences is not None:
                assert figures.entries <= max(0, max_sequences - 3)
        for request, stream, cancelled in running:
            try:
                found = stream.result()
            except RequestCancelledError:
                assert cancelled
                continue
            expected = cold(request)
            assert found.token_ids == expected.token_ids
            np.testing.assert_array_equal(found.prompt_logprobs, expected.prompt_logprobs)
            assert found.usage.cached_tokens < len(request.prompt_ids)
        assert backend.open_sequences == engine.cache_figures.entries
        assert backend.state_bytes() == engine.cache_figures.bytes
    assert backend.open_sequences == 0


# What is shared


def test_the_same_request_again_reads_one_token() -> None:
    backend, request = StrictBackend(), ask(b"the same prompt")
    with Engine(backend) as engine:
        first = run(engine, request)
        before = backend.read_tokens
        again = run(engine, request)
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 14)
        # One token of the prompt, and the reply but its last.
        assert backend.read_tokens - before == 1 + 3
        assert again.token_ids == first.token_ids
        assert engine.cache_figures.hit_tokens == 14
        assert engine.cache_figures.asked_tokens == 30
        assert engine.cache_figures.entries == 1


@pytest.mark.parametrize("truncates", [True, False])
def test_the_next_turn_reads_what_is_new(truncates: bool) -> None:
    backend, ids = StrictBackend(truncates=truncates), tuple(b"a first turn")
    with Engine(backend) as engine:
        reply = run(engine, ask(ids)).token_ids
        found = run(engine, ask((*ids, *reply, *b"and a second"), max_tokens=3))
        # The last token of a reply was sampled, and never read.
        assert found.usage.cached_tokens == len(ids) + len(reply) - 1
        assert found.token_ids == cold(ask((*ids, *reply, *b"and a second"), max_tokens=3)).token_ids


def test_a_sequence_anchored_offset_shares_nothing_with_another_domain() -> None:
    ids = tuple(b"one history for all of them")
    with Engine(FakeBackend()) as engine:
        for domain in (None, offset(1, "sequence"), offset(2, "sequence"), offset(1, "turn")):
            first, again = run(engine, ask(ids, domain)), run(engine, ask(ids, domain))
            shared = len(ids) - 3 if domain is not None and domain.anchor == "turn" else 0
            assert (first.usage.cached_tokens, again.usage.cached_tokens) == (shared, len(ids) - 1)
            assert first.token_ids == again.token_ids == cold(ask(ids, domain)).token_ids


def test_turn_anchored_offsets_share_the_history_before_the_turn() -> None:
    history, backend = tuple(b"a long history that all agents read. "), StrictBackend()
    with Engine(backend) as engine:
        run(engine, ask(history))
        before = backend.read_tokens
        for seed in range(4):
            request = ask((*history, *b"your turn"), offset(seed, "turn"), max_tokens=1)
            found = run(engine, request)
            assert found.usage.cached_tokens >= len(history)
            assert found.token_ids == cold(request).token_ids
        assert backend.read_tokens - before <= 4 * len(b"your turn")


def test_a_domain_registered_anew_meets_no_state_of_the_old_one() -> None:
    ids = tuple(b"the same words")
    old, new = offset(1, "sequence", domain="law"), offset(2, "sequence", domain="law")
    with Engine(FakeBackend()) as engine:
        run(engine, ask(ids, old))
        found = run(engine, ask(ids, new))
        assert found.usage.cached_tokens == 0
        assert found.token_ids == cold(ask(ids, new)).token_ids
        # Another strength is another offset too.
        assert run(engine, ask(ids, old.scaled(0.5))).usage.cached_tokens == 0


@pytest.mark.parametrize("first", [1, 2, 9, 15])
def test_a_scored_prompt_reads_again_what_its_scores_need(first: int) -> None:
    ids = tuple(b"score this text!")
    with Engine(FakeBackend()) as engine:
        run(engine, ask(ids))
        request = ask(ids, max_tokens=0, score_from=first)
        found = run(engine, request)
        assert found.usage.cached_tokens == first - 1
        assert found.prompt_logprobs == cold(request).prompt_logprobs
        assert len(found.prompt_logprobs) == len(ids) - first


def test_state_of_a_cancelled_request_serves_the_next() -> None:
    ids = tuple(b"a prompt of some length")
    with Engine(FakeBackend()) as engine:
        stream = Stream(engine, ask(ids, max_tokens=1000))
        next(iter(stream))
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            stream.result()
        found = run(engine, ask(ids))
        assert found.usage.cached_tokens == len(ids) - 1
        assert found.token_ids == cold(ask(ids)).token_ids


# What is not kept, and what gives way


class Failing(StrictBackend):
    error: Exception | None = None

    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        if self.error is not None and any(self.length(chunk.sequence) > 4 for chunk in chunks):
            raise self.error
        return super().forward(chunks)


def test_state_after_an_error_of_the_model_is_not_kept() -> None:
    backend = Failing()
    with Engine(backend) as engine:
        backend.error = RuntimeError("broken")
        with pytest.raises(GenerationError):
            run(engine, ask(b"text"))
        assert (backend.open_sequences, engine.cache_figures.entries) == (0, 0)
        backend.error = None
        assert run(engine, ask(b"text")).usage.cached_tokens == 0


class Crowded(StrictBackend):
    """Finds no room, for a sequence or for tokens, while more than `most` sequences are open."""

    most = 100

    def allocate(self) -> int:
        if len(self._sequences) >= self.most:
            raise KVCacheFullError("no sequence is left")
        return super().allocate()

    def fork(self, sequence: int) -> int:
        if len(self._sequences) >= self.most:
            raise KVCacheFullError("no sequence is left")
        return super().fork(sequence)

    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        if len(self._sequences) > self.most:
            raise KVCacheFullError("no room for tokens")
        return super().forward(chunks)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_cached_entries_give_way_where_the_backend_finds_no_room(most: int) -> None:
    backend = Crowded()
    with Engine(backend) as engine:
        for letter in "abcd":
            run(engine, ask(letter.encode() * 9))
        assert engine.cache_figures.entries == 4
        backend.most = most
        for text in (b"new", b"d" * 9, b"a" * 9):
            assert run(engine, ask(text)).token_ids == cold(ask(text)).token_ids
        assert engine.cache_figures.evictions >= 4 - most


@pytest.mark.parametrize(("capability", "value"), [("fork", False), ("split_prefill", False)])
def test_a_backend_that_could_not_use_it_has_no_cache(capability: str, value: bool) -> None:
    backend = StrictBackend()
    backend.capabilities = replace(backend.capabilities, **{capability: value})
    with Engine(backend) as engine:
        assert [run(engine, ask(b"again")).usage.cached_tokens for _ in range(2)] == [0, 0]
        assert (backend.open_sequences, engine.cache_figures.entries) == (0, 0)


# Real models


def check_cached_equals_cold(backend: Backend, make_offset: MakeOffset) -> None:
    """Two agents of two domains and one without take turns over one transcript, with and without a cache."""
    ids = [int(i) for i in np.random.default_rng(1).integers(20, 280, 24)]
    agents = [
        None,
        make_offset(backend.identity, domain="a", seed=1),
        make_offset(backend.identity, domain="b", seed=2, anchor="sequence"),
    ]
    replies: dict[int, list[tuple[int, ...]]] = {}
    for cache_bytes in (0, 2**20):
        transcript = list(ids)
        replies[cache_bytes] = []
        with Engine(backend, EngineSettings(cache_bytes=cache_bytes, max_running=2)) as engine:
            for turn in range(9):
                domain = agents[turn % 3]
                found = run(engine, ask(transcript, domain, max_tokens=5))
                replies[cache_bytes].append(found.token_ids)
                transcript += [20 + turn, *(token for token in found.token_ids if token > 2)]
            assert (engine.cache_figures.hit_tokens > 100) is (cache_bytes > 0)
        assert backend.state_bytes() == 0
    assert replies[0] == replies[2**20]


def test_cached_replies_of_a_tiny_torch_model_equal_cold_ones(
    tiny_backends: Callable[[str], TorchBackend], make_offset: MakeOffset
) -> None:
    check_cached_equals_cold(tiny_backends("llama"), make_offset)


def test_cached_replies_of_a_tiny_gguf_model_equal_cold_ones(
    tiny_gguf: Callable[[str], Path], make_offset: MakeOffset
) -> None:
    options = LlamaCppOptions(n_ctx=512, n_seq_max=8, n_threads=1, n_threads_batch=1, type_k="f32", type_v="f32")
    backend = LlamaCppBackend(tiny_gguf("llama"), options)
    check_cached_equals_cold(backend, make_offset)
    backend.close()
