"""The prefix cache's entries to a folder of saved state, and back.

Disk and checksums are the caller's thread's work; only what touches the model or the cache is called on the engine's,
one entry at a time, so that requests that run are held up for milliseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from offset_runtime.backends.base import Backend
from offset_runtime.cache import NO_ROOM, CacheEntry, PrefixCache
from offset_runtime.errors import InvalidRequestError, OffsetError
from offset_runtime.state_file import StateEntry
from offset_runtime.state_folder import StateFolder

_log = logging.getLogger(__name__)

# Between the times of two files, so that their order is kept.
_APART_NS = 1000

T = TypeVar("T")
Tensors = dict[str, npt.NDArray[Any]]


class OnThread(Protocol):
    """Calls a function on the engine's thread, between two steps, and returns what it returns."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


def save_entries(cache: PrefixCache, backend: Backend, folder: StateFolder, on_thread: OnThread) -> int:
    """Write the entries of `cache` that `folder` lacks, as many of the last used as fit in it together.

    Requests run on meanwhile; what gives way to theirs is not saved. Returns how many of the cache's entries the
    folder then holds. Raises `InvalidRequestError` where the backend cannot save state, and what `StateFolder.write`
    raises.
    """
    _check_can_save(backend)
    key, now = on_thread(backend.state_key), time.time_ns()
    entries = on_thread(cache.entries)
    for age, entry in enumerate(entries):
        used_ns = now - age * _APART_NS
        if folder.touch(key, entry.symbols, used_ns):
            continue
        tensors = on_thread(partial(_export, cache, backend, entry))
        if tensors is not None:
            folder.write(key, entry.symbols, tensors, used_ns)
    folder.trim()
    return sum(folder.holds(key, entry.symbols) for entry in entries)


def restore_entries(
    cache: PrefixCache, backend: Backend, folder: StateFolder, on_thread: OnThread, room_tokens: Callable[[], float]
) -> int:
    """Put the states of `folder` that are of this model into `cache`, newest first, while it has room for more.

    Nothing in the cache gives way to them. `room_tokens` says, on the engine's thread, how many tokens the backend
    has room for. Returns how many were taken. Raises `InvalidRequestError` where the backend cannot.
    """
    _check_can_save(backend)
    key = on_thread(backend.state_key)
    restored = 0
    for entry in folder.entries(key):
        # Asked before the file is read, for which it may be in vain.
        if not on_thread(partial(_fits, cache, backend, entry, room_tokens)):
            continue
        tensors = folder.read(entry)
        if tensors is not None:
            restored += on_thread(partial(_take_in, cache, backend, entry, tensors))
    return restored


def _check_can_save(backend: Backend) -> None:
    if not backend.capabilities.save_state:
        raise InvalidRequestError(
            f"the state of this model on backend {backend.name!r} cannot be saved or restored; run without saved "
            "state (--kv-dir), or run the model on llama_cpp (a .gguf file)"
        )


def _export(cache: PrefixCache, backend: Backend, entry: CacheEntry) -> Tensors | None:
    # Requests run on between two calls, and the entry may have given way to theirs.
    if not cache.holds(entry):
        return None
    return backend.export_state(entry.sequence)


def _fits(cache: PrefixCache, backend: Backend, entry: StateEntry, room_tokens: Callable[[], float]) -> bool:
    most = min(room_tokens(), backend.capabilities.context_tokens)
    return len(entry.symbols) <= most and cache.fits(entry.symbols, entry.state_bytes)


def _take_in(cache: PrefixCache, backend: Backend, entry: StateEntry, tensors: Tensors) -> bool:
    if not cache.fits(entry.symbols, entry.state_bytes):
        return False
    try:
        sequence = backend.import_state(tensors)
    except NO_ROOM as error:
        _log.info("saved state %s is left out: %s", entry.path, error)
        return False
    except OffsetError as error:
        _log.warning("saved state %s is not used: %s", entry.path, error)
        return False
    length = backend.length(sequence)
    if length != len(entry.symbols):
        _log.warning("saved state %s is not used: it holds %d tokens, not %d", entry.path, length, len(entry.symbols))
        backend.free(sequence)
        return False
    return cache.put_oldest(entry.symbols, sequence)
