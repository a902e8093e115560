"""The options that name a base model on the command line, and what a wrong one is told."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offset_runtime import DomainOffset, LlamaCppOptions, ModelSpec, OffsetStore, models
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.cli import app
from offset_runtime.errors import InvalidRequestError
from offset_runtime.model_options import loaded, model_spec, training_spec

KEYS = ", ".join(LlamaCppOptions.model_fields)


def test_options_of_llama_cpp_are_read_from_text() -> None:
    given = ["n_ctx=4096", "n_gpu_layers=0", "flash_attn=true", "type_k = q8_0", "use_mmap=false"]
    expected = LlamaCppOptions(n_ctx=4096, n_gpu_layers=0, flash_attn=True, type_k="q8_0", use_mmap=False)
    assert model_spec("m.gguf", llama_cpp=given) == ModelSpec(base="m.gguf", llama_cpp=expected)


def test_without_options_the_spec_is_the_default_one() -> None:
    assert model_spec("m", "torch", "cpu") == ModelSpec(base="m", backend="torch", device="cpu")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["n_cxt=1"], "--llama-cpp n_cxt=1: unknown key 'n_cxt'; did you mean 'n_ctx'?"),
        (["zzz=1"], f"--llama-cpp zzz=1: unknown key 'zzz'; expected one of {KEYS}"),
        (["n_ctx=4k"], "--llama-cpp n_ctx=4k: expected a whole number; found '4k'"),
        (["n_ctx=1.5"], "--llama-cpp n_ctx=1.5: expected a whole number; found '1.5'"),
        (["n_batch=0"], "--llama-cpp n_batch=0: expected greater than or equal to 1; found '0'"),
        (["flash_attn=maybe"], "--llama-cpp flash_attn=maybe: expected true or false; found 'maybe'"),
        (["type_k=q9"], "--llama-cpp type_k=q9: expected 'f32', 'f16', 'bf16', 'q8_0', "),
        (["n_ctx"], "--llama-cpp n_ctx: expected KEY=VALUE, for example n_ctx=4096"),
        (["=1"], "--llama-cpp =1: expected KEY=VALUE"),
        (["n_ctx=1", "n_ctx=2"], "--llama-cpp n_ctx=2: n_ctx is given twice (1 before); keep one"),
        (["type_v=q8_0", "flash_attn=false"], "--llama-cpp: type_v=q8_0 needs flash attention"),
    ],
)
def test_a_wrong_option_of_llama_cpp_names_key_found_and_expected(given: list[str], said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        model_spec("m.gguf", llama_cpp=given)
    assert str(caught.value).startswith(said)


def test_training_takes_torch_whatever_the_file_and_refuses_llama_cpp() -> None:
    assert training_spec("m.gguf") == ModelSpec(base="m.gguf", backend="torch")
    assert training_spec("fake", "fake").backend == "fake"
    with pytest.raises(InvalidRequestError, match="training needs the torch backend, found --backend llama_cpp"):
        training_spec("m.gguf", "llama_cpp")


def test_a_loaded_model_is_closed_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(FakeBackend, "close", lambda self: closed.append(True))
    with contextlib.suppress(RuntimeError), loaded(model_spec("fake")):
        raise RuntimeError("boom")
    assert closed == [True]


def test_only_torch_pays_for_the_import_of_transformers(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    code = (
        "import importlib.util, sys\n"
        "from types import SimpleNamespace\n"
        "from offset_runtime.backends.fake import FakeBackend\n"
        "from offset_runtime.model_options import loaded, model_spec\n"
        "importlib.util.find_spec = lambda name: object()\n"
        "backend = SimpleNamespace(LlamaCppBackend=lambda path, options: FakeBackend())\n"
        "sys.modules['offset_runtime.backends.llama_cpp'] = backend\n"
        f"with loaded(model_spec({str(model)!r})):\n"
        "    assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def store(tmp_path: Path, make_offset: Callable[..., DomainOffset]) -> Path:
    OffsetStore(tmp_path / "offsets").put(make_offset(FakeBackend().identity, "legal"))
    return tmp_path / "offsets"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"The appeal of case {i} is dismissed."}) + "\n" for i in range(3)))
    return path


def command(name: str, store: Path, file: Path) -> list[str]:
    return {
        "eval": ["eval", "-m", "fake", "-s", str(store), "--docs", f"legal={file}", "--max-tokens", "8"],
        "score": ["score", str(file), "-m", "fake", "-s", str(store)],
        "verify": ["verify", "-m", "fake", "-s", str(store)],
    }[name]


@pytest.mark.parametrize("name", ["eval", "score", "verify"])
def test_commands_that_load_a_model_hand_the_options_on(
    name: str, store: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[ModelSpec] = []

    def load(spec: ModelSpec) -> Any:
        specs.append(spec)
        return FakeBackend()

    monkeypatch.setattr(models, "load_backend", load)
    options = ["--llama-cpp", "n_ctx=512", "--llama-cpp", "use_mlock=true"]

    result = CliRunner().invoke(app, [*command(name, store, file), *options])

    assert result.exit_code == 0, result.output
    assert specs == [ModelSpec(base="fake", llama_cpp=LlamaCppOptions(n_ctx=512, use_mlock=True))]


@pytest.mark.parametrize("name", ["eval", "score", "verify"])
def test_a_wrong_option_ends_a_command_as_a_users_error_before_any_work(name: str, store: Path, file: Path) -> None:
    arguments = command(name, store / "nowhere", file.with_name("nowhere"))
    result = CliRunner().invoke(app, [*arguments, "--llama-cpp", "n_cxt=512"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "unknown key 'n_cxt'; did you mean 'n_ctx'?" in result.stderr


@pytest.mark.parametrize("name", ["eval", "score", "verify"])
def test_the_help_lists_the_keys(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"], terminal_width=200).stdout
    assert all(key in shown for key in LlamaCppOptions.model_fields)
