"""From a model name to a loaded backend."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from offset_runtime.backends.base import Backend
from offset_runtime.backends.gguf_parts import GgufParts
from offset_runtime.backends.options import LlamaCppOptions
from offset_runtime.errors import InvalidRequestError, ModelNotFoundError, OffsetError
from offset_runtime.model_cache import cache_directory, unwritable, work_folder
from offset_runtime.packaged import PACKAGED_MODELS

BackendName = Literal["auto", "torch", "llama_cpp", "fake"]

_CONVERTED_SIZE = "4 bytes a weight"

_log = logging.getLogger(__name__)


class ModelSpec(BaseModel):
    """Which base model to load, and how. Equal specs share one base model in a process.

    `base`: a packaged name (``smollm2-135m``, ``gemma3-270m``), a hub id, a folder, a .gguf file (the first
    one, where the model is split), or ``fake``. `backend`: ``auto`` is llama_cpp for a .gguf file where
    llama-cpp-python is installed and neither `dtype` nor `device` is given, and else torch. `dtype` and `device`:
    torch names, for torch; None lets it choose. `llama_cpp`: for llama_cpp. ``fake`` takes all of them and needs
    none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    backend: BackendName = "auto"
    dtype: str | None = None
    device: str | None = None
    llama_cpp: LlamaCppOptions = LlamaCppOptions()


def load_backend(spec: ModelSpec) -> Backend:
    """Load the base model that `spec` names.

    Raises `ModelNotFoundError` when the name leads nowhere or the model cannot be read,
    `UnsupportedModelError` when it cannot take an offset, `InvalidRequestError` for a setting that is unknown,
    not possible here, or not for the backend the model runs on, and `OffsetError` when llama-cpp-python is
    missing or the cache of models cannot be written.
    """
    started = time.monotonic()
    backend = _load(spec)
    _log.info("loaded %s on %s in %.1f s", spec.base, backend.name, time.monotonic() - started)
    return backend


def _load(spec: ModelSpec) -> Backend:
    name, source = _resolved(spec)
    if name == "fake":
        from offset_runtime.backends.fake import FakeBackend

        return FakeBackend()
    if name == "llama_cpp":
        return _load_gguf(Path(source), spec.llama_cpp)
    if isinstance(source, Path) and _is_gguf(source):
        source = converted_gguf(source)
    from offset_runtime.backends.torch import TorchBackend

    return TorchBackend.load(source, dtype=spec.dtype, device=spec.device)


def _load_gguf(path: Path, options: LlamaCppOptions) -> Backend:
    try:
        from offset_runtime.backends.llama_cpp import LlamaCppBackend
    # A library that does not fit the machine, or a version whose names are others.
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise OffsetError(
            f"the installed llama-cpp-python cannot be used: {error}. Expected version 0.3.36 or newer, built for this "
            "machine: pip install --upgrade 'offset-runtime[llama-cpp]'; or ask for the backend torch"
        ) from error
    return LlamaCppBackend(path, options)


def chosen_backend(spec: ModelSpec) -> BackendName:
    """Return the name of the backend that `load_backend` would load, ``auto`` resolved.

    Raises what `load_backend` raises before it reads the model.
    """
    return _resolved(spec)[0]


def locate(base: str) -> Path | str:
    """Return the file or folder of a model name, or the name itself when it can only be a hub id.

    A folder without config.json stands for the one model in .gguf files that it holds.
    """
    if base in PACKAGED_MODELS:
        return PACKAGED_MODELS[base].locate(base)
    path = Path(base).expanduser()
    if path.is_dir():
        return path if (path / "config.json").exists() else _only_gguf(path)
    if path.exists():
        _check_parts(path)
        return path
    looks_like_hub_id = base.count("/") == 1 and not base.startswith((".", "/", "~")) and not _is_gguf(path)
    if looks_like_hub_id:
        return base
    raise ModelNotFoundError(
        f"no model {base!r}: it is no file or folder here, no hub id (owner/name), "
        f"and none of the packaged models: {', '.join(PACKAGED_MODELS)}"
    )


def converted_gguf(path: Path) -> Path:
    """Return a transformers folder with the de-quantised float32 weights of a GGUF file.

    transformers takes many seconds to read a GGUF; the folder is made once, kept in the cache under
    the file's digest (4 bytes a weight: 539 MB for SmolLM2-135M) and read in under a second after.

    Raises `ModelNotFoundError` for a file that cannot be read, `InvalidRequestError` for one of several parts,
    `OffsetError` for a cache that cannot be written.
    """
    if GgufParts.of(path).count > 1:
        raise InvalidRequestError(
            f"{path} is split into several files, which transformers does not read; install llama-cpp-python "
            "(pip install 'offset-runtime[llama-cpp]') and run it on llama_cpp, or join the files with "
            "llama-gguf-split --merge"
        )
    target = cache_directory() / f"{path.stem}-{_file_digest(path)[:16]}"
    if not target.is_dir():
        _log.warning("converting %s once for torch; later loads read the copy in %s", path.name, target)
        _convert_gguf(path, target)
    return target


