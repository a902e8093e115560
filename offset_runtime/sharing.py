"""Requests that run at the same time and begin alike: which one reads, and which wait for it. No tensors.

The prefix cache holds what ended requests have read. What a running one reads is handed to those beside it through the
cache too: they wait until it has read all that they share, and go on from a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from offset_runtime.cache import PrefixCache
from offset_runtime.job import Job
from offset_runtime.placement import Symbol, agreement

# Fewer tokens than this are read sooner than another request's state is waited for and copied.
_WORTH_SHARING = 16


class Sharing:
    """Who waits for whom, among jobs whose state `cache` may keep copies of."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._readers: WeakKeyDictionary[Job, tuple[Job, int]] = WeakKeyDictionary()

    def must_wait(self, job: Job, running: Sequence[Job]) -> bool:
        """Whether one of `running` is still reading what `job` begins with; once it has, the cache gets a copy.

        To be asked again after each step. Of several jobs that begin alike one reads, and the others go on from its
        state; where it ends early, another of them reads on.
        """
        found = self._readers.get(job)
        if found is None or found[0] not in running:
            found = self._reader_ahead(job, running)
        if found is None:
            self._readers.pop(job, None)
            return False
        reader, shared = found
        if not reader.has_read(shared):
            self._readers[job] = found
            return True
        self._readers.pop(job, None)
        if reader.sequence is not None:
            self._cache.put_copy(reader.prompt_symbols[:shared], reader.sequence, reader.request.reuse)
        return False

    def _reader_ahead(self, job: Job, running: Sequence[Job]) -> tuple[Job, int] | None:
        """The job that shares most with `job`, and how many tokens; None where the cache has about as many."""
        if not self._cache.keeps_any:
            return None
        most = job.prompt_symbols[: job.reusable_tokens]
        readers = [other for other in running if other.ready]
        shared = [_shared(job, reader, most) for reader in readers]
        best = max(shared, default=0)
        if best < self._cache.known(most) + _WORTH_SHARING:
            return None
        return readers[shared.index(best)], best


def _shared(job: Job, reader: Job, most: Sequence[Symbol]) -> int:
    """How many of the symbols `most` of `job` it can take over from `reader`."""
    shared = reader.shareable(agreement(reader.prompt_symbols, most))
    # One in the background is read on only where others leave room, so what it has not read yet is not waited for.
    return 0 if reader.background and not job.background and not reader.has_read(shared) else shared
