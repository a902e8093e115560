"""Which backend a model runs on, and which settings are then refused; folders of GGUF files, and split models."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offset_runtime import LlamaCppOptions, ModelSpec
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import InvalidRequestError, ModelNotFoundError, OffsetError
from offset_runtime.models import BackendName, chosen_backend, load_backend, locate


class Installed:
    """Says whether llama-cpp-python is here, and records what would be loaded on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = True
        self.loads: list[tuple[Path, LlamaCppOptions]] = []
        find_spec = importlib.util.find_spec

        def find(name: str, *rest: object) -> object:
            if name != "llama_cpp":
                return find_spec(name, *rest)  # type: ignore[arg-type]
            return object() if self.here else None

        def load(path: Path, options: LlamaCppOptions) -> FakeBackend:
            self.loads.append((path, options))
            return FakeBackend()

        monkeypatch.setattr(importlib.util, "find_spec", find)
        module = SimpleNamespace(LlamaCppBackend=load)
        monkeypatch.setitem(sys.modules, "offset_runtime.backends.llama_cpp", module)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    return Installed(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a model of transformers; nothing in it is read."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").touch()
    return path


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A file that is named like a model; nothing in it is read."""
    path = tmp_path / "named" / "model.gguf"
    path.parent.mkdir()
    path.touch()
    return path


@pytest.mark.parametrize("backend", ["auto", "llama_cpp"])
def test_a_gguf_file_runs_on_llama_cpp_where_that_is_installed(
    backend: BackendName, model_file: Path, installed: Installed
) -> None:
    options = LlamaCppOptions(n_ctx=64)
    spec = ModelSpec(base=str(model_file), backend=backend, llama_cpp=options)
    load_backend(spec)
    assert installed.loads == [(model_file, options)]
    assert chosen_backend(spec) == "llama_cpp"


def test_the_suffix_of_a_gguf_file_may_be_in_capitals(model_file: Path, installed: Installed) -> None:
    assert chosen_backend(ModelSpec(base=str(model_file.rename(model_file.with_suffix(".GGUF"))))) == "llama_cpp"


def test_a_gguf_file_runs_on_torch_where_llama_cpp_is_missing_or_torch_is_asked_for(
    model_file: Path, installed: Installed, folder: Path
) -> None:
    assert chosen_backend(ModelSpec(base=str(model_file), backend="torch")) == "torch"
    assert chosen_backend(ModelSpec(base=str(folder))) == "torch"
    installed.here = False
    assert chosen_backend(ModelSpec(base=str(model_file))) == "torch"


def test_a_spec_with_other_options_is_another_base() -> None:
    small = ModelSpec(base="m.gguf", llama_cpp=LlamaCppOptions(n_ctx=64))
    assert small == ModelSpec(base="m.gguf", llama_cpp=LlamaCppOptions(n_ctx=64))
    assert len({small, ModelSpec(base="m.gguf")}) == 2


def test_llama_cpp_that_is_missing_names_the_extra(model_file: Path, installed: Installed) -> None:
    installed.here = False
    with pytest.raises(OffsetError, match=r"pip install 'offset-runtime\[llama-cpp\]'"):
        load_backend(ModelSpec(base=str(model_file), backend="llama_cpp"))


def test_llama_cpp_refuses_what_is_no_gguf_file(tmp_path: Path, folder: Path, installed: Installed) -> None:
    other = tmp_path / "model.bin"
    other.touch()
    cases = {
        "owner/model": r"a hub id \(download a \.gguf file",
        str(folder): r"a folder without a \.gguf file",
        str(other): r"a file of another kind",
    }
    for base, said in cases.items():
        with pytest.raises(InvalidRequestError, match=f"model '{re.escape(base)}' is {said}"):
            load_backend(ModelSpec(base=base, backend="llama_cpp"))
    (folder / "small.gguf").touch()
    with pytest.raises(InvalidRequestError, match=r"a folder \(name one of its files: small\.gguf\)"):
        load_backend(ModelSpec(base=str(folder), backend="llama_cpp"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"dtype": "float16"}, r"dtype 'float16' is a setting of torch, .* runs on llama_cpp; .*quantisation"),
        ({"device": "cpu"}, r"device 'cpu' is a setting of torch, .* runs on llama_cpp; .*n_gpu_layers"),
    ],
)
def test_llama_cpp_refuses_torchs_settings(
    setting: dict[str, Any], said: str, model_file: Path, installed: Installed
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        load_backend(ModelSpec(base=str(model_file), backend="llama_cpp", **setting))
    assert installed.loads == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("setting", [{"dtype": "float32"}, {"device": "cpu"}], ids=str)
def test_torchs_settings_choose_torch_for_a_gguf_file(setting: dict[str, Any], model_file: Path) -> None:
    assert chosen_backend(ModelSpec(base=str(model_file), **setting)) == "torch"


@pytest.mark.usefixtures("never_read")
def test_torch_refuses_options_of_llama_cpp_and_says_why_it_runs_there(
    model_file: Path, folder: Path, installed: Installed
) -> None:
    options = LlamaCppOptions(n_ctx=64, use_mmap=False)
    given = r"llama_cpp options were given \(n_ctx=64, use_mmap=False\), but .* runs on torch, since "
    with pytest.raises(InvalidRequestError, match=given + "the backend torch was asked for"):
        load_backend(ModelSpec(base=str(model_file), backend="torch", llama_cpp=options))
    with pytest.raises(InvalidRequestError, match=given + r"it is a folder without a \.gguf file"):
        load_backend(ModelSpec(base=str(folder), llama_cpp=options))
    installed.here = False
    with pytest.raises(InvalidRequestError, match=given + r"llama-cpp-python is not installed here; .*llama-cpp\]"):
        load_backend(ModelSpec(base=str(model_file), llama_cpp=options))


def test_a_folder_stands_for_its_only_gguf_file(model_file: Path, installed: Installed) -> None:
    assert locate(str(model_file.parent)) == model_file
    assert chosen_backend(ModelSpec(base=str(model_file.parent))) == "llama_cpp"


def test_a_folder_with_a_config_is_a_transformers_folder(folder: Path) -> None:
    (folder / "model.gguf").touch()
    assert locate(str(folder)) == folder


def test_a_folder_of_several_models_lists_them(model_file: Path) -> None:
    for name in ("other.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        model_file.with_name(name).touch()
    listed = r"several models: big-00001-of-00002\.gguf, model\.gguf, other\.gguf; name one"
    with pytest.raises(ModelNotFoundError, match=listed):
        locate(str(model_file.parent))


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """The files of a model in three parts; nothing in them is read."""
    files = [tmp_path / "split" / f"big-{part:05d}-of-00003.gguf" for part in (1, 2, 3)]
    files[0].parent.mkdir()
    for file in files:
        file.touch()
    return files


def test_a_split_model_is_named_by_its_first_file_or_its_folder(split: list[Path], installed: Installed) -> None:
    load_backend(ModelSpec(base=str(split[0])))
    load_backend(ModelSpec(base=str(split[0].parent)))
    assert [path for path, _ in installed.loads] == [split[0], split[0]]


def test_another_part_of_a_split_model_names_the_first(split: list[Path]) -> None:
    with pytest.raises(InvalidRequestError, match=r"part 2 of 3 .*name its first file, big-00001-of-00003\.gguf"):
        locate(str(split[1]))


def test_parts_that_are_missing_are_listed(split: list[Path]) -> None:
    split[2].unlink()
    for base in (split[0], split[0].parent):
        with pytest.raises(ModelNotFoundError, match=r"these are missing: big-00003-of-00003\.gguf; get them"):
            locate(str(base))


@pytest.mark.usefixtures("never_read")
def test_a_split_model_is_not_for_torch(split: list[Path], model_cache: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"split into several files, which transformers does not read"):
        load_backend(ModelSpec(base=str(split[0]), backend="torch"))
