"""State saved by one engine and restored by another: replies equal cold ones, and nothing foreign is ever used."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import until

from offset_runtime import DomainOffset, EngineSettings, LlamaCppOptions, OffsetRuntime, Request, SamplingParams
from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.engine import Engine
from offset_runtime.errors import EngineClosedError, InvalidRequestError, KVCacheFullError, StateFolderError
from offset_runtime.placement import place
from offset_runtime.request import Completion
from offset_runtime.state_folder import StateFolder
from offset_runtime.stream import Stream

PATIENCE_S = 20
IDENTITY = FakeBackend().identity
# What the fake holds for a token.
TOKEN_BYTES = 64

MakeOffset = Callable[..., DomainOffset]
MakeBackend = Callable[[], Backend]


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "kv")


def offset(seed: int, anchor: str = "sequence", domain: str = "law") -> DomainOffset:
    rows = np.random.default_rng(seed).normal(size=(3, IDENTITY.hidden_size)).astype(np.float32)
    return DomainOffset(domain, rows, anchor, "chat", IDENTITY)  # type: ignore[arg-type]


def ask(ids: Sequence[int], found: DomainOffset | None = None, max_tokens: int = 4) -> Request:
    placements = () if found is None else (place(found, len(ids)),)
    return Request(tuple(ids), placements, SamplingParams(max_tokens=max_tokens))


def run(engine: Engine, request: Request) -> Completion:
    return Stream(engine, request).result()


def cold(request: Request) -> Completion:
    with Engine(FakeBackend(), EngineSettings(cache_bytes=0)) as engine:
        return run(engine, request)


def save(folder: StateFolder, *requests: Request, backend: Backend | None = None) -> None:
    with Engine(backend or FakeBackend()) as engine:
        for request in requests:
            run(engine, request)
        assert engine.save_state(folder) == engine.cache_figures.entries > 0


# What is restored


def test_a_restored_prompt_is_not_read_again_and_goes_on_as_a_cold_one(folder: StateFolder) -> None:
    request = ask(b"a prompt of some length", offset(1, "turn"))
    save(folder, request)
    with Engine(FakeBackend()) as engine:
        assert engine.restore_state(folder) == 1
        found = run(engine, request)
        assert found.usage.cached_tokens == len(request.prompt_ids) - 1
        assert found.token_ids == cold(request).token_ids
        assert engine.cache_figures.entries == 1


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(65, 67), min_size=3, max_size=8), st.integers(0, 4)),
        min_size=2,
        max_size=8,
    ),
    cache_bytes=st.sampled_from([1_000, 10**6]),
    folder_bytes=st.sampled_from([3_000, 10**6]),
    capacity=st.sampled_from([None, 60]),
    truncates=st.booleans(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_restored_every_reply_is_what_a_cold_run_gives(
    tmp_path_factory: pytest.TempPathFactory,
    turns: list[tuple[int, list[int], int]],
    cache_bytes: int,
    folder_bytes: int,
    capacity: int | None,
    truncates: bool,
) -> None:
    folder = StateFolder(tmp_path_factory.mktemp("kv"), folder_bytes)
    transcripts: list[tuple[int, ...]] = [()]
    # Each turn in an engine of its own, as if each were a process.
    for number, (parent, turn, domain) in enumerate(turns):
        ids = (*transcripts[parent % len(transcripts)], *turn)[:40]
        # A domain is registered anew half way: the same name, other rows.
        seed = domain + (10 if number > len(turns) // 2 else 0)
        found = None if domain == 4 else offset(seed, "turn" if domain % 2 else "sequence", f"d{domain}")
        backend = FakeBackend(kv_capacity_tokens=capacity)
        backend.capabilities = replace(backend.capabilities, truncate=truncates)
        with Engine(backend, EngineSettings(cache_bytes=cache_bytes, max_running=2)) as engine:
            restored = engine.restore_state(folder)
            assert restored == engine.cache_figures.entries == backend.open_sequences
            assert engine.cache_figures.bytes <= cache_bytes
            assert engine.cache_figures.tokens <= (capacity or 10**9)
            request = ask(ids, found)
            reply = run(engine, request)
            assert reply.token_ids == cold(request).token_ids
            engine.save_state(folder)
        assert sum(path.stat().st_size for path in folder.path.iterdir()) <= folder_bytes
        transcripts.append((*ids, *reply.token_ids))


def test_a_domain_registered_anew_under_its_name_meets_no_saved_state_of_the_old_one(folder: StateFolder) -> None:
    ids = tuple(b"the same words")
    save(folder, ask(ids, offset(1)))
    with Engine(FakeBackend()) as engine:
        assert engine.restore_state(folder) == 1
        for other in (offset(2), offset(1).scaled(0.5), None):
            found = run(engine, ask(ids, other))
            assert found.usage.cached_tokens == 0
            assert found.token_ids == cold(ask(ids, other)).token_ids
        assert run(engine, ask(ids, offset(1))).usage.cached_tokens == len(ids) - 1


class OtherWeights(FakeBackend):
    """The same identity, and other weights: as a fine-tuned model, or one quantised otherwise, has."""

    def state_key(self) -> str:
        return super().state_key() + " otherwise"


def test_state_of_another_model_is_not_used(folder: StateFolder, caplog: pytest.LogCaptureFixture) -> None:
    save(folder, ask(b"words"), backend=OtherWeights())
    with Engine(FakeBackend()) as engine:
        assert engine.restore_state(folder) == 0
        assert run(engine, ask(b"words")).usage.cached_tokens == 0
    assert "is of another model or version" in caplog.text


def test_a_damaged_file_is_not_used_and_is_written_anew(folder: StateFolder, caplog: pytest.LogCaptureFixture) -> None:
    save(folder, ask(b"words"))
    [path] = folder.path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with Engine(FakeBackend()) as engine:
        assert engine.restore_state(folder) == 0
        found = run(engine, ask(b"words"))
        assert (found.usage.cached_tokens, found.token_ids) == (0, cold(ask(b"words")).token_ids)
        assert engine.save_state(folder) == 1
    with Engine(FakeBackend()) as engine:
        assert engine.restore_state(folder) == 1
    assert caplog.text.count(f"saved state {path} is not used") == 1


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"read": np.zeros((9, 3), np.float32)}, "no state of the fake backend"),
        ({"read": np.zeros((4, 16), np.float32)}, "it holds 4 tokens, not 5"),
    ],
)
def test_sound_files_whose_state_does_not_fit_are_left_out(
    folder: StateFolder, caplog: pytest.LogCaptureFixture, tensors: dict[str, Any], reason: str
) -> None:
    backend = FakeBackend()
    folder.write(backend.state_key(), (1, 2, 3, 4, 5), tensors)
    with Engine(backend) as engine:
        assert engine.restore_state(folder) == 0
        assert (backend.open_sequences, engine.cache_figures.entries) == (0, 0)
    assert reason in caplog.text


# What is saved, and what has room


def test_what_is_on_disk_is_not_written_again_but_counts_as_used(folder: StateFolder) -> None:
    save(folder, ask(b"first"), ask(b"second"))
    written = folder.written_bytes
    with Engine(FakeBackend()) as engine:
        assert engine.restore_state(folder) == 2
        run(engine, ask(b"first"))
        assert engine.save_state(folder) == 2
    assert folder.written_bytes == written
    newest, oldest = folder.entries(FakeBackend().state_key())
    assert bytes(newest.symbols[:5]) == b"first"  # type: ignore[arg-type]
    assert bytes(oldest.symbols[:6]) == b"second"  # type: ignore[arg-type]


def test_of_more_than_the_folder_holds_the_last_used_is_saved(tmp_path: Path) -> None:
    probe = StateFolder(tmp_path / "probe")
    save(probe, ask(b"0" * 20))
    folder = StateFolder(tmp_path / "kv", max_bytes=probe.written_bytes * 5 // 2)
    with Engine(FakeBackend()) as engine:
        for letter in b"abcd":
            run(engine, ask([letter] * 20))
        run(engine, ask(b"b" * 20))
        assert engine.save_state(folder) == 2
    found = [entry.symbols[0] for entry in folder.entries(FakeBackend().state_key())]
    assert found == [ord("b"), ord("d")]


@pytest.mark.parametrize(
    ("limits", "backend", "expected"),
    [
        (EngineSettings(), FakeBackend(), 4),
        (EngineSettings(cache_bytes=2 * 23 * TOKEN_BYTES), FakeBackend(), 2),
        (EngineSettings(cache_bytes=0), FakeBackend(), 0),
        (EngineSettings(max_running=2), FakeBackend(max_sequences=5), 3),
        (EngineSettings(), FakeBackend(kv_capacity_tokens=30), 1),
        (EngineSettings(), FakeBackend(context_tokens=22), 0),
    ],
)
def test_the_newest_are_restored_as_far_as_the_cache_has_room(
    folder: StateFolder, limits: EngineSettings, backend: FakeBackend, expected: int
) -> None:
    save(folder, *(ask([letter] * 20) for letter in b"abcd"))
    with Engine(backend, limits) as engine:
        assert engine.restore_state(folder) == engine.cache_figures.entries == backend.open_sequences == expected
        if expected:
            assert engine.cache_figures.evictions == 0
            assert run(engine, ask(b"d" * 20, max_tokens=1)).usage.cached_tokens == 19


def test_restored_state_is_older_than_all_that_is_cached(folder: StateFolder) -> None:
    save(folder, ask(b"a" * 20), ask(b"b" * 20))
    with Engine(FakeBackend(), EngineSettings(cache_bytes=3 * 23 * TOKEN_BYTES)) as engine:
        run(engine, ask(b"n" * 20))
        assert engine.restore_state(folder) == 2
        # The oldest restored one gives way first, then the other, and then what was read here.
        for letter, left in ((b"x", b"bn"), (b"y", b"n")):
            run(engine, ask(letter * 20))
            held = engine._on_thread(engine._cache.entries)
            assert {entry.symbols[0] for entry in held} >= set(left)
            assert len(held) == 3
        assert ord("b") not in {entry.symbols[0] for entry in held}


def test_what_the_cache_knows_is_not_restored_and_a_longer_one_takes_its_place(folder: StateFolder) -> None:
    save(folder, ask(b"a long history"))
    backend = FakeBackend()
    with Engine(backend) as engine:
        run(engine, ask(b"a long", max_tokens=1))
        assert engine.restore_state(folder) == 1
        # Its beginning can be cut out of it.
        assert engine.cache_figures.entries == backend.open_sequences == 1
        assert engine.restore_state(folder) == 0
        assert folder.read_bytes == folder.written_bytes
        assert run(engine, ask(b"a long history")).usage.cached_tokens == 13


# Threads


class Gated(FakeBackend):
    """Each pass waits for the gate; says when one waits."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waits = threading.Event(), threading.Event()

    def forward(self, chunks: Sequence[Chunk]) -> Any:
        self.waits.set()
        assert self.gate.wait(PATIENCE_S)
        return super().forward(chunks)


