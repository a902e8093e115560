"""The engine: mixed batches equal solo runs, and nothing that goes wrong reaches another request or hangs."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offset_runtime import Completion, Delta, DomainOffset, EngineSettings, Request, SamplingParams
from offset_runtime.backends.base import Backend, Chunk, SequenceId
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.engine import Engine
from offset_runtime.errors import (
    ContextOverflowError,
    DeadlineExceededError,
    EngineClosedError,
    GenerationError,
    InvalidRequestError,
    OffsetError,
    PlacementError,
    QueueFullError,
    RequestCancelledError,
)
from offset_runtime.placement import Placement, place
from offset_runtime.sampling import log_softmax
from offset_runtime.stream import Stream

MakeOffset = Callable[..., DomainOffset]

IDENTITY = FakeBackend().identity
# Far longer than any test takes; a test that reaches it hangs.
PATIENCE_S = 60


class ControlledBackend(FakeBackend):
    """A fake that can hold its steps back, fail on chosen sequences, or die, and that records its steps."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fails: Callable[[Sequence[Chunk]], BaseException | None] = lambda chunks: None
        self.poison: Callable[[Chunk], bool] = lambda chunk: False
        self.allocate_fails = False
        self.free_fails = False
        self.prompts: dict[SequenceId, bytes] = {}
        self.steps: list[list[int]] = []
        self.most_tokens = 0

    def allocate(self) -> SequenceId:
        if self.allocate_fails:
            raise MemoryError("no room for a sequence")
        return super().allocate()

    def free(self, sequence: SequenceId) -> None:
        if self.free_fails:
            raise RuntimeError("cannot free")
        super().free(sequence)

    def forward(self, chunks: Sequence[Chunk]) -> list[npt.NDArray[np.float32]]:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        for chunk in chunks:
            self.prompts.setdefault(chunk.sequence, bytes(i & 255 for i in chunk.token_ids))
        error = self.fails(chunks)
        if error is not None:
            raise error
        found = super().forward(chunks)
        self.steps.append([len(chunk.token_ids) for chunk in chunks])
        self.most_tokens = max(self.most_tokens, sum(self.length(s) for s in self._sequences))
        for chunk, rows in zip(chunks, found, strict=True):
            if self.poison(chunk):
                rows[:] = np.nan
        return found

    def hold(self) -> None:
        self.entered.clear()
        self.gate.clear()

    def wait_until_held(self) -> None:
        assert self.entered.wait(PATIENCE_S)


@pytest.fixture
def backend() -> ControlledBackend:
    return ControlledBackend()


@pytest.fixture
def engine(backend: ControlledBackend) -> Iterator[Engine]:
    with Engine(backend, EngineSettings(max_running=4, max_step_tokens=16, max_waiting=8)) as made:
        yield made
        backend.gate.set()
    assert backend.open_sequences == 0 or backend.free_fails


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns or raises, from a thread, so that a hang fails the test instead of stopping it."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(PATIENCE_S)


def request(text: str = "hello", *, max_tokens: int = 8, timeout_s: float | None = None, **sampling: Any) -> Request:
    return Request(tuple(text.encode()), (), SamplingParams(max_tokens=max_tokens, **sampling), timeout_s)


def reference(asked: Request, backend: Backend | None = None) -> tuple[int, ...]:
    """Greedy tokens by a full prefill of everything at each step, one sequence, no engine."""
    backend = backend or FakeBackend()
    ids, out = list(asked.prompt_ids), []
    while len(out) < asked.sampling.max_tokens:
        sequence = backend.allocate()
        [rows] = backend.forward([Chunk(sequence, ids, asked.placements)])
        backend.free(sequence)
        out.append(int(rows[0].argmax()))
        ids.append(out[-1])
        if out[-1] in backend.tokenizer.eos_token_ids:
            break
    return tuple(out)


# Mixed batches


