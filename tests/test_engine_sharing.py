"""Requests that run at the same time and begin alike: one reads, and the others go on from its state."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from waiting import PATIENCE_S, until

from offset_runtime import Completion, DomainOffset, EngineSettings, Request, Reuse, SamplingParams
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.engine import Engine
from offset_runtime.errors import DeadlineExceededError, InvalidRequestError, PlacementError, RequestCancelledError
from offset_runtime.placement import Placement, place
from offset_runtime.stream import Stream

HISTORY = tuple(FakeBackend().tokenizer.encode("the harbour was closed on monday after a storm " * 4))


class CountingBackend(FakeBackend):
    """Counts the tokens it is fed; each pass takes one of `passes`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.fed = 0
        self.passes = threading.Semaphore(0)

    def forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        assert self.passes.acquire(timeout=PATIENCE_S)
        self.fed += sum(len(chunk.token_ids) for chunk in chunks)
        return super().forward(chunks)


def request(turn: str, offset: DomainOffset | None = None, reply: int = 4) -> Request:
    prompt = (*HISTORY, *turn.encode())
    placements = () if offset is None else (place(offset, len(prompt)),)
    return Request(prompt, placements, SamplingParams(max_tokens=reply))


def run_at_once(requests: Sequence[Request], backend: CountingBackend, **settings: int) -> list[Completion]:
    """All requests are in the engine before its first pass."""
    with Engine(backend, EngineSettings(**settings)) as engine:
        streams = [Stream(engine, request) for request in requests]
        backend.passes.release(10**6)
        return [stream.result() for stream in streams]


@pytest.fixture
def offsets(make_offset: Callable[..., DomainOffset]) -> list[DomainOffset]:
    return [make_offset(FakeBackend().identity, f"domain{i}", positions=3, seed=i) for i in range(4)]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("step", [8, 64, 1024])
def test_a_history_is_read_once_for_requests_of_any_domains_that_come_together(
    offsets: list[DomainOffset], step: int, truncate: bool
) -> None:
    requests = [request(f"turn of {i}: ", offsets[i % 4]) for i in range(8)]
    expected = [run_at_once([each], CountingBackend(), cache_bytes=0)[0].text for each in requests]
    backend = CountingBackend(truncate=truncate)

    found = run_at_once(requests, backend, max_step_tokens=step)

    assert [reply.text for reply in found] == expected
    turns = sum(len(each.prompt_ids) - len(HISTORY) + 4 for each in requests)
    if truncate:
        assert backend.fed <= len(HISTORY) + turns
    else:
        # Copies are kept before each offset, which lies some tokens behind the end of the history.
        assert backend.fed < 2 * len(HISTORY) + 2 * turns
    assert sum(reply.usage.cached_tokens for reply in found) >= 7 * (len(HISTORY) - 16)


def test_without_a_cache_each_reads_for_itself(offsets: list[DomainOffset]) -> None:
    backend = CountingBackend()
    run_at_once([request(f"turn of {i}: ", offsets[i]) for i in range(4)], backend, cache_bytes=0)
    assert backend.fed > 4 * len(HISTORY)


def test_one_that_comes_while_another_replies_goes_on_from_its_state() -> None:
    backend = CountingBackend()
    backend.passes.release(10**6)
    with Engine(backend) as engine:
        replies = iter(long := Stream(engine, request("a long story", reply=1000)))
        next(replies)
        late = Stream(engine, request("another")).result()
        assert long.completion is None
        assert next(replies) is not None, "it still replies"
        long.cancel()
    assert late.usage.cached_tokens == len(HISTORY) + 1, "both turns begin with an a"


def test_where_the_reader_is_cancelled_or_fails_another_reads_on(offsets: list[DomainOffset]) -> None:
    backend = CountingBackend()
    requests = [request(f"turn of {i}: ", offsets[i]) for i in range(3)]
    expected = [run_at_once([each], CountingBackend(), cache_bytes=0)[0].text for each in requests[1:]]
    with Engine(backend, EngineSettings(max_step_tokens=16)) as engine:
        first, *others = [Stream(engine, each) for each in requests]
        first.cancel()
        backend.passes.release(10**6)
        assert [stream.result().text for stream in others] == expected
        with pytest.raises(RequestCancelledError):
            first.result()


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_request_that_waits_for_another_can_be_cancelled_and_can_run_out_of_time(
    offsets: list[DomainOffset], cancelled: bool
) -> None:
    backend = CountingBackend()
    with Engine(backend, EngineSettings(max_step_tokens=16, max_waiting=3)) as engine:
        first = Stream(engine, request("one: ", offsets[0]))
        waits = replace(request("two: ", offsets[1]), timeout_s=None if cancelled else 0.001)
        second = Stream(engine, waits)
        if cancelled:
            second.cancel()
        backend.passes.release(10**6)
        with pytest.raises(RequestCancelledError if cancelled else DeadlineExceededError):
            second.result()
        assert first.result().text
        assert backend.fed <= len(HISTORY) + 20, "the second read nothing"
        # The queue has its places back.
        assert all(s.result().text for s in [Stream(engine, request(f"{i}")) for i in range(3)])