def test_saving_and_restoring_work_while_requests_run(folder: StateFolder) -> None:
    requests = [ask(f"request number {n}".encode(), offset(n % 3, "turn"), max_tokens=30) for n in range(12)]
    with Engine(FakeBackend()) as engine, ThreadPoolExecutor(16) as pool:
        replies = [pool.submit(run, engine, request) for request in requests]
        transfers = [pool.submit(move, folder) for _ in range(4) for move in (engine.save_state, engine.restore_state)]
        for transfer in transfers:
            transfer.result(PATIENCE_S)
        for request, reply in zip(requests, replies, strict=True):
            assert reply.result(PATIENCE_S).token_ids == cold(request).token_ids


def test_a_call_that_waits_when_the_engine_closes_ends_with_an_error(folder: StateFolder) -> None:
    backend = Gated()
    engine = Engine(backend)
    with ThreadPoolExecutor(4) as pool:
        stream = Stream(engine, ask(b"words"))
        assert backend.waits.wait(PATIENCE_S)
        calls = [pool.submit(engine.save_state, folder), pool.submit(engine.restore_state, folder)]
        until(lambda: len(engine._calls) == 2)
        closing = pool.submit(engine.close)
        until(lambda: not engine.alive)
        backend.gate.set()
        for call in calls:
            with pytest.raises(EngineClosedError, match="the engine is closed"):
                call.result(PATIENCE_S)
        with pytest.raises(EngineClosedError):
            stream.result()
        closing.result(PATIENCE_S)
    with pytest.raises(EngineClosedError):
        engine.save_state(folder)


