"""Reading a reply as it is generated, from a thread or from an event loop."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator

from offset_runtime.engine import Engine
from offset_runtime.request import Completion, Delta, Event, Request


class Stream:
    """Deltas of one reply, for threads. Iterate, then read `completion`; or call `result`.

    Leaving the loop early, or dropping the stream, cancels the request. Each delta is read once; how the
    reply ended, its completion or its error, is there for every later reader.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.completion: Completion | None = None
        self._ticket = engine.submit(request, self._events.put)

    def __iter__(self) -> Iterator[Delta]:
        try:
            while self.completion is None:
                event = self._events.get()
                if isinstance(event, Delta):
                    yield event
                    continue
                # It stays in the queue for whoever else reads this stream, now or later.
                self._events.put(event)
                if isinstance(event, Exception):
                    raise event
                self.completion = event
        finally:
            self.cancel()

    def result(self) -> Completion:
        """Wait for the whole reply."""
        for _ in self:
            pass
        assert self.completion is not None
        return self.completion

    def cancel(self) -> None:
        """Ask the engine to drop the request; a reply that has ended is left as it is."""
        self._ticket.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_ticket"):
            self._ticket.cancel()


class AsyncStream:
    """Deltas of one reply, for an event loop, which is never blocked. As `Stream` otherwise."""

    def __init__(self, engine: Engine, request: Request) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.completion: Completion | None = None
        put = self._events.put_nowait
        self._ticket = engine.submit(request, lambda event: _call_soon(loop, put, event))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while self.completion is None:
                event = await self._events.get()
                if isinstance(event, Delta):
                    yield event
                    continue
                self._events.put_nowait(event)
                if isinstance(event, Exception):
                    raise event
                self.completion = event
        finally:
            self.cancel()

    async def result(self) -> Completion:
        """Wait for the whole reply."""
        async for _ in self:
            pass
        assert self.completion is not None
        return self.completion

    def cancel(self) -> None:
        """Ask the engine to drop the request; a reply that has ended is left as it is."""
        self._ticket.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_ticket"):
            self._ticket.cancel()


def _call_soon(loop: asyncio.AbstractEventLoop, put: object, event: Event) -> None:
    loop.call_soon_threadsafe(put, event)  # type: ignore[arg-type]
