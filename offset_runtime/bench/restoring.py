"""Taking the state of a prompt from disk, beside reading the prompt again."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from offset_runtime.backends.base import Backend
from offset_runtime.bench.case import Case, LeftOutError, Setting
from offset_runtime.bench.pairs import MeasurementError, Ratio, measure
from offset_runtime.bench.workload import (
    CACHE,
    NO_CACHE,
    check_cache,
    check_room,
    endless_engine,
    prompt,
    random_offset,
    request,
    run_together,
)
from offset_runtime.request import Request
from offset_runtime.runtime import OffsetRuntime
from offset_runtime.state_folder import StateFolder

RESTORED_TOKENS = 1000


def measure_restore_state(tokens: int, case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Seconds until a new engine holds the state of a prompt of `tokens` tokens: saved earlier, or read again.

    Saved state is dropped from the memory of the operating system before each time, where that can be asked for. Who
    the model is, for which a backend reads a part of its file, is found out once a process: the detail `key_s`.
    """
    backend = runtime.backend
    if not backend.capabilities.save_state:
        raise LeftOutError("needs state that can be saved; that of this model cannot")
    check_cache(backend, 1)
    check_room(backend, tokens + 2, sequences=2)
    began = time.perf_counter()
    backend.state_key()
    key_s = time.perf_counter() - began
    asked = request(prompt(backend.tokenizer, tokens), random_offset(backend.identity), output_tokens=1)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        with endless_engine(backend, CACHE) as engine:
            run_together(engine, [asked])
            engine.save_state(_folder(path))
        ratio = measure(
            case.name,
            lambda: restore_s(backend, path, asked),
            lambda: prefill_s(backend, asked),
            goal=case.goal,
            pairs=setting.pairs,
            progress=setting.progress,
        )
        file_bytes = sum(file.stat().st_size for file in path.iterdir())
    note = f"a file of {file_bytes / 1e6:.1f} MB; once a process, {key_s:.3f} s to tell which model it is"
    return replace(ratio, details={"file_bytes": file_bytes, "key_s": key_s}, note=note)


def restore_s(backend: Backend, path: Path, asked: Request) -> float:
    """Seconds to take the state of `asked`, which the folder `path` holds, into the cache of a new engine.

    Raises `MeasurementError` unless a prompt that goes on from there then finds all of it.
    """
    tokens = len(asked.prompt_ids)
    _drop_from_memory(path)
    with endless_engine(backend, CACHE) as engine:
        began = time.perf_counter()
        engine.restore_state(_folder(path))
        seconds = time.perf_counter() - began
        longer = replace(asked, prompt_ids=(*asked.prompt_ids, asked.prompt_ids[0]))
        (completion,) = run_together(engine, [longer]).completions
    cached = completion.usage.cached_tokens
    if cached != tokens:
        raise MeasurementError(f"{cached} tokens of restored state were found again; expected {tokens}")
    return seconds


def prefill_s(backend: Backend, asked: Request) -> float:
    """Seconds to read the prompt of `asked` in a new engine, to its first token."""
    with endless_engine(backend, NO_CACHE) as engine:
        return run_together(engine, [asked]).first_token_s


restore_state = partial(measure_restore_state, RESTORED_TOKENS)


def _folder(path: Path) -> StateFolder:
    # Whatever the state of this model takes.
    return StateFolder(path, max_bytes=CACHE.cache_bytes)


def _drop_from_memory(path: Path) -> None:
    """Let the operating system forget what it holds of the files in `path`, so that they are read from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in path.iterdir():
        with file.open("rb") as stream:
            # What is not on the disk yet could not be forgotten.
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