@st.composite
def requests(draw: st.DrawFn) -> Request:
    ids = draw(st.lists(st.integers(0, 257), min_size=1, max_size=30))
    kind = draw(st.sampled_from(["base", "turn", "sequence", "two"]))
    offsets = [
        DomainOffset(
            f"d{seed}",
            np.random.default_rng(seed).normal(size=(draw(st.integers(1, min(4, len(ids)))), 16)).astype(np.float32),
            "sequence" if kind == "sequence" else "turn",
            "chat",
            IDENTITY,
        )
        for seed in draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    ]
    placements: tuple[Placement, ...] = ()
    if kind != "base":
        placements = (place(offsets[0], len(ids)),)
    if kind == "two" and placements[0].index >= offsets[1].positions:
        placements = (Placement(0, offsets[1], offsets[1].positions), *placements)
    return Request(tuple(ids), placements, SamplingParams(max_tokens=draw(st.integers(1, 12))))


@given(
    asked=st.lists(requests(), min_size=2, max_size=16),
    cancelled=st.sets(st.integers(0, 15), max_size=6),
    max_running=st.integers(1, 16),
    max_step_tokens=st.integers(1, 40),
)
@settings(max_examples=40)
def test_each_of_many_requests_gives_what_a_plain_solo_run_gives(
    asked: list[Request], cancelled: set[int], max_running: int, max_step_tokens: int
) -> None:
    backend = FakeBackend()
    limits = EngineSettings(max_running=max_running, max_step_tokens=max_step_tokens)
    with Engine(backend, limits) as engine:
        streams = [Stream(engine, item) for item in asked]
        for index in cancelled & set(range(len(streams))):
            streams[index].cancel()
        for index, (stream, item) in enumerate(zip(streams, asked, strict=True)):
            try:
                found = stream.result().token_ids
            except RequestCancelledError:
                assert index in cancelled
            else:
                assert found == reference(item)
    assert backend.open_sequences == 0


def test_sixteen_agents_in_four_domains_run_in_one_batch(make_offset: MakeOffset) -> None:
    backend = ControlledBackend()
    offsets = [make_offset(IDENTITY, seed=i, anchor=anchor) for i, anchor in enumerate(["turn", "sequence"] * 2)]
    asked = []
    for i in range(16):
        ids = tuple(f"agent {i} {'says ' * (i % 5)}".encode())
        asked.append(Request(ids, (place(offsets[i % 4], len(ids)),), SamplingParams(max_tokens=10 + i % 3)))
    backend.hold()
    with Engine(backend, EngineSettings(max_step_tokens=64)) as engine:
        streams = [Stream(engine, item) for item in asked]
        backend.gate.set()
        for stream, item in zip(streams, asked, strict=True):
            assert stream.result().token_ids == reference(item)
    assert [1] * 16 in backend.steps
    # Some step decoded for one request and read the prompt of another.
    assert any(1 in step and max(step) > 1 for step in backend.steps)


def test_a_seed_gives_the_same_reply_whatever_the_batch(engine: Engine, backend: ControlledBackend) -> None:
    asked = request("seeded", max_tokens=20, temperature=1.5, seed=7)
    alone = Stream(engine, asked).result()
    backend.hold()
    others = [Stream(engine, request(f"other {i}", max_tokens=9 + i, temperature=1.0, seed=i)) for i in range(5)]
    again = Stream(engine, asked)
    backend.gate.set()
    assert again.result().token_ids == alone.token_ids
    assert Stream(engine, request("seeded", max_tokens=20, temperature=1.5, seed=8)).result().text != alone.text
    for stream in others:
        stream.result()


def test_deltas_join_to_the_completion(engine: Engine) -> None:
    stream = Stream(engine, request(max_tokens=12, logprobs=2))
    deltas = list(stream)
    assert stream.completion is not None
    assert "".join(delta.text for delta in deltas) == stream.completion.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == stream.completion.token_ids
    assert tuple(entry for delta in deltas for entry in delta.logprobs) == stream.completion.logprobs
    assert stream.completion.finish_reason == "length"
    assert stream.completion.usage.prompt_tokens == 5
    assert stream.completion.usage.output_tokens == 12


def test_timings_and_usage_count_what_happened(engine: Engine, backend: ControlledBackend) -> None:
    found = Stream(engine, request("a prompt of some twenty-eight", max_tokens=3)).result()
    assert backend.steps == [[16], [13], [1], [1]]
    assert found.usage.prompt_tokens == 29
    assert min(found.timings.queue_s, found.timings.prefill_s, found.timings.decode_s) >= 0


# The end of a reply


def scripted(reply: str) -> FakeBackend:
    return FakeBackend(script=lambda prompt: reply)


