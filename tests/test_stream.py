"""Replies in an event loop: the loop is never blocked, and what it leaves behind is freed."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from offset_runtime import Delta, EngineSettings, OffsetRuntime, Request, SamplingParams
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import GenerationError, InvalidRequestError, QueueFullError, RequestCancelledError

PATIENCE_S = 60


class HeldBackend(FakeBackend):
    """A fake whose steps can be held back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def forward(self, chunks: Sequence[Chunk]) -> list[npt.NDArray[np.float32]]:
        assert self.gate.wait(PATIENCE_S)
        if self.broken:
            raise RuntimeError("out of order")
        return super().forward(chunks)


@pytest.fixture
def backend() -> HeldBackend:
    return HeldBackend()


@pytest.fixture
def runtime(backend: HeldBackend) -> Iterator[OffsetRuntime]:
    with OffsetRuntime(backend, settings=EngineSettings(max_waiting=32)) as made:
        yield made
        backend.gate.set()
    assert backend.open_sequences == 0


def request(text: str = "hello", max_tokens: int = 8) -> Request:
    return Request(tuple(text.encode()), (), SamplingParams(max_tokens=max_tokens))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what it waits for happens on another thread
            await asyncio.sleep(0.001)


async def test_the_loop_goes_on_while_the_model_works(runtime: OffsetRuntime, backend: HeldBackend) -> None:
    backend.gate.clear()
    waiting = asyncio.create_task(runtime.arun(request()))
    # The model's step ends only when the loop gets here: a blocked loop would never open the gate.
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    backend.gate.set()
    assert (await waiting).token_ids == runtime.run(request()).token_ids


async def test_async_and_sync_streams_give_the_same_deltas(runtime: OffsetRuntime) -> None:
    stream = runtime.astream(request())
    found = [delta async for delta in stream]
    assert found == list(runtime.stream(request()))
    assert stream.completion is not None
    assert "".join(delta.text for delta in found) == stream.completion.text


async def test_many_replies_at_once_are_each_their_own(runtime: OffsetRuntime) -> None:
    asked = [request(f"agent {i}", max_tokens=3 + i) for i in range(16)]
    found = await asyncio.gather(*(runtime.arun(item) for item in asked))
    assert [f.token_ids for f in found] == [runtime.run(item).token_ids for item in asked]


async def test_cancelling_a_task_frees_its_state(runtime: OffsetRuntime, backend: HeldBackend) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in runtime.astream(request(max_tokens=4000)):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: backend.open_sequences == runtime.engine.cache_figures.entries)
    assert (await runtime.arun(request())).usage.output_tokens == 8


async def test_a_timeout_of_the_caller_frees_the_state(runtime: OffsetRuntime, backend: HeldBackend) -> None:
    backend.gate.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await runtime.arun(request(max_tokens=4000))
    backend.gate.set()
    await until(
        lambda: backend.open_sequences == runtime.engine.cache_figures.entries and not runtime.engine._scheduler.running
    )


async def test_leaving_the_loop_over_a_stream_cancels_it(runtime: OffsetRuntime, backend: HeldBackend) -> None:
    stream = runtime.astream(request(max_tokens=4000))
    async for _ in stream:
        break
    await until(lambda: backend.open_sequences == runtime.engine.cache_figures.entries)
    with pytest.raises(RequestCancelledError):
        await stream.result()


async def test_a_dropped_stream_cancels_its_request(runtime: OffsetRuntime, backend: HeldBackend) -> None:
    stream = runtime.astream(request(max_tokens=4000))
    await until(lambda: backend.open_sequences == 1)
    del stream
    gc.collect()
    await until(lambda: backend.open_sequences == runtime.engine.cache_figures.entries)


async def test_an_error_reaches_the_task_and_every_later_reader(runtime: OffsetRuntime, backend: HeldBackend) -> None:
    backend.broken = True
    stream = runtime.astream(request())
    for _ in range(2):
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(GenerationError, match="out of order"):
                await stream.result()


async def test_requests_that_cannot_run_are_refused_before_the_first_await(runtime: OffsetRuntime) -> None:
    with pytest.raises(InvalidRequestError):
        runtime.astream(Request(()))


async def test_a_full_queue_does_not_block_the_loop(runtime: OffsetRuntime, backend: HeldBackend) -> None:
    backend.gate.clear()
    streams = []
    with pytest.raises(QueueFullError):  # noqa: PT012  # which one does not fit depends on what already runs
        for i in range(100):
            streams.append(runtime.astream(request(f"r{i}")))
    backend.gate.set()
    for stream in streams:
        assert (await stream.result()).usage.output_tokens == 8


def test_a_loop_that_is_closed_does_not_end_the_engine(runtime: OffsetRuntime, backend: HeldBackend) -> None:
    async def begin() -> Delta:
        stream = runtime.astream(request(max_tokens=4000))
        kept.append(stream)
        return await anext(aiter(stream))

    kept: list[object] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    assert runtime.run(request()).usage.output_tokens == 8


def test_a_loop_that_is_closed_without_a_word_does_not_end_the_engine(
    runtime: OffsetRuntime, backend: HeldBackend
) -> None:
    async def begin() -> None:
        kept.append(runtime.astream(request(max_tokens=200)))

    kept: list[object] = []
    backend.gate.clear()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    backend.gate.set()
    assert runtime.run(request()).usage.output_tokens == 8


def test_loops_of_many_threads_share_one_engine(runtime: OffsetRuntime) -> None:
    found: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        found[i] = asyncio.run(runtime.arun(request(f"thread {i}"))).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == {i: runtime.run(request(f"thread {i}")).token_ids for i in range(6)}


async def test_a_stream_needs_a_running_loop_and_the_engine_does_not_mind(runtime: OffsetRuntime) -> None:
    def outside() -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            runtime.astream(request())

    await asyncio.to_thread(outside)
    assert (await runtime.arun(request())).usage.output_tokens == 8
