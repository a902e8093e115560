"""Fixtures for the LangChain and LangGraph side: a base with two domains, and a backend that can be watched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from offset_runtime import DomainOffset, EngineSettings, OffsetRuntime
from offset_runtime import shared as shared_module
from offset_runtime.agents import ChatOffset
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.fake import FakeBackend

PATIENCE_S = 20


class WatchedBackend(FakeBackend):
    """A fake backend that records its passes and can be held back.

    `batch_sizes`: sequences in each pass; `started`: set at the first. The first pass waits until
    `expected` requests were submitted. With `in_step`, each later pass waits until all tokens so far were
    `consume`d, so that what readers see is in the order in which the engine made it.
    """

    def __init__(self, *args: Any, expected: int = 0, in_step: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batch_sizes: list[int] = []
        self._expected = expected
        self._in_step = in_step
        self._submitted = self._made = self._consumed = 0
        self._changed = threading.Condition()
        self.started = threading.Event()

    def note_submission(self) -> None:
        with self._changed:
            self._submitted += 1
            self._changed.notify_all()

    def consume(self) -> None:
        with self._changed:
            self._consumed += 1
            self._changed.notify_all()

    def forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(self._may_run, PATIENCE_S), "held back for too long"
            self._made += sum(chunk.logits == "last" for chunk in chunks)
            self.batch_sizes.append(len(chunks))
        self.started.set()
        return super().forward(chunks)

    def _may_run(self) -> bool:
        return self._submitted >= self._expected and (not self._in_step or self._consumed >= self._made)


@pytest.fixture
def watched() -> Iterator[Callable[..., OffsetRuntime]]:
    """Return the function that makes a runtime on a `WatchedBackend`."""
    opened: list[OffsetRuntime] = []

    def make(*args: Any, settings: EngineSettings | None = None, **kwargs: Any) -> OffsetRuntime:
        backend = WatchedBackend(*args, **kwargs)
        runtime = OffsetRuntime(backend, settings=settings)
        submit = runtime.engine.submit

        def counted(*request: Any) -> Any:
            ticket = submit(*request)
            backend.note_submission()
            return ticket

        runtime.engine.submit = counted
        opened.append(runtime)
        return runtime

    yield make
    for runtime in opened:
        runtime.close()


@pytest.fixture
def with_domains(make_offset: Any) -> Callable[[OffsetRuntime], OffsetRuntime]:
    """Return the function that registers the domains `law` and `news` on a runtime."""

    def register(runtime: OffsetRuntime) -> OffsetRuntime:
        for seed, domain in enumerate(["law", "news"]):
            runtime.register(make_offset(runtime.backend.identity, domain, seed=seed))
        return runtime

    return register


@pytest.fixture
def law(fake_runtime: OffsetRuntime, with_domains: Any) -> ChatOffset:
    """A chat model in the domain `law`, on a base that knows `news` too."""
    return ChatOffset(model="fake", domain="law", runtime=with_domains(fake_runtime), max_tokens=12)


@pytest.fixture
def scripted() -> Iterator[Callable[..., ChatOffset]]:
    """Return the function that makes a chat model whose replies a function of the prompt's text writes."""
    opened: list[OffsetRuntime] = []

    def make(script: Callable[[str], str], **fields: Any) -> ChatOffset:
        runtime = OffsetRuntime(FakeBackend(script))
        opened.append(runtime)
        return ChatOffset(model="fake", runtime=runtime, **fields)

    yield make
    for runtime in opened:
        runtime.close()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the threads that load a shared base; every base is a fake one."""
    threads: list[str] = []

    def load(spec: Any) -> FakeBackend:
        threads.append(threading.current_thread().name)
        return FakeBackend()

    monkeypatch.setattr(shared_module, "load_backend", load)
    shared_module.shared_runtimes.close()
    yield threads
    shared_module.shared_runtimes.close()


@pytest.fixture
def store(tmp_path: Path, make_offset: Any) -> Path:
    """A store on disk with the domains `law` and `news` of the fake base."""
    for seed, domain in enumerate(["law", "news"]):
        offset: DomainOffset = make_offset(FakeBackend().identity, domain, seed=seed)
        offset.save(tmp_path / "offsets" / f"{domain}.safetensors")
    return tmp_path / "offsets"
