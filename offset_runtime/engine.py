"""The one thread that owns the model: admit, prefill, decode, sample, emit."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from offset_runtime.admission import check_request
from offset_runtime.backends.base import Backend, SequenceId
from offset_runtime.cache import CacheFigures, PrefixCache
from offset_runtime.call_queue import CallQueue
from offset_runtime.constrain import Constraint, Grammars
from offset_runtime.errors import (
    DeadlineExceededError,
    EngineClosedError,
    GenerationError,
    OffsetError,
    QueueFullError,
    RequestCancelledError,
)
from offset_runtime.job import Job
from offset_runtime.persistence import restore_entries, save_entries
from offset_runtime.request import CacheUse, Completion, Delta, Event, Request, Sink
from offset_runtime.scheduler import Scheduler
from offset_runtime.sharing import Sharing
from offset_runtime.state_folder import StateFolder
from offset_runtime.tracing import log_end, tracing

_log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineSettings(BaseModel):
    """Limits of the engine.

    `max_running`: sequences that share a step. `max_step_tokens`: tokens in one step, which bounds how
    long a long prompt can hold up the replies beside it. `max_waiting`: requests that may queue, and as many in the
    background beside them. `cache_bytes`: state of ended requests that is kept for those that begin as they did,
    beside that of running ones; 0: none.
    `snapshot_tokens`: where the state of a model cannot be cut back (recurrent ones, and sliding windows on llama.cpp),
    a copy of it is kept after as many tokens of a prompt, before each offset, and before the prompt's last token. A
    prompt is cut there: at the default, which is a step's, no pass over the weights is added but at the last two.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_running: int = Field(default=16, ge=1)
    max_step_tokens: int = Field(default=256, ge=1)
    max_waiting: int = Field(default=256, ge=1)
    cache_bytes: int = Field(default=512 * 2**20, ge=0)
    snapshot_tokens: int = Field(default=256, ge=1)


