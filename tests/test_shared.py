"""One loaded base a process, for all who name it; a dead one is loaded again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from offset_runtime import EngineSettings, ModelSpec, OffsetRuntime, SamplingParams, shared
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import EngineClosedError, ModelNotFoundError
from offset_runtime.scheduler import Scheduler
from offset_runtime.shared import SharedRuntimes

PATIENCE_S = 20
FAKE = ModelSpec(base="fake")


class ClosingBackend(FakeBackend):
    """A fake backend that counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        super().close()
        self.closed += 1


@pytest.fixture
def runtimes() -> Iterator[SharedRuntimes]:
    made = SharedRuntimes()
    yield made
    made.close()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[ClosingBackend]:
    """The backends that shared runtimes load, as they load them."""
    backends: list[ClosingBackend] = []

    def load(spec: ModelSpec) -> ClosingBackend:
        backends.append(ClosingBackend())
        return backends[-1]

    monkeypatch.setattr(shared, "load_backend", load)
    return backends


def reply_tokens(runtime: OffsetRuntime) -> int:
    request = runtime.text_request("hello", sampling=SamplingParams(max_tokens=2))
    return runtime.run(request).usage.output_tokens


def test_every_caller_of_a_process_gets_the_same_base(runtimes: SharedRuntimes) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: runtimes.get(FAKE), range(32)))
    assert all(runtime is found[0] for runtime in found)
    assert runtimes.get(ModelSpec(base="fake"), EngineSettings()) is found[0]
    assert runtimes.get(FAKE, EngineSettings(max_running=2)) is not found[0]
    assert runtimes.get(ModelSpec(base="fake", dtype="float16")) is not found[0]
    runtimes.close()
    with pytest.raises(EngineClosedError):
        found[0].run(found[0].text_request("hello"))
    again = runtimes.get(FAKE)
    assert again is not found[0]
    assert reply_tokens(again) == 2


def test_a_failed_load_can_be_tried_again(runtimes: SharedRuntimes, tmp_path: Path) -> None:
    spec = ModelSpec(base=str(tmp_path / "later"))
    for _ in range(2):
        with pytest.raises(ModelNotFoundError):
            runtimes.get(spec)


def test_paths_that_name_one_folder_share_one_base(
    runtimes: SharedRuntimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    one = runtimes.get(ModelSpec(base="model", backend="fake"))
    assert runtimes.get(ModelSpec(base=str(tmp_path / "model"), backend="fake")) is one


def test_a_runtime_that_its_user_closed_is_loaded_again(runtimes: SharedRuntimes, loaded: list[ClosingBackend]) -> None:
    first = runtimes.get(FAKE)
    assert first.engine.alive
    first.close()
    assert not first.engine.alive
    again = runtimes.get(FAKE)
    assert again is not first
    assert reply_tokens(again) == 2
    assert runtimes.get(FAKE) is again
    assert len(loaded) == 2


def test_a_runtime_whose_engine_died_is_released_and_loaded_again(
    runtimes: SharedRuntimes, loaded: list[ClosingBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(scheduler: Scheduler[object]) -> NoReturn:
        raise RuntimeError("out of luck")

    first = runtimes.get(FAKE)
    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "plan", die)
        with pytest.raises(EngineClosedError, match="out of luck"):
            reply_tokens(first)
    assert not first.engine.alive
    again = runtimes.get(FAKE)
    assert reply_tokens(again) == 2
    assert [backend.closed for backend in loaded] == [1, 0]


def test_closing_during_a_load_neither_breaks_nor_loses_the_runtime(
    runtimes: SharedRuntimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(spec: ModelSpec) -> FakeBackend:
        loading.set()
        assert go_on.wait(PATIENCE_S)
        return FakeBackend()

    monkeypatch.setattr(shared, "load_backend", load)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(runtimes.get, FAKE)
        assert loading.wait(PATIENCE_S)
        runtimes.close()
        go_on.set()
        found = asked.result(PATIENCE_S)
    assert found.engine.alive
    assert runtimes.get(FAKE) is found
    runtimes.close()
    assert not found.engine.alive


def test_every_runtime_is_closed_whoever_asks_while_others_close(
    runtimes: SharedRuntimes, loaded: list[ClosingBackend]
) -> None:
    def work(turn: int) -> None:
        runtimes.get(FAKE)
        if turn % 4 == 0:
            runtimes.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(64)))
    runtimes.close()
    assert len(loaded) > 1
    assert all(backend.closed for backend in loaded)