def test_one_sequence_at_a_time_and_no_room_for_entries_still_serves_all(offsets: list[DomainOffset]) -> None:
    requests = [request(f"turn of {i}: ", offsets[i % 4]) for i in range(6)]
    expected = [run_at_once([each], CountingBackend(), cache_bytes=0)[0].text for each in requests]
    for sequences in (1, 2, 6):
        backend = CountingBackend(max_sequences=sequences, kv_capacity_tokens=450)
        assert [reply.text for reply in run_at_once(requests, backend)] == expected


def test_what_waits_for_another_request_takes_no_place_in_the_queue() -> None:
    backend = CountingBackend()
    with Engine(backend, EngineSettings(max_waiting=1, max_step_tokens=16)) as engine:
        reader = Stream(engine, request("one: "))
        until(lambda: engine._waiting[False] == 0)
        follower = Stream(engine, request("two: "))
        backend.passes.release(2)
        until(lambda: engine._waiting[False] == 0)
        assert backend.fed <= 48, "the first is still reading"
        other = Stream(engine, Request((1, 2, 3), (), SamplingParams(max_tokens=2)))
        backend.passes.release(10**6)
        assert all(stream.result() for stream in (reader, follower, other))


def test_an_ended_request_is_forgotten_though_another_read_on_from_it() -> None:
    backend = CountingBackend()
    with Engine(backend, EngineSettings(max_step_tokens=64)) as engine:
        reader, follower = Stream(engine, request("one: ")), Stream(engine, request("two: ", reply=400))
        assert reader._ticket is not None
        job = weakref.ref(reader._ticket._job)
        backend.passes.release(10**6)
        assert reader.result().text
        del reader
        gc.collect()
        assert job() is None
        follower.cancel()


def test_a_request_whose_own_fields_are_wrong_harms_no_other(offsets: list[DomainOffset]) -> None:
    wrong: list[Any] = [
        {"reuse": {"session": "s", "reader": "r"}},
        {"reuse": Reuse("s", "r", ["x"])},  # type: ignore[arg-type]
        {"reuse": Reuse("s", "r", {"x": "soon"})},  # type: ignore[dict-item]
        {"reuse": Reuse(["s"], "r", {"x": 1})},  # type: ignore[arg-type]
        {"score_from": 1.5},
        {"placements": (Placement(2.0, offsets[0], 2),)},  # type: ignore[arg-type]
    ]
    with Engine(FakeBackend()) as engine:
        for fields in wrong:
            with pytest.raises((InvalidRequestError, PlacementError)):
                Stream(engine, replace(request("one"), **fields))
        assert Stream(engine, request("two")).result().text


def test_many_entries_that_branch_off_one_trunk_are_walked_without_recursion() -> None:
    trunk = tuple(range(1, 200)) * 14
    with Engine(FakeBackend(context_tokens=10_000), EngineSettings(cache_bytes=2**40)) as engine:
        cache = engine._cache
        for branch in range(1200):
            cache.put((*trunk[: 20 + 2 * branch], 200, 200), engine.backend.allocate())
        assert cache.known((*trunk[:20], 201)) == 20


def test_no_request_waits_for_what_is_read_in_the_background() -> None:
    backend = CountingBackend()
    with Engine(backend, EngineSettings(max_step_tokens=16)) as engine:
        ahead = Stream(engine, replace(request("one: ", reply=0), background=True))
        backend.passes.release(1)
        until(lambda: backend.fed == 16)
        asked = Stream(engine, request("two: "))
        backend.passes.release(10**6)
        assert asked.result().usage.cached_tokens == 0, "it read for itself"
        assert ahead.result().usage.prompt_tokens > len(HISTORY)
