"""What a backend takes for state of its own model, beside what the conformance suite tries on every backend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offset_runtime import LlamaCppOptions
from offset_runtime.backends import llama_state
from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.errors import GenerationError, InvalidRequestError, KVCacheFullError

TinyBackends = Callable[[str], TorchBackend]
TinyGguf = Callable[[str], Path]

IDS = [int(i) for i in np.random.default_rng(3).integers(20, 280, 24)]


def state_of(backend: Backend, ids: list[int] = IDS) -> dict[str, np.ndarray[Any, Any]]:
    sequence = backend.allocate()
    backend.forward([Chunk(sequence, ids)])
    found = backend.export_state(sequence)
    backend.free(sequence)
    return found


def llama(path: Path, **options: Any) -> LlamaCppBackend:
    settings = {"n_ctx": 256, "n_threads": 1, "type_k": "f32", "type_v": "f32", "flash_attn": False} | options
    return LlamaCppBackend(path, LlamaCppOptions(**settings))


# The key


def test_the_key_of_a_torch_model_follows_its_weights_settings_and_dtype(tiny_backends: TinyBackends) -> None:
    original = tiny_backends("llama")

    def key(change: Callable[[Any], object]) -> str:
        model = copy.deepcopy(original.model)
        change(model)
        return TorchBackend(model, original.tokenizer._tokenizer).state_key()

    def nudge(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight.data.mul_(1.001)

    def turn(model: Any) -> None:
        model.config.rope_parameters["rope_theta"] = 20_000.0

    same = {key(lambda model: None), original.state_key()}
    assert len(same) == 1
    others = {key(nudge), key(turn), key(lambda model: model.bfloat16())}
    assert len(others - same) == 3
    # Where a model lies is no part of what it computes.
    assert {key(lambda model: setattr(model.config, "_name_or_path", "elsewhere"))} == same


def test_the_key_of_a_gguf_model_follows_its_bytes_and_the_type_of_its_cache(
    tiny_gguf: TinyGguf, tmp_path: Path
) -> None:
    path, copied, changed = tiny_gguf("llama"), tmp_path / "copy.gguf", tmp_path / "changed.gguf"
    data = bytearray(path.read_bytes())
    copied.write_bytes(data)
    data[-1] ^= 1
    changed.write_bytes(data)
    exact = LlamaCppOptions(type_k="f32", type_v="f32")
    key = llama_state.state_key(path, exact)
    # The size of the context is no part of a sequence's state.
    assert llama_state.state_key(copied, LlamaCppOptions(type_k="f32", type_v="f32", n_ctx=64)) == key
    others = {
        llama_state.state_key(changed, exact),
        llama_state.state_key(path, LlamaCppOptions()),
        llama_state.state_key(path, LlamaCppOptions(type_k="f32", type_v="f32", flash_attn=True)),
    }
    assert len(others - {key}) == 3


def test_of_a_large_file_a_change_of_64_kib_anywhere_shows(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    size = 80 * 2**20
    with path.open("wb") as stream:
        stream.truncate(size)
    key = llama_state.state_key(path, LlamaCppOptions())
    for start in (2**20, 40 * 2**20, size - 64 * 1024):
        with path.open("r+b") as stream:
            stream.seek(start)
            stream.write(b"\1" * 64 * 1024)
        changed = llama_state.state_key(path, LlamaCppOptions())
        assert changed != key
        key = changed


def test_all_parts_of_a_split_model_are_in_its_key(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for path in paths:
        path.write_bytes(b"part")
    key = llama_state.state_key(paths[0], LlamaCppOptions())
    paths[1].write_bytes(b"PART")
    assert llama_state.state_key(paths[0], LlamaCppOptions()) != key


# Torch


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_torch_state_of_every_dtype_comes_back_bit_for_bit(tiny_backends: TinyBackends, dtype: str) -> None:
    original = tiny_backends("llama")
    model = copy.deepcopy(original.model).to(getattr(torch, dtype))
    backend = TorchBackend(model, original.tokenizer._tokenizer)
    saved = state_of(backend)
    restored = backend.import_state(saved)
    again = backend.export_state(restored)
    assert saved.keys() == again.keys() == {"keys.0", "values.0", "keys.1", "values.1"}
    for name, array in saved.items():
        assert array.shape == (2, len(IDS), 8)
        assert array.tobytes() == again[name].tobytes()
    assert backend.sequence_bytes(restored) == sum(array.nbytes for array in saved.values())


def test_torch_state_with_one_layer_of_another_length_or_too_long_is_refused(tiny_backends: TinyBackends) -> None:
    backend = tiny_backends("llama")
    saved = state_of(backend)
    before = backend.state_bytes()
    long = {name: np.repeat(array, 20, axis=1) for name, array in saved.items()}
    empty = {name: array[:, :0] for name, array in saved.items()}
    for foreign in (saved | {"values.1": saved["values.1"][:, :-1]}, long, empty, {"keys.0": saved["keys.0"]}):
        with pytest.raises(InvalidRequestError, match=r"no state of this model: .*; expected 4 arrays such as"):
            backend.import_state(foreign)
    assert backend.state_bytes() == before


def test_torch_state_of_another_architecture_is_refused(tiny_backends: TinyBackends) -> None:
    with pytest.raises(InvalidRequestError):
        tiny_backends("gemma3").import_state(state_of(tiny_backends("llama")))


# llama.cpp


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mamba"])
def test_llama_state_goes_into_scattered_cells_of_a_smaller_context(tiny_gguf: TinyGguf, architecture: str) -> None:
    # Every second sequence is freed, so the cells that are left do not lie in one row.
    source, target = llama(tiny_gguf(architecture), n_ctx=512), llama(tiny_gguf(architecture))
    expected = source.forward([Chunk(source.allocate(), [*IDS, 5])])[0]
    others = [target.allocate() for _ in range(8)]
    for other in others:
        target.forward([Chunk(other, IDS[:20])])
    for other in others[::2]:
        target.free(other)
    saved = state_of(source)
    found = target.forward([Chunk(target.import_state(saved), [5])])[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * float(np.abs(expected).max()))
    source.close()
    target.close()


def test_without_free_cells_llama_state_raises_and_leaves_nothing(tiny_gguf: TinyGguf) -> None:
    backend = llama(tiny_gguf("llama"))
    saved = state_of(backend, (IDS * 5)[:120])
    for _ in range(2):
        backend.forward([Chunk(backend.allocate(), (IDS * 5)[:110])])
    before = backend.state_bytes()
    for _ in range(3):
        with pytest.raises(KVCacheFullError, match=r"no room in llama.cpp's KV cache"):
            backend.import_state(saved)
    assert backend.state_bytes() == before
    backend.close()


def test_llama_state_cut_anywhere_or_longer_than_the_context_is_refused(tiny_gguf: TinyGguf) -> None:
    backend = llama(tiny_gguf("llama"))
    saved = state_of(backend)["state"]
    before = backend.state_bytes()
    for size in (0, 4, 8, 100, len(saved) // 2, len(saved) - 1):
        with pytest.raises(InvalidRequestError, match=r"llama.cpp takes 0 of"):
            backend.import_state({"state": saved[:size]})
    with pytest.raises(InvalidRequestError, match=r"which holds 24 tokens \(at most 20\)"):
        llama_state.imported(backend.context, backend.slot(sequence := backend.allocate()), {"state": saved}, 20)
    backend.free(sequence)
    assert backend.state_bytes() == before
    backend.close()


def test_llama_state_of_another_type_is_refused(tiny_gguf: TinyGguf) -> None:
    exact, half = llama(tiny_gguf("llama")), llama(tiny_gguf("llama"), type_k="f16", type_v="f16")
    with pytest.raises(InvalidRequestError, match=r"llama.cpp takes 0 of"):
        half.import_state(state_of(exact))
    exact.close()
    half.close()


def test_state_that_llama_writes_in_part_is_not_given_out(tiny_gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = llama(tiny_gguf("llama"))
    monkeypatch.setattr(llama_state.llama_cpp, "llama_state_seq_get_data", lambda *_: 3)
    with pytest.raises(GenerationError, match=r"llama.cpp wrote 3 bytes of a sequence's state"):
        state_of(backend)
    backend.close()