def chat(backend: FakeBackend, **sampling: Any) -> Request:
    prompt = backend.tokenizer.encode(backend.tokenizer.render_chat([{"role": "user", "content": "go on"}]))
    return Request(tuple(prompt), (), SamplingParams(**{"max_tokens": 100} | sampling))


def test_an_end_token_ends_the_reply_and_is_counted() -> None:
    backend = scripted("fin")
    with Engine(backend) as engine:
        found = Stream(engine, chat(backend)).result()
    assert (found.text, found.finish_reason) == ("fin", "stop")
    assert found.usage.output_tokens == 4
    assert found.token_ids[-1] in backend.tokenizer.eos_token_ids


@pytest.mark.parametrize(
    ("reply", "stop", "text"),
    [
        ("Answer: 42. Next question", ["Next"], "Answer: 42. "),
        ("ends with it###", ["###"], "ends with it"),
        ("ends with a part of it##", ["###"], "ends with a part of it##"),
        ("overlap: abab!", ["abab!", "bab"], "overlap: a"),
        ("naïve 東京 text", ["東京"], "naïve "),
        ("emoji 😀 and on", ["😀 and"], "emoji "),
        ("###", ["###"], ""),
        ("no stop", ["zzz"], "no stop"),
    ],
)
def test_stop_strings_never_leak(reply: str, stop: list[str], text: str) -> None:
    backend = scripted(reply)
    with Engine(backend) as engine:
        stream = Stream(engine, chat(backend, stop=stop))
        shown = ""
        for delta in stream:
            shown += delta.text
            assert text.startswith(shown)
        assert stream.completion is not None
    assert stream.completion.text == shown == text
    assert stream.completion.finish_reason == "stop"


def test_a_stop_string_in_the_last_token_allowed_ends_with_stop() -> None:
    backend = scripted("one two")
    with Engine(backend) as engine:
        found = Stream(engine, chat(backend, stop=["two"], max_tokens=7)).result()
        cut = Stream(engine, chat(backend, stop=["two"], max_tokens=6)).result()
    assert (found.text, found.finish_reason) == ("one ", "stop")
    assert (cut.text, cut.finish_reason) == ("one tw", "length")


def test_a_character_cut_by_max_tokens_is_shown_as_incomplete() -> None:
    backend = scripted("a€")
    with Engine(backend) as engine:
        found = Stream(engine, chat(backend, max_tokens=3)).result()
    assert (found.text, found.finish_reason) == ("a\ufffd", "length")


# Log-probabilities


def scoring(ids: Sequence[int], first: int, placements: Sequence[Placement] = ()) -> Request:
    return Request(tuple(ids), tuple(placements), SamplingParams(max_tokens=0), score_from=first)


def test_logprobs_of_a_reply_agree_with_scoring_its_text(engine: Engine, make_offset: MakeOffset) -> None:
    ids = tuple(b"a prompt")
    placements = (place(make_offset(IDENTITY), len(ids)),)
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=1, logprobs=3)
    reply = Stream(engine, Request(ids, placements, sampling)).result()
    scored = Stream(engine, scoring([*ids, *reply.token_ids], len(ids), placements)).result()
    np.testing.assert_allclose(scored.prompt_logprobs, [entry.logprob for entry in reply.logprobs], atol=1e-6)
    for entry in reply.logprobs:
        assert len(entry.top) == 3
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        assert dict(entry.top).get(entry.token_id, entry.logprob) == entry.logprob


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("first", [1, 4, 12])
def test_scores_do_not_depend_on_where_the_prompt_is_cut(max_step_tokens: int, first: int) -> None:
    backend, ids = FakeBackend(), list(b"score this text!")
    sequence = backend.allocate()
    [rows] = backend.forward([Chunk(sequence, ids, (), "all")])
    expected = [log_softmax(rows[i - 1])[ids[i]] for i in range(first, len(ids))]
    with Engine(FakeBackend(), EngineSettings(max_step_tokens=max_step_tokens)) as engine:
        other = Stream(engine, scoring(ids[::-1], 1))
        found = Stream(engine, scoring(ids, first)).result()
        other.result()
    np.testing.assert_allclose(found.prompt_logprobs, expected, atol=1e-6)
    assert (found.text, found.token_ids, found.usage.output_tokens) == ("", (), 0)