def test_a_call_that_waits_when_the_engines_thread_dies_ends_with_an_error(
    folder: StateFolder,
) -> None:
    backend = Gated()

    def dies(*_: object) -> None:
        raise SystemExit

    with Engine(backend) as engine, ThreadPoolExecutor(1) as pool:
        stream = Stream(engine, ask(b"words"))
        assert backend.waits.wait(PATIENCE_S)
        call = pool.submit(engine.restore_state, folder)
        until(lambda: bool(engine._calls))
        engine._make_calls = dies  # type: ignore[method-assign]
        backend.gate.set()
        with pytest.raises(EngineClosedError, match="the engine's thread died"):
            call.result(PATIENCE_S)
        with pytest.raises(EngineClosedError):
            stream.result()


def test_an_error_of_the_backend_reaches_the_caller_and_the_engine_goes_on(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    with Engine(FakeBackend()) as engine:
        run(engine, ask(b"words"))
        monkeypatch.setattr(engine.backend, "export_state", fail)
        with pytest.raises(RuntimeError, match="broken"):
            engine.save_state(folder)
        assert run(engine, ask(b"words")).usage.cached_tokens == 4


class NoRoom(FakeBackend):
    def import_state(self, tensors: Mapping[str, Any]) -> int:
        raise KVCacheFullError("no cells are left")


def test_a_backend_without_room_for_a_state_does_without_it(
    folder: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    save(folder, ask(b"words"))
    with Engine(NoRoom()) as engine:
        assert engine.restore_state(folder) == 0
    assert not caplog.records


def test_a_backend_that_cannot_save_state_says_so(folder: StateFolder) -> None:
    backend = FakeBackend()
    backend.capabilities = replace(backend.capabilities, save_state=False)
    with Engine(backend) as engine:
        for move in (engine.save_state, engine.restore_state):
            with pytest.raises(InvalidRequestError, match="backend 'fake' cannot be saved or restored"):
                move(folder)


def test_a_runtime_takes_a_path_or_a_folder(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with OffsetRuntime(FakeBackend()) as runtime:
        runtime.run(runtime.chat_request(messages))
        assert runtime.save_state(tmp_path / "kv") == 1
        assert runtime.save_state(tmp_path / "small", max_bytes=10) == 0
    with OffsetRuntime(FakeBackend()) as runtime:
        assert runtime.restore_state(StateFolder(tmp_path / "kv")) == 1
        assert runtime.run(runtime.chat_request(messages)).usage.cached_tokens > 0
        (tmp_path / "plain").write_text("text")
        with pytest.raises(StateFolderError):
            runtime.restore_state(tmp_path / "plain")


# Real models


def check_restored_equals_cold(make_backend: MakeBackend, make_offset: MakeOffset, folder: StateFolder) -> None:
    """Three agents over one transcript, each turn in a new backend that has restored what the earlier ones read."""
    ids = [int(i) for i in np.random.default_rng(1).integers(20, 280, 24)]
    backend = make_backend()
    agents = [
        None,
        make_offset(backend.identity, domain="a", seed=1),
        make_offset(backend.identity, domain="b", seed=2, anchor="sequence"),
    ]
    with Engine(backend, EngineSettings(cache_bytes=0)) as plain:
        read = 0
        for turn in range(6):
            request = ask(ids, agents[turn % 3], max_tokens=5)
            expected = run(plain, request)
            other = make_backend()
            with Engine(other) as engine:
                assert engine.restore_state(folder) > 0 or turn == 0
                found = run(engine, request)
                assert found.token_ids == expected.token_ids
                read += len(ids) - found.usage.cached_tokens
                engine.save_state(folder)
            other.close()
            ids += [20 + turn, *(token for token in found.token_ids if token > 2)]
    backend.close()
    assert read < len(ids) * 3


@pytest.fixture
def tiny_torch(tiny_backends: Callable[[str], TorchBackend]) -> Callable[..., MakeBackend]:
    def make(architecture: str, dtype: str = "float32") -> MakeBackend:
        made = tiny_backends(architecture)
        kind = getattr(torch, dtype)
        return lambda: TorchBackend(copy.deepcopy(made.model).to(kind), made.tokenizer._tokenizer)

    return make


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", "float32"), ("gemma3", "float32"), ("llama", "bfloat16")]
)
def test_tiny_torch_models_go_on_from_restored_state(
    tiny_torch: Callable[..., MakeBackend], make_offset: MakeOffset, folder: StateFolder, architecture: str, dtype: str
) -> None:
    check_restored_equals_cold(tiny_torch(architecture, dtype), make_offset, folder)


@pytest.fixture
def tiny_llama(tiny_gguf: Callable[[str], Path]) -> Callable[[str], MakeBackend]:
    options = LlamaCppOptions(n_ctx=512, n_threads=1, type_k="f32", type_v="f32")
    return lambda architecture: lambda: LlamaCppBackend(tiny_gguf(architecture), options)


def test_tiny_gguf_models_go_on_from_restored_state(
    tiny_llama: Callable[[str], MakeBackend], make_offset: MakeOffset, folder: StateFolder
) -> None:
    check_restored_equals_cold(tiny_llama("llama"), make_offset, folder)
