"""The engine's prefix cache: what is read once is not read again, and no reply shows that it was not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from strict_backend import StrictBackend

from offset_runtime import DomainOffset, EngineSettings, LlamaCppOptions, Request, SamplingParams
from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.engine import Engine
from offset_runtime.errors import GenerationError, KVCacheFullError, RequestCancelledError
from offset_runtime.placement import Placement, place
from offset_runtime.request import Completion
from offset_runtime.stream import Stream

MakeOffset = Callable[..., DomainOffset]
Logits = list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]

IDENTITY = FakeBackend().identity
NO_CACHE = EngineSettings(cache_bytes=0)


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
    backend, ids = StrictBackend(truncate=truncates), tuple(b"a first turn")
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


def test_a_row_of_an_offset_is_not_another_row_of_it() -> None:
    ids, found = tuple(b"the same words"), offset(1, "turn")
    # At position 6 lies the third row, and then the first.
    whole, cut = (Placement(4, found, 3),), (Placement(4, found, 2), Placement(6, found, 3))
    with Engine(FakeBackend()) as engine:
        for placements, shared in ((whole, 0), (cut, 6)):
            request = replace(ask(ids), placements=placements)
            reply = run(engine, request)
            assert reply.usage.cached_tokens == shared
            assert reply.token_ids == cold(request).token_ids


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

    def fork(self, sequence: int, tokens: int | None = None) -> int:
        if len(self._sequences) >= self.most:
            raise KVCacheFullError("no sequence is left")
        return super().fork(sequence, tokens)

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


# State that cannot be cut back


def test_an_uncut_prompt_is_not_read_again() -> None:
    backend, ids = StrictBackend(truncate=False), tuple(b"the same prompt")
    with Engine(backend) as engine:
        first, again = run(engine, ask(ids)), run(engine, ask(ids))
        assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, len(ids) - 1)
        assert again.token_ids == first.token_ids
        scored = run(engine, ask(ids, max_tokens=0, score_from=5))
        assert run(engine, ask(ids, max_tokens=0, score_from=5)).usage.cached_tokens == 4
        assert scored.prompt_logprobs == cold(ask(ids, max_tokens=0, score_from=5)).prompt_logprobs


def test_an_uncut_history_is_shared_by_the_domains_that_begin_their_turn_behind_it() -> None:
    ids = tuple(b"a long history that all of them read")
    with Engine(StrictBackend(truncate=False)) as engine:
        for number in range(4):
            request = ask(ids, offset(number, "turn"))
            found = run(engine, request)
            assert found.usage.cached_tokens == (len(ids) - 3 if number else 0)
            assert found.token_ids == cold(request).token_ids
        # Where an earlier turn keeps its author's offset, others share what precedes that turn.
        for author, shared in ((9, 0), (8, 8)):
            request = replace(ask(ids), placements=(Placement(8, offset(author, "turn"), 3),))
            assert run(engine, request).usage.cached_tokens == shared


@pytest.mark.parametrize(("snapshot_tokens", "shared"), [(16, 32), (33, 33), (10, 40), (64, 0)])
def test_prompts_that_part_anywhere_share_the_blocks_before(snapshot_tokens: int, shared: int) -> None:
    history = bytes(range(65, 106))
    with Engine(StrictBackend(truncate=False), EngineSettings(snapshot_tokens=snapshot_tokens)) as engine:
        run(engine, ask((*history, *b"one end of it")))
        request = ask((*history, *b"another end"))
        found = run(engine, request)
        assert found.usage.cached_tokens == shared
        assert found.token_ids == cold(request).token_ids


class Uncopied(StrictBackend):
    """Fails to copy a sequence."""

    error: Exception = KVCacheFullError("no sequence is left")

    def fork(self, sequence: int, tokens: int | None = None) -> int:
        raise self.error


@pytest.mark.parametrize("error", [KVCacheFullError("no sequence is left"), RuntimeError("broken")])
def test_a_snapshot_that_cannot_be_taken_is_done_without(error: Exception) -> None:
    backend = Uncopied(truncate=False)
    backend.error = error
    with Engine(backend, EngineSettings(snapshot_tokens=4)) as engine:
        request = ask(b"a prompt of some length")
        assert run(engine, request).token_ids == cold(request).token_ids
        assert engine.cache_figures.entries == backend.open_sequences == 1


@pytest.mark.parametrize(
    ("truncate", "limits", "passes"),
    [
        (False, EngineSettings(snapshot_tokens=8), 4),
        (False, EngineSettings(snapshot_tokens=8, cache_bytes=0), 1),
        (False, EngineSettings(snapshot_tokens=8, max_running=9), 1),
        (True, EngineSettings(snapshot_tokens=8), 1),
    ],
)
def test_a_prompt_is_cut_only_where_snapshots_are_kept(truncate: bool, limits: EngineSettings, passes: int) -> None:
    backend = StrictBackend(truncate=truncate, max_sequences=9 if limits.max_running == 9 else None)
    with Engine(backend, limits) as engine:
        run(engine, ask(b"a prompt of 24 tokens...", max_tokens=1))
        assert backend.passes == passes


def test_snapshots_keep_to_the_limits_of_the_cache() -> None:
    backend = StrictBackend(truncate=False, max_sequences=5)
    with Engine(backend, EngineSettings(snapshot_tokens=1, max_running=2)) as engine:
        for text in (b"one prompt of some length", b"another prompt"):
            assert run(engine, ask(text)).token_ids == cold(ask(text)).token_ids
            assert engine.cache_figures.entries == backend.open_sequences == 3


# Models


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


def check_snapshots(backend: Backend, make_offset: MakeOffset) -> None:
    """A prompt read again, and then in two domains, gives the log-probabilities of a cold run."""
    assert not backend.capabilities.truncate
    ids = [int(i) for i in np.random.default_rng(2).integers(20, 280, 40)]
    domains = [make_offset(backend.identity, seed=seed) for seed in (1, 2, 1)]
    requests = [
        replace(ask(ids, domain), sampling=SamplingParams(max_tokens=4, logprobs=0))
        for domain in (None, None, *domains)
    ]
    with Engine(backend, NO_CACHE) as engine:
        expected = [run(engine, request) for request in requests]
    with Engine(backend, EngineSettings(snapshot_tokens=16, max_running=2)) as engine:
        found = [run(engine, request) for request in requests]
    # The second domain's turn goes on from where the first one's began, and so does a prompt read before.
    assert [reply.usage.cached_tokens for reply in found] == [0, 39, 32, 37, 39]
    for reply, other in zip(found, expected, strict=True):
        assert reply.token_ids == other.token_ids
        numbers = [[token.logprob for token in one.logprobs] for one in (reply, other)]
        np.testing.assert_allclose(numbers[0], numbers[1], atol=1e-4)
    assert backend.state_bytes() == 0


@pytest.mark.parametrize("architecture", ["llama", "mamba2", "lfm2"])
def test_cached_replies_of_a_tiny_torch_model_equal_cold_ones(
    tiny_backends: Callable[[str], TorchBackend], make_offset: MakeOffset, architecture: str
) -> None:
    check_cached_equals_cold(tiny_backends(architecture), make_offset)
    if architecture != "llama":
        check_snapshots(tiny_backends(architecture), make_offset)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "mamba", "lfm2"])
def test_cached_replies_of_a_tiny_gguf_model_equal_cold_ones(
    tiny_gguf: Callable[[str], Path], make_offset: MakeOffset, architecture: str
) -> None:
    options = LlamaCppOptions(n_ctx=512, n_seq_max=16, n_threads=1, n_threads_batch=1, type_k="f32", type_v="f32")
    backend = LlamaCppBackend(tiny_gguf(architecture), options)
    check_cached_equals_cold(backend, make_offset)
    if architecture != "llama":
        check_snapshots(backend, make_offset)
    backend.close()