# What is refused at once


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        Stream(engine, Request(()))


def test_prompt_and_reply_beyond_the_context_are_refused_and_never_cut() -> None:
    with Engine(FakeBackend(context_tokens=32)) as engine:
        message = r"prompt of 30 tokens \+ max_tokens of 3 = 33 exceeds the context of 32 tokens; .* at most 2"
        with pytest.raises(ContextOverflowError, match=message):
            Stream(engine, request("x" * 30, max_tokens=3))
        assert Stream(engine, request("x" * 30, max_tokens=2)).result().usage.output_tokens == 2


def test_a_prompt_beyond_the_capacity_is_refused() -> None:
    with (
        Engine(FakeBackend(kv_capacity_tokens=20)) as engine,
        pytest.raises(ContextOverflowError, match="exceeds the context of 20 tokens"),
    ):
        Stream(engine, request("x" * 19, max_tokens=2))


def test_placements_outside_the_prompt_are_refused(engine: Engine, make_offset: MakeOffset) -> None:
    with pytest.raises(PlacementError, match="reaches beyond the prompt of 4 tokens"):
        Stream(engine, Request(tuple(b"four"), (Placement(2, make_offset(IDENTITY), 3),)))


def test_scoring_the_first_token_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="score_from must be at least 1"):
        Stream(engine, scoring(b"text", 0))


def test_scoring_beyond_the_prompt_is_refused_and_not_empty(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match=r"score_from=100 .* prompt of 3 tokens; expected at most 2"):
        Stream(engine, scoring([1, 2, 3], 100))
    with pytest.raises(InvalidRequestError, match=r"score_from=3 leaves nothing to score"):
        Stream(engine, scoring([1, 2, 3], 3))
    assert len(Stream(engine, scoring([1, 2, 3], 2)).result().prompt_logprobs) == 1


@pytest.mark.parametrize("timeout_s", [float("nan"), 0, -1.0, "5"])
def test_a_time_limit_that_cannot_be_kept_is_refused(engine: Engine, timeout_s: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"timeout_s=.* expected seconds greater than 0"):
        Stream(engine, request(timeout_s=timeout_s))