class Ticket:
    """A submitted request, as its caller sees it."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def cancel(self) -> None:
        """Ask the engine to drop the request; it does so before its next step. Safe from any thread."""
        self._job.cancelled = True


class Engine:
    """Runs requests of any domains in one batch on one thread.

    Usable as a context manager. `submit` may be called from any thread; events reach `sink` on the
    engine's thread, so a sink must only hand them on. `model`: what traces call the base model; None: its architecture.
    """

    def __init__(self, backend: Backend, settings: EngineSettings | None = None, *, model: str | None = None) -> None:
        self.backend = backend
        self.settings = settings or EngineSettings()
        self._tracing = tracing(model or backend.identity.architecture)
        capabilities = backend.capabilities
        self._scheduler: Scheduler[Job] = Scheduler(
            max_running=min(self.settings.max_running, capabilities.max_sequences or self.settings.max_running),
            max_step_tokens=self.settings.max_step_tokens,
            kv_capacity_tokens=capabilities.kv_capacity_tokens,
            split_prefill=capabilities.split_prefill,
        )
        self._grammars = Grammars(backend.tokenizer)
        self._cache = self._make_cache()
        takes_snapshots = self._cache.keeps_any and not capabilities.truncate
        self._snapshot_tokens = self.settings.snapshot_tokens if takes_snapshots else None
        self._sharing = Sharing(self._cache)
        self._cache_figures = self._cache.figures
        self._inbox: deque[Job] = deque()
        self._calls = CallQueue()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        # Requests in the background must not take the places of others.
        self._waiting = {False: 0, True: 0}
        self._thread = threading.Thread(target=self._run, name="offset-runtime-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether requests can still be submitted: not closed, and its thread has not died."""
        return self._failure is None and not self._closing

    @property
    def cache_figures(self) -> CacheFigures:
        """What the prefix cache holds and did until now. Safe from any thread."""
        return self._cache_figures

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Queue a request.

        `sink` receives `Delta` events and then one `Completion` or one exception. Raises `ContextOverflowError`,
        `PlacementError` or `InvalidRequestError` for a request that can never run (`ConstraintError` where its
        constraint does not fit the model), `QueueFullError` when too many wait, `EngineClosedError` after `close`.

        The model's first request with a constraint takes up to a second here, in which its vocabulary is read.
        """
        span = None if self._tracing is None else self._tracing.begin(request)
        if span is None:
            return self._submit(request, sink)
        try:
            return self._submit(request, span.follow(sink))
        except Exception as error:
            span.end(error)
            raise

    def _submit(self, request: Request, sink: Sink) -> Ticket:
        check_request(request, self.backend.capabilities, self.backend.identity.hidden_size)
        self._check_open()
        # Here and not on the engine's thread, whose other requests would wait for it.
        job = Job(request, sink, self.backend, self._grammars.matcher(request.constraint))
        with self._wake:
            self._check_open()
            waiting = self._waiting[job.background]
            if waiting >= self.settings.max_waiting:
                where = "queue in the background" if job.background else "queue"
                raise QueueFullError(
                    f"the engine's {where} is full: {waiting} requests wait (max_waiting = "
                    f"{self.settings.max_waiting}). Try again later, or raise max_waiting."
                )
            self._waiting[job.background] += 1
            self._inbox.append(job)
            self._wake.notify()
        return Ticket(job)

    def check_constraint(self, constraint: Constraint) -> None:
        """Raise `ConstraintError` for a constraint that does not fit the model, as `submit` would.

        The first takes up to a second, in which the vocabulary is read; after it `submit` is quick on an event loop.
        """
        self._grammars.matcher(constraint)

    def save_state(self, folder: StateFolder) -> int:
        """Write what the prefix cache holds and `folder` does not, and return how many of its entries are there now.

        Of more than fits in the folder, the last used. Requests run on meanwhile. Safe from any thread. Raises
        `InvalidRequestError` where the backend cannot, `StateFolderError` where the folder cannot be written, and
        `EngineClosedError`.
        """
        return save_entries(self._cache, self.backend, folder, self._on_thread)

    def restore_state(self, folder: StateFolder) -> int:
        """Put states of this model that `folder` holds into the prefix cache, and return how many.

        Newest first, as far as the cache has room: nothing in it gives way. What is damaged or of another model is
        left out with a warning. Safe from any thread. Raises `InvalidRequestError` where the backend cannot, and
        `EngineClosedError`.
        """
        return restore_entries(self._cache, self.backend, folder, self._on_thread, self._room_tokens)

    def close(self) -> None:
        """Stop after the current step; requests that have not ended fail with `EngineClosedError`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _make_cache(self) -> PrefixCache:
        capabilities, most = self.backend.capabilities, None
        if capabilities.max_sequences is not None:
            most = capabilities.max_sequences - self._scheduler.max_running
        if not (capabilities.fork and capabilities.split_prefill):
            # The rest of a prompt whose beginning is known would be fed token by token, which is slower than all of it.
            most = 0
        return PrefixCache(self.backend, max_bytes=self.settings.cache_bytes, max_entries=most)

    def _on_thread(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises, called between two steps on the thread that owns the model."""
        if threading.current_thread() is self._thread:
            return call()
        with self._wake:
            self._check_open()
            answer = self._calls.add(call)
            self._wake.notify()
        return answer.result()

    def _room_tokens(self) -> float:
        """Tokens that the backend has room for beside what runs and is cached, each sequence counted alone."""
        capacity = self.backend.capabilities.kv_capacity_tokens
        if capacity is None:
            return float("inf")
        reserved = sum(running.reserved_tokens for running in self._scheduler.running)
        return capacity - reserved - self._cache.figures.tokens

    def _check_open(self) -> None:
        if self._failure is not None or self._closing:
            raise self._closed_error()

    def _closed_error(self) -> EngineClosedError:
        if self._failure is not None:
            return EngineClosedError(f"the engine's thread died: {self._failure!r}. Load the model again.")
        return EngineClosedError("the engine is closed; load the model again to go on")

    def _make_calls(self) -> None:
        if self._calls:
            self._calls.make()
            self._cache_figures = self._cache.figures

    def _run(self) -> None:
        try:
            while self._collect():
                self._make_calls()
                self._sweep()
                for job in self._scheduler.admit():
                    self._count_waiting(job, -1)
                for job in [job for job in self._scheduler.running if not job.ready]:
                    self._start(job)
                work = [(job, min(tokens, job.chunk_limit)) for job, tokens in self._scheduler.plan()]
                if work:
                    self._step(work)
            self._end_all("the engine was closed before this request ended")
        except BaseException as error:
            _log.exception("the engine's thread died")
            with self._wake:
                self._failure = error
                self._drain_inbox()
            self._end_all(f"the engine's thread died: {error!r}. Load the model again.")
        finally:
            with self._wake:
                self._calls.refuse(self._closed_error)
            self._cache.clear()
            self._cache_figures = self._cache.figures

    def _collect(self) -> bool:
        """Wait for work and take it in; False when the engine is to stop."""
        with self._wake:
            while not (self._closing or self._inbox or self._calls or self._scheduler.open):
                self._wake.wait()
            self._drain_inbox()
            return not self._closing

    def _drain_inbox(self) -> None:
        while self._inbox:
            self._scheduler.add(self._inbox.popleft())

    def _sweep(self) -> None:
        """End requests that were cancelled or are past their deadline."""
        now = time.monotonic()
        for job in self._scheduler.open:
            if job.cancelled:
                self._end(job, RequestCancelledError("the request was cancelled"))
            elif job.deadline is not None and now >= job.deadline:
                self._end(
                    job,
                    DeadlineExceededError(
                        f"the request did not end within {job.request.timeout_s} s "
                        f"({len(job.output_ids)} of at most {job.request.sampling.max_tokens} tokens generated)"
                    ),
                )

    def _start(self, job: Job) -> None:
        """Open the sequence of a job that is admitted, unless it had better wait for what another one reads."""
        try:
            if self._sharing.must_wait(job, self._scheduler.running):
                return
            job.evictions_before = self._cache_figures.evictions
            if job.request.reuse is not None:
                self._cache.expect(job.request.reuse)
            found = self._cache.take(job.prompt_symbols, job.reusable_tokens)
            sequence, held = found or (self._cache.with_room(self.backend.allocate), 0)
            job.open(sequence, held, self._snapshot_tokens)
            self._make_room()
        except Exception as error:
            self._end(job, _as_generation_error(error))

    def _make_room(self) -> None:
        """Drop cached entries that running requests may come to need the place of."""
        capacity = self.backend.capabilities.kv_capacity_tokens
        if capacity is not None:
            # A reservation is for the whole sequence, so what it shares with an entry is counted in both.
            self._cache.shrink(capacity - sum(running.reserved_tokens for running in self._scheduler.running))
        self._cache_figures = self._cache.figures

    def _count_waiting(self, job: Job, change: int) -> None:
        with self._wake:
            self._waiting[job.background] += change

    def _step(self, work: Sequence[tuple[Job, int]]) -> None:
        chunks = [job.chunk(tokens) for job, tokens in work]
        try:
            logits = self._cache.with_room(lambda: self.backend.forward(chunks))
        except Exception as error:
            if len(work) == 1:
                self._end(work[0][0], _as_generation_error(error))
            else:
                # No sequence has changed, so each can run alone, and only those at fault fail; where state cannot
                # be restored (`Backend.forward`), the backend has closed what had changed, and that fails too.
                _log.warning("a batched step failed (%s); running its %d requests one by one", error, len(work))
                for item in work:
                    self._step([item])
            return
        for (job, tokens), rows in zip(work, logits, strict=True):
            try:
                events = job.advance(tokens, rows)
                if job.at_border and job.sequence is not None:
                    self._cache.put_copy(job.read_symbols, job.sequence, job.request.reuse)
                for event in events:
                    self._emit(job, event)
            except Exception as error:
                self._end(job, _as_generation_error(error))

    def _emit(self, job: Job, event: Delta | Completion) -> None:
        if isinstance(event, Completion):
            self._end(job, event)
            return
        try:
            job.sink(event)
        except Exception:
            # The reader is gone, for example with its event loop.
            _log.debug("a reader went away; its request is cancelled", exc_info=True)
            job.cancelled = True

    def _end(self, job: Job, outcome: Event) -> None:
        if job not in self._scheduler.running:
            self._count_waiting(job, -1)
        self._scheduler.remove(job)
        if job.sequence is not None:
            try:
                self._part_from(job, job.sequence, outcome)
            except Exception:
                # The caller must get its answer, and the other requests their steps.
                _log.exception("the state of an ended request could not be freed")
        if isinstance(outcome, Completion):
            held = self._cache_figures
            used = CacheUse(held.entries, held.bytes, held.evictions - job.evictions_before)
            outcome = replace(outcome, cache=used)
        log_end(_log, job.request, outcome, len(job.output_ids))
        try:
            job.sink(outcome)
        except Exception:
            _log.debug("a reader went away before its request ended", exc_info=True)

    def _part_from(self, job: Job, sequence: SequenceId, outcome: Event) -> None:
        """Keep the state of a request that ended well or was stopped; after an error nobody knows what it is."""
        if isinstance(outcome, Completion | RequestCancelledError | DeadlineExceededError):
            self._cache.put(job.read_symbols, sequence, job.request.reuse)
        else:
            self.backend.free(sequence)
        self._cache_figures = self._cache.figures

    def _end_all(self, why: str) -> None:
        for job in self._scheduler.open:
            # One error a request: threads that raise one object at once would mix its tracebacks.
            self._end(job, EngineClosedError(why))


def _as_generation_error(error: Exception) -> OffsetError:
    if isinstance(error, OffsetError):
        return error
    wrapped = GenerationError(f"the model failed on this request: {error!r}; other requests are not affected")
    wrapped.__cause__ = error
    return wrapped
