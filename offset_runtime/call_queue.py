"""Calls that other threads want made on the thread that owns the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class CallQueue:
    """Functions to be called by the owning thread, each with the future of its answer. Safe from any thread."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def __len__(self) -> int:
        """How many calls are to be made."""
        return len(self._calls)

    def add(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; the future has what it returns or raises, once the owning thread has made it."""
        answer: Future[T] = Future()
        self._calls.append((call, answer))
        return answer

    def make(self) -> None:
        """Make the calls that are queued now, on the owning thread."""
        # As many as there are now: a thread that calls on and on must not keep requests waiting.
        for _ in range(len(self._calls)):
            call, answer = self._calls.popleft()
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Answer the calls that are queued with an error each; `error` makes them."""
        while self._calls:
            _, answer = self._calls.popleft()
            answer.set_exception(error())