@pytest.mark.parametrize("token", [1.5, "a", None])
def test_prompt_ids_that_are_no_integers_are_refused(engine: Engine, token: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt_ids hold .* expected integers"):
        Stream(engine, Request((1, token)))
    assert Stream(engine, Request(tuple(np.array([1, 2])), sampling=SamplingParams(max_tokens=1))).result().token_ids


def test_a_token_outside_the_vocabulary_fails_its_request_alone(engine: Engine, backend: ControlledBackend) -> None:
    backend.hold()
    good, bad = Stream(engine, request("good")), Stream(engine, Request((1, 9999)))
    backend.gate.set()
    with pytest.raises(InvalidRequestError, match="token id 9999 is outside the vocabulary"):
        bad.result()
    assert good.result().token_ids == reference(request("good"))


# Failures


@pytest.mark.parametrize("tokens_before", [0, 3])
def test_a_failing_request_leaves_the_others_untouched(
    engine: Engine, backend: ControlledBackend, tokens_before: int
) -> None:
    def fails(chunks: Sequence[Chunk]) -> BaseException | None:
        fed = [backend.length(c.sequence) + len(c.token_ids) for c in chunks if backend.prompts[c.sequence] == b"bad"]
        return RuntimeError("broken for this one") if any(n >= len(b"bad") + tokens_before for n in fed) else None

    backend.fails = fails
    backend.hold()
    asked = [request(f"good {i}", max_tokens=10) for i in range(3)]
    streams = [Stream(engine, item) for item in asked]
    failing = Stream(engine, request("bad", max_tokens=10))
    backend.gate.set()
    with pytest.raises(GenerationError, match=r"broken for this one.*other requests are not affected") as caught:
        outcome(failing.result)
    assert isinstance(caught.value.__cause__, RuntimeError)
    for stream, item in zip(streams, asked, strict=True):
        assert stream.result().token_ids == reference(item)


def test_logits_that_are_not_numbers_fail_their_request_alone(engine: Engine, backend: ControlledBackend) -> None:
    backend.hold()
    good, bad = Stream(engine, request("good")), Stream(engine, request("bad!!"))
    backend.poison = lambda chunk: tuple(chunk.token_ids) == tuple(b"bad!!")
    backend.gate.set()
    with pytest.raises(GenerationError, match="not finite"):
        bad.result()
    assert good.result().token_ids == reference(request("good"))


def test_a_model_that_always_fails_fails_each_request_and_the_engine_lives(
    engine: Engine, backend: ControlledBackend
) -> None:
    backend.fails = lambda chunks: RuntimeError("out of order")
    for stream in [Stream(engine, request(f"r{i}")) for i in range(6)]:
        with pytest.raises(GenerationError, match="out of order"):
            outcome(stream.result)
    backend.fails = lambda chunks: None
    assert Stream(engine, request()).result().token_ids == reference(request())


def test_a_sequence_that_cannot_be_opened_fails_its_request_alone(engine: Engine, backend: ControlledBackend) -> None:
    backend.allocate_fails = True
    with pytest.raises(GenerationError, match="no room for a sequence"):
        outcome(Stream(engine, request()).result)
    backend.allocate_fails = False
    assert Stream(engine, request()).result().token_ids == reference(request())


def test_state_that_cannot_be_freed_does_not_keep_callers_waiting(engine: Engine, backend: ControlledBackend) -> None:
    backend.free_fails = True
    for stream in [Stream(engine, request(f"r{i}")) for i in range(3)]:
        assert len(outcome(stream.result).token_ids) == 8


def test_the_death_of_the_thread_reaches_every_caller(backend: ControlledBackend) -> None:
    engine = Engine(backend, EngineSettings(max_running=2))
    backend.hold()
    streams = [Stream(engine, request(f"r{i}")) for i in range(5)]
    backend.fails = lambda chunks: SystemExit("the thread is gone")
    backend.free_fails = True
    backend.gate.set()
    for stream in streams:
        with pytest.raises(EngineClosedError, match=r"the engine's thread died: SystemExit\('the thread is gone'\)"):
            outcome(stream.result)
    with pytest.raises(EngineClosedError, match=r"thread died.*Load the model again"):
        Stream(engine, request())
    engine.close()


def test_each_caller_gets_an_error_of_its_own(backend: ControlledBackend) -> None:
    engine = Engine(backend)
    backend.hold()
    streams = [Stream(engine, request(f"r{i}")) for i in range(2)]
    backend.wait_until_held()
    closer = threading.Thread(target=engine.close)
    closer.start()
    backend.gate.set()
    errors = []
    for stream in streams:
        with pytest.raises(EngineClosedError) as caught:
            outcome(stream.result)
        errors.append(caught.value)
    closer.join()
    assert errors[0] is not errors[1]


def test_closing_ends_running_and_waiting_requests(backend: ControlledBackend) -> None:
    engine = Engine(backend, EngineSettings(max_running=2))
    backend.hold()
    streams = [Stream(engine, request(f"r{i}", max_tokens=1000)) for i in range(5)]
    backend.wait_until_held()
    closer = threading.Thread(target=engine.close)
    closer.start()
    backend.gate.set()
    for stream in streams:
        with pytest.raises(EngineClosedError, match="the engine was closed before this request ended"):
            outcome(stream.result)
    closer.join(PATIENCE_S)
    assert backend.open_sequences == 0
    with pytest.raises(EngineClosedError, match="the engine is closed; load the model again"):
        Stream(engine, request())
    engine.close()


def test_no_thread_is_left_after_close() -> None:
    before = set(threading.enumerate())
    engines = [Engine(FakeBackend()) for _ in range(3)]
    assert len(set(threading.enumerate()) - before) == 3
    for engine in engines:
        engine.close()
    assert set(threading.enumerate()) == before


# Cancellation and deadlines


def test_a_waiting_request_can_be_cancelled(backend: ControlledBackend) -> None:
    with Engine(backend, EngineSettings(max_running=1)) as engine:
        backend.hold()
        running, waiting = Stream(engine, request("first")), Stream(engine, request("second"))
        backend.wait_until_held()
        waiting.cancel()
        backend.gate.set()
        with pytest.raises(RequestCancelledError):
            outcome(waiting.result)
        assert running.result().token_ids == reference(request("first"))
        assert backend.open_sequences == engine.cache_figures.entries


def test_a_prompt_can_be_cancelled_between_its_chunks(engine: Engine, backend: ControlledBackend) -> None:
    backend.hold()
    long = Stream(engine, request("x" * 40))
    backend.wait_until_held()
    long.cancel()
    backend.gate.set()
    with pytest.raises(RequestCancelledError):
        outcome(long.result)
    assert backend.steps == [[16]]
    assert backend.open_sequences == engine.cache_figures.entries


def test_a_reply_can_be_cancelled_in_decode(engine: Engine, backend: ControlledBackend) -> None:
    other = Stream(engine, request("other", max_tokens=50))
    stream = Stream(engine, request("long", max_tokens=1000))
    deltas = iter(stream)
    next(deltas)
    next(deltas)
    stream.cancel()
    with pytest.raises(RequestCancelledError):
        outcome(lambda: list(deltas))
    assert other.result().token_ids == reference(request("other", max_tokens=50))
    assert backend.open_sequences == engine.cache_figures.entries


def test_cancelling_after_the_end_changes_nothing(engine: Engine) -> None:
    stream = Stream(engine, request())
    found = stream.result()
    stream.cancel()
    assert stream.result() is found
    assert Stream(engine, request()).result().text == found.text


def test_a_deadline_passes_while_waiting(backend: ControlledBackend) -> None:
    with Engine(backend, EngineSettings(max_running=1)) as engine:
        backend.hold()
        running, waiting = Stream(engine, request("first")), Stream(engine, request("late", timeout_s=0.01))
        backend.wait_until_held()
        time.sleep(0.02)
        backend.gate.set()
        with pytest.raises(
            DeadlineExceededError, match=r"did not end within 0\.01 s \(0 of at most 8 tokens generated\)"
        ):
            outcome(waiting.result)
        assert running.result().token_ids == reference(request("first"))


def test_a_deadline_passes_while_running(engine: Engine, backend: ControlledBackend) -> None:
    other = Stream(engine, request("other", max_tokens=30))
    stream = Stream(engine, request("slow", max_tokens=1000, timeout_s=0.2))
    backend.fails = lambda chunks: time.sleep(0.01)  # type: ignore[func-returns-value]
    with pytest.raises(DeadlineExceededError, match=r"did not end within 0\.2 s \(\d+ of at most 1000"):
        outcome(stream.result)
    assert other.result().token_ids == reference(request("other", max_tokens=30))


def test_a_dropped_stream_cancels_its_request(engine: Engine, backend: ControlledBackend) -> None:
    stream = Stream(engine, request("dropped", max_tokens=4000))
    next(iter(stream))
    del stream
    gc.collect()
    assert Stream(engine, request("next")).result().token_ids == reference(request("next"))
    wait_until(lambda: backend.open_sequences == engine.cache_figures.entries)
    assert len(backend.steps) < 4000


def test_leaving_the_loop_cancels_the_request(engine: Engine, backend: ControlledBackend) -> None:
    stream = Stream(engine, request("left", max_tokens=4000))
    for _ in stream:
        break
    with pytest.raises(RequestCancelledError):
        outcome(stream.result)
    wait_until(lambda: backend.open_sequences == engine.cache_figures.entries)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


# Reading a stream more than once


def test_a_stream_that_failed_fails_again_and_does_not_hang(engine: Engine, backend: ControlledBackend) -> None:
    backend.fails = lambda chunks: RuntimeError("broken")
    stream = Stream(engine, request())
    for _ in range(3):
        with pytest.raises(GenerationError):
            outcome(stream.result)


def test_two_readers_of_one_stream_both_come_to_its_end(engine: Engine) -> None:
    stream = Stream(engine, request(max_tokens=50))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: outcome(stream.result), range(4)))
    assert all(completion is found[0] for completion in found)


