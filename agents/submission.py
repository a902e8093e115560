"""A call as LangChain sees it: handing its requests to the engine, and streaming the reply."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk

from offset_runtime.agents.reply import Provenance
from offset_runtime.errors import RetryableError
from offset_runtime.request import Completion, Delta, Request
from offset_runtime.runtime import OffsetRuntime
from offset_runtime.stream import AsyncStream, Stream

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0

Chunk = TypeVar("Chunk", ChatGenerationChunk, GenerationChunk)


@dataclass(frozen=True, slots=True)
class Call(ABC, Generic[Chunk]):
    """One call of a model, ready to be submitted; subclasses say what LangChain gets of its replies."""

    runtime: OffsetRuntime
    requests: Sequence[Request]
    provenance: Provenance
    max_retries: int

    @abstractmethod
    def chunk(self, delta: Delta) -> Chunk | None:
        """A chunk for new text or log-probabilities; None while a stop string or a character is undecided."""

    @abstractmethod
    def last_chunk(self, completion: Completion) -> Chunk:
        """Usage and provenance. On this chunk only: merging chunks joins strings and adds numbers."""


def stream_chunks(call: Call[Chunk], run_manager: CallbackManagerForLLMRun | None) -> Iterator[Chunk]:
    """Submit the only request of `call` and yield its reply; ending early cancels it."""
    stream = open_stream(call.runtime, call.requests[0], call.max_retries)
    try:
        for delta in stream:
            if chunk := call.chunk(delta):
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
        assert stream.completion is not None
        yield call.last_chunk(stream.completion)
    finally:
        stream.cancel()


async def astream_chunks(
    prepare: Callable[[], Call[Chunk]], run_manager: AsyncCallbackManagerForLLMRun | None
) -> AsyncIterator[Chunk]:
    """As `stream_chunks`, of the call that `prepare` returns, which is run in a thread."""
    call = await asyncio.to_thread(prepare)
    stream = await aopen_stream(call.runtime, call.requests[0], call.max_retries)
    try:
        async for delta in stream:
            if chunk := call.chunk(delta):
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
        assert stream.completion is not None
        yield call.last_chunk(stream.completion)
    finally:
        stream.cancel()


def open_stream(runtime: OffsetRuntime, request: Request, max_retries: int) -> Stream:
    """Submit a request, up to `max_retries` times more after a `RetryableError`."""
    for wait_s in _waits(max_retries):
        try:
            return runtime.stream(request)
        except RetryableError:
            time.sleep(wait_s)
    return runtime.stream(request)


async def aopen_stream(runtime: OffsetRuntime, request: Request, max_retries: int) -> AsyncStream:
    """As `open_stream`, without blocking the event loop."""
    for wait_s in _waits(max_retries):
        try:
            return runtime.astream(request)
        except RetryableError:
            await asyncio.sleep(wait_s)
    return runtime.astream(request)


def run_together(runtime: OffsetRuntime, requests: Sequence[Request], max_retries: int) -> list[Completion]:
    """Run all requests in one batch of the engine; return their replies in order.

    More requests than the queue holds are handed over as replies come in. When one fails, the others
    are cancelled and its error is raised.
    """
    open_streams: deque[Stream] = deque()
    completions = []
    try:
        for request in requests:
            while open_streams:
                try:
                    open_streams.append(runtime.stream(request))
                    break
                except RetryableError:
                    completions.append(open_streams.popleft().result())
            else:
                open_streams.append(open_stream(runtime, request, max_retries))
        while open_streams:
            completions.append(open_streams.popleft().result())
    finally:
        for stream in open_streams:
            stream.cancel()
    return completions


async def arun_together(runtime: OffsetRuntime, requests: Sequence[Request], max_retries: int) -> list[Completion]:
    """As `run_together`, without blocking the event loop."""
    open_streams: deque[AsyncStream] = deque()
    completions = []
    try:
        for request in requests:
            while open_streams:
                try:
                    open_streams.append(runtime.astream(request))
                    break
                except RetryableError:
                    completions.append(await open_streams.popleft().result())
            else:
                open_streams.append(await aopen_stream(runtime, request, max_retries))
        while open_streams:
            completions.append(await open_streams.popleft().result())
    finally:
        for stream in open_streams:
            stream.cancel()
    return completions


def _waits(max_retries: int) -> Iterator[float]:
    for attempt in range(max_retries):
        yield min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S)
