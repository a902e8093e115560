"""Handing requests to the engine, and trying again when its queue is full."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence

from offset_runtime.errors import RetryableError
from offset_runtime.request import Completion, Request
from offset_runtime.runtime import OffsetRuntime
from offset_runtime.stream import AsyncStream, Stream

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0


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