# The queue and the capacity


def test_a_full_queue_says_so_and_recovers(engine: Engine, backend: ControlledBackend) -> None:
    backend.hold()
    first = Stream(engine, request("first"))
    backend.wait_until_held()
    waiting = [Stream(engine, request(f"r{i}")) for i in range(8)]
    with pytest.raises(QueueFullError, match=r"queue is full: 8 requests wait \(max_waiting = 8\)"):
        Stream(engine, request("one too many"))
    waiting[0].cancel()
    backend.gate.set()
    with pytest.raises(RequestCancelledError):
        outcome(waiting[0].result)
    for stream in [first, *waiting[1:]]:
        outcome(stream.result)
    assert len(outcome(Stream(engine, request("later")).result).token_ids) == 8


def ending(stream: Stream) -> str:
    try:
        outcome(stream.result)
    except OffsetError as error:
        return type(error).__name__
    return "completed"


def test_the_queue_count_survives_every_way_to_end(backend: ControlledBackend) -> None:
    with Engine(backend, EngineSettings(max_running=1, max_waiting=3, cache_bytes=0)) as engine:
        for allocates in (True, False, True):
            backend.hold()
            running = Stream(engine, request("runs"))
            backend.wait_until_held()
            cancelled, late, last = (Stream(engine, request("waits", timeout_s=limit)) for limit in (None, 1e-9, None))
            cancelled.cancel()
            backend.allocate_fails = not allocates
            backend.gate.set()
            ended = [ending(stream) for stream in (running, cancelled, late, last)]
            end = "completed" if allocates else "GenerationError"
            assert ended == ["completed", "RequestCancelledError", "DeadlineExceededError", end]
            backend.allocate_fails = False
        assert sum(engine._waiting.values()) == 0


