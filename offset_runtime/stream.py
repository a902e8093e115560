"""Reading a reply as it is generated, from a thread or from an event loop."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator

from offset_runtime.engine import Engine, Ticket
from offset_runtime.request import Completion, Delta, Event, Request


class _Reply:
    """A reply on its way, whoever reads it: its ticket, and how it ended."""

    _ticket: Ticket | None = None

    def __init__(self) -> None:
        self.completion: Completion | None = None

    def cancel(self) -> None:
        """Ask the engine to drop the request; a reply that has ended is left as it is."""
        if self._ticket is not None:
            self._ticket.cancel()

    def __del__(self) -> None:
        self.cancel()

    def _delta(self, event: Event, put_back: Callable[[Event], None]) -> Delta | None:
        """Return a delta; of the end, keep the completion or raise the error."""
        if isinstance(event, Delta):
            return event
        # It stays in the queue for whoever else reads this stream, now or later.
        put_back(event)
        if isinstance(event, Exception):
            raise event
        self.completion = event
        return None

    def _finished(self) -> Completion:
        assert self.completion is not None
        return self.completion


class Stream(_Reply):
    """Deltas of one reply, for threads. Iterate, then read `completion`; or call `result`.

    Leaving the loop early, or dropping the stream, cancels the request. Each delta is read once; how the
    reply ended, its completion or its error, is there for every later reader.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        super().__init__()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ticket = engine.submit(request, self._events.put)

    def __iter__(self) -> Iterator[Delta]:
        try:
            while self.completion is None:
                delta = self._delta(self._events.get(), self._events.put)
                if delta is not None:
                    yield delta
        finally:
            self.cancel()

    def result(self) -> Completion:
        """Wait for the whole reply."""
        for _ in self:
            pass
        return self._finished()


class AsyncStream(_Reply):
    """Deltas of one reply, for an event loop, which is never blocked. As `Stream` otherwise."""

    def __init__(self, engine: Engine, request: Request) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        put = self._events.put_nowait
        self._ticket = engine.submit(request, lambda event: _call_soon(loop, put, event))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while self.completion is None:
                delta = self._delta(await self._events.get(), self._events.put_nowait)
                if delta is not None:
                    yield delta
        finally:
            self.cancel()

    async def result(self) -> Completion:
        """Wait for the whole reply."""
        async for _ in self:
            pass
        return self._finished()


def _call_soon(loop: asyncio.AbstractEventLoop, put: Callable[[Event], None], event: Event) -> None:
    loop.call_soon_threadsafe(put, event)
