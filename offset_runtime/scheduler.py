"""Who runs in the next step. Plain Python: no model, no tensors, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler needs to know of a request."""

    @property
    def pending_tokens(self) -> int:
        """Tokens that must be fed before the next one can be sampled: 1 in decode, more in prefill."""

    @property
    def reserved_tokens(self) -> int:
        """Most tokens of state the request can come to hold."""

    @property
    def ready(self) -> bool:
        """Whether the request can be fed now; one that is running may wait for what another one reads."""

    @property
    def background(self) -> bool:
        """Whether the request may start only while nothing else waits or runs."""


T = TypeVar("T", bound=Schedulable)


@dataclass(slots=True)
class Scheduler(Generic[T]):
    """Continuous batching: decode steps first, then prefill in order of arrival, within a token budget.

    `max_running`: sequences in one step. `max_step_tokens`: tokens in one step. `kv_capacity_tokens`:
    state all running sequences may reserve, or None. `split_prefill`: whether a prompt may be cut to
    fit the budget; otherwise it is fed whole, and if it exceeds the budget as the only prompt of its step.
    """

    max_running: int
    max_step_tokens: int
    kv_capacity_tokens: int | None = None
    split_prefill: bool = True
    running: list[T] = field(default_factory=list)
    waiting: deque[T] = field(default_factory=deque)
    in_background: deque[T] = field(default_factory=deque)

    @property
    def open(self) -> list[T]:
        """All requests that have not ended."""
        return [*self.running, *self.waiting, *self.in_background]

    def add(self, item: T) -> None:
        """Queue a request."""
        (self.in_background if item.background else self.waiting).append(item)

    def remove(self, item: T) -> None:
        """Forget a request, running or waiting."""
        for queue in (self.running, self.waiting, self.in_background):
            if item in queue:
                queue.remove(item)

    def admit(self) -> Iterator[T]:
        """Move waiting requests to running, oldest first, while there is room; yield each.

        Of those in the background one is moved, once nothing else is there.
        """
        while self.waiting and len(self.running) < self.max_running and self._fits(self.waiting[0]):
            item = self.waiting.popleft()
            self.running.append(item)
            yield item
        if self.in_background and not self.running and not self.waiting:
            item = self.in_background.popleft()
            self.running.append(item)
            yield item

    def plan(self) -> list[tuple[T, int]]:
        """Return (request, tokens to feed) for the next step; each request at most once."""
        ready = [item for item in self.running if item.ready]
        decoding = [(item, 1) for item in ready if item.pending_tokens == 1]
        budget = self.max_step_tokens - len(decoding)
        planned = list(decoding)
        for item in sorted(ready, key=lambda item: item.background):
            wanted = item.pending_tokens
            if wanted == 1:
                continue
            given = min(wanted, budget) if self.split_prefill else wanted
            # A whole prompt beyond the budget must not wait until nothing decodes: it might never come to run.
            if given < 1 or (given > budget and len(planned) > len(decoding)):
                break
            planned.append((item, given))
            budget -= given
        return planned

    def _fits(self, item: T) -> bool:
        if self.kv_capacity_tokens is None:
            return True
        return sum(r.reserved_tokens for r in self.running) + item.reserved_tokens <= self.kv_capacity_tokens