def test_requests_never_hold_more_than_the_capacity() -> None:
    backend = ControlledBackend(kv_capacity_tokens=60)
    asked = [request("p" * (5 + i % 20), max_tokens=5 + i % 7) for i in range(30)]
    with Engine(backend, EngineSettings(max_step_tokens=32)) as engine:
        for stream, item in zip([Stream(engine, item) for item in asked], asked, strict=True):
            assert outcome(stream.result).token_ids == reference(item)
    assert 30 < backend.most_tokens <= 60


# Threads


def test_a_request_submitted_from_the_engines_own_sink_runs(engine: Engine) -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def follow(event: Any) -> None:
        if isinstance(event, Completion):
            engine.submit(request("second"), events.put)

    engine.submit(request("first"), follow)
    found = [events.get(timeout=PATIENCE_S) for _ in range(9)]
    assert all(isinstance(event, Delta) for event in found[:8])
    assert found[8].token_ids == reference(request("second"))


def test_the_engine_can_be_closed_from_its_own_sink(backend: ControlledBackend) -> None:
    engine = Engine(backend)
    ended = threading.Event()

    def close(event: Any) -> None:
        if isinstance(event, Completion):
            engine.close()
            ended.set()

    engine.submit(request(), close)
    assert ended.wait(PATIENCE_S)
    engine.close()
    assert backend.open_sequences == 0


def test_a_reader_that_fails_cancels_its_own_request_only(engine: Engine, backend: ControlledBackend) -> None:
    def gone(event: Any) -> None:
        raise ConnectionError("the reader is gone")

    engine.submit(request("gone", max_tokens=4000), gone)
    assert Stream(engine, request("here")).result().token_ids == reference(request("here"))
    wait_until(lambda: backend.open_sequences == engine.cache_figures.entries)


def test_many_threads_at_once_get_their_own_replies(make_offset: MakeOffset) -> None:
    backend = FakeBackend()
    offsets = [make_offset(IDENTITY, seed=i) for i in range(4)]
    asked = []
    for i in range(40):
        ids = tuple(f"text number {i}".encode())
        placements = (place(offsets[i % 4], len(ids)),) if i % 5 else ()
        asked.append(Request(ids, placements, SamplingParams(max_tokens=1 + i % 9)))
    expected = [reference(item) for item in asked]
    with Engine(backend, EngineSettings(max_running=8, max_step_tokens=24)) as engine:

        def work(seed: int) -> int:
            chooser, ended = np.random.default_rng(seed), 0
            for _ in range(40):
                i = int(chooser.integers(len(asked)))
                stream = Stream(engine, asked[i])
                if chooser.random() < 0.3:
                    if chooser.random() < 0.5:
                        next(iter(stream))
                    stream.cancel()
                    continue
                assert stream.result().token_ids == expected[i]
                ended += 1
            return ended

        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(work, seed) for seed in range(8)]
            assert sum(future.result(PATIENCE_S) for future in futures) > 100
        wait_until(lambda: backend.open_sequences == engine.cache_figures.entries)
        assert sum(engine._waiting.values()) == 0
