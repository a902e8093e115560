"""Fixtures for workflows: files written on the spot, and a runtime whose backend can be watched."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from offset_runtime import OffsetRuntime
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.graphs import AgentFinished, WorkflowGraph, run_workflow

PATIENCE_S = 20

WriteWorkflow = Callable[[str], Path]


@pytest.fixture
def write_workflow(tmp_path: Path) -> WriteWorkflow:
    """Return the function that writes a workflow file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "workflow.yaml"
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return path

    return write


@pytest.fixture
def save_offset(tmp_path: Path, make_offset: Callable[..., Any]) -> Callable[..., Path]:
    """Return the function that writes an offset for the fake backend to offsets/<domain>.safetensors."""

    def save(domain: str, **settings: Any) -> Path:
        settings.setdefault("identity", FakeBackend().identity)
        path: Path = make_offset(domain=domain, **settings).save(tmp_path / "offsets" / f"{domain}.safetensors")
        return path

    return save


class WatchedBackend(FakeBackend):
    """Records how many sequences each pass held; its first pass waits until `expected` requests are there."""

    def __init__(self, *args: Any, expected: int = 0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.batch_sizes: list[int] = []
        self.expected = expected
        self._submitted = 0
        self._changed = threading.Condition()

    def note_submission(self) -> None:
        with self._changed:
            self._submitted += 1
            self._changed.notify_all()

    def forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        with self._changed:
            enough = self._changed.wait_for(lambda: self._submitted >= self.expected, PATIENCE_S)
        assert enough, f"only {self._submitted} of {self.expected} requests came"
        self.batch_sizes.append(len(chunks))
        return super().forward(chunks)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OffsetRuntime]]:
    """Return the function that makes a runtime on a `WatchedBackend`."""
    runtimes: list[OffsetRuntime] = []

    def make(*args: Any, **settings: Any) -> OffsetRuntime:
        backend = WatchedBackend(*args, **settings)
        runtime = OffsetRuntime(backend)
        submit = runtime.engine.submit

        def noted(*request: Any) -> Any:
            ticket = submit(*request)
            backend.note_submission()
            return ticket

        monkeypatch.setattr(runtime.engine, "submit", noted)
        runtimes.append(runtime)
        return runtime

    yield make
    for runtime in runtimes:
        runtime.close()


@pytest.fixture
def scripted() -> Iterator[Callable[[dict[str, str]], OffsetRuntime]]:
    """Return the function that makes a runtime whose replies are chosen by a phrase of the prompt."""
    runtimes: list[OffsetRuntime] = []

    def make(replies: dict[str, str]) -> OffsetRuntime:
        def script(prompt: str) -> str:
            return next((reply for phrase, reply in replies.items() if phrase in prompt), "nothing to say")

        runtimes.append(OffsetRuntime(FakeBackend(script)))
        return runtimes[-1]

    yield make
    for runtime in runtimes:
        runtime.close()


def turns(graph: WorkflowGraph, text: str = "hello") -> list[tuple[str, str]]:
    """Run a graph; return (agent, reply) of its turns."""
    return [(e.agent, e.reply) for e in run_workflow(graph, text) if isinstance(e, AgentFinished)]


@pytest.fixture(name="turns")
def _turns() -> Callable[..., list[tuple[str, str]]]:
    return turns