def _resolved(spec: ModelSpec) -> tuple[BackendName, Path | str]:
    """Return the backend `spec` runs on, and where its model is; settings for another backend are refused."""
    if spec.base == "fake" or spec.backend == "fake":
        return "fake", spec.base
    source = locate(spec.base)
    is_file = isinstance(source, Path) and _is_gguf(source) and source.is_file()
    installed = importlib.util.find_spec("llama_cpp") is not None
    for_torch = spec.dtype is not None or spec.device is not None
    if spec.backend == "llama_cpp" or (spec.backend == "auto" and is_file and installed and not for_torch):
        if not is_file:
            raise InvalidRequestError(f"model {spec.base!r} is {_kind(source)}; the backend llama_cpp runs .gguf files")
        if not installed:
            raise OffsetError(
                f"the backend llama_cpp, asked for with model {spec.base!r}, needs the package llama-cpp-python, which "
                "is not installed here; run: pip install 'offset-runtime[llama-cpp]'"
            )
        _refuse_torch_settings(spec)
        return "llama_cpp", source
    if spec.llama_cpp != LlamaCppOptions():
        raise InvalidRequestError(_no_llama_cpp(spec, source, is_file))
    return "torch", source


def _refuse_torch_settings(spec: ModelSpec) -> None:
    instead = {
        "dtype": "the file's own quantisation counts: choose another file, or llama_cpp's type_k and type_v for the "
        "KV cache",
        "device": "use llama_cpp's n_gpu_layers (0: only the CPU)",
    }
    for name, hint in instead.items():
        if (value := getattr(spec, name)) is not None:
            raise InvalidRequestError(
                f"{name} {value!r} is a setting of torch, but model {spec.base!r} runs on llama_cpp; {hint}, or ask "
                "for the backend torch"
            )


def _no_llama_cpp(spec: ModelSpec, source: Path | str, is_file: bool) -> str:
    given = ", ".join(f"{key}={value}" for key, value in spec.llama_cpp.model_dump(exclude_defaults=True).items())
    if spec.backend == "torch":
        why = "the backend torch was asked for; leave it out, or the options"
    elif is_file:
        why = "llama-cpp-python is not installed here; run: pip install 'offset-runtime[llama-cpp]'"
    else:
        why = f"it is {_kind(source)}; leave the options out, or name a .gguf file"
    return f"llama_cpp options were given ({given}), but model {spec.base!r} runs on torch, since {why}"


def _kind(source: Path | str) -> str:
    if isinstance(source, str):
        return "a hub id (download a .gguf file of the model, and name that file)"
    if not source.is_dir():
        return "a file of another kind (its name does not end with .gguf)"
    files = ", ".join(path.name for path in _gguf_files(source))
    return f"a folder (name one of its files: {files})" if files else "a folder without a .gguf file"


def _is_gguf(path: Path) -> bool:
    """Whether the name says so, or, for a file of another name, its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def _gguf_files(folder: Path) -> list[Path]:
    """The .gguf files of a folder that can be named: those of a split model by the first."""
    files = sorted(path for path in folder.glob("*") if _is_gguf(path) and path.is_file())
    return [path for path in files if GgufParts.of(path).number == 1]


def _only_gguf(folder: Path) -> Path:
    files = _gguf_files(folder)
    if len(files) > 1:
        raise ModelNotFoundError(
            f"folder {folder} holds several models: {', '.join(path.name for path in files)}; name one of the files"
        )
    if not files:
        return folder
    _check_parts(files[0])
    return files[0]


def _check_parts(path: Path) -> None:
    """Refuse a later part of a split model, and the first one where others are missing."""
    part = GgufParts.of(path)
    first, *_ = parts = part.paths()
    if path != first:
        raise InvalidRequestError(
            f"{path} is part {part.number} of {part.count} of a split model; name its first file, {first.name}: "
            "the others are found beside it"
        )
    missing = [other.name for other in parts if not other.is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{path} is the first of {part.count} files of a split model, but beside it these are missing: "
            f"{', '.join(missing)}; get them too"
        )


def _convert_gguf(path: Path, target: Path) -> None:
    with work_folder(_CONVERTED_SIZE) as work:
        model, tokenizer = _read_gguf(path)
        try:
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
            _move(work, target)
        # On a full disk the tokenizers package raises Exception itself.
        except Exception as error:
            raise unwritable(target.parent, _CONVERTED_SIZE, error) from error


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


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error
