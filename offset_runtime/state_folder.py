"""A folder of saved KV state: one .safetensors file for what a model had read, found again by that.

A file is named by a digest of the backend's `state_key` and of the symbols (`placement.symbols`), so state of another
model, as far as that key tells models apart, or of other offsets is not taken for the right one. A checksum over the
whole file finds damage. Whatever is damaged or foreign is left alone, with a warning. Each file holds the token ids it
stands for, in the clear.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from offset_runtime.errors import StateFolderError
from offset_runtime.placement import Symbol
from offset_runtime.tensor_file import read_header, write_atomically

_log = logging.getLogger(__name__)

FORMAT = "offset-runtime state"
FORMAT_VERSION = "1"
DEFAULT_MAX_BYTES = 1024 * 10**6

_NAME = re.compile(r"kv-[0-9a-f]{64}\.safetensors")
# What an interrupted `write_atomically` leaves; after an hour nobody writes it any more.
_LEFT_BEHIND = re.compile(r"\.kv-[0-9a-f]{64}\.safetensors\.[0-9a-f]{8}")
_LEFT_BEHIND_S = 3600
# A token takes at most some 90 bytes of it.
_MAX_HEADER_BYTES = 32 << 20
_METADATA_KEYS = {"format", "format_version", "key", "symbols", "tokens", "created_at", "checksum"}
# The checksum counts as zeros in itself.
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
_UNKNOWN_CHECKSUM = "0" * 64


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A file of the folder whose header is sound: what its state was read from, and bytes of the state and in all."""

    path: Path
    symbols: tuple[Symbol, ...]
    state_bytes: int
    file_bytes: int


class StateFolder:
    """The saved states in the folder `path`, which is made. Several processes may use one folder at a time.

    `max_bytes`: what the files of saved states may take together; the oldest go first, and no other file is touched.
    `read_bytes` and `written_bytes` count what this object read and wrote; `damaged` are the files it found unsound,
    which it writes again when their state is saved.

    Raises `StateFolderError` where `path` is no folder, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.path = Path(path)
        if not isinstance(max_bytes, int) or max_bytes < 0:
            raise StateFolderError(f"max_bytes={max_bytes!r} of {path} is no size; expected bytes, 0 or more")
        self.max_bytes = max_bytes
        self.read_bytes = self.written_bytes = 0
        self.damaged: set[Path] = set()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", error)
            raise StateFolderError(
                f"cannot keep state in {self.path}: {why}; give a folder, or a path where one can be made"
            ) from error
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise StateFolderError(
                f"cannot keep state in {self.path}: this user may not read and write there; change its permissions, "
                "or give another folder"
            )

    def entries(self, key: str) -> list[StateEntry]:
        """The states saved under `key`, newest first, from the files' headers alone.

        Files that are damaged, and those of another key, are left out with a warning.
        """
        found, foreign = [], []
        for path, _, _ in sorted(self._files(), key=lambda file: (file[2], file[0].name), reverse=True):
            try:
                entry, key_found = _read_entry(path)
            except FileNotFoundError:
                # Another process made room.
                continue
            except (OSError, ValueError) as error:
                self._warn(path, error)
                continue
            if key_found == key:
                found.append(entry)
            else:
                foreign.append(path)
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            _log.warning("saved state %s%s is of another model or version, and is not used", foreign[0], more)
        return found

    def read(self, entry: StateEntry) -> dict[str, npt.NDArray[Any]] | None:
        """The tensors of a state, or None, with a warning, where its file is damaged or gone."""
        try:
            data = _read_whole(entry.path, entry.file_bytes)
            tensors = load_safetensors(data)
        except FileNotFoundError:
            _log.info("saved state %s is gone; another process made room", entry.path)
            return None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self._warn(entry.path, error)
            return None
        self.read_bytes += len(data)
        return tensors

    def touch(self, key: str, symbols: Sequence[Symbol], used_ns: int | None = None) -> bool:
        """Set when a saved state was last used; False where the folder has none, or only a damaged one.

        `used_ns`: nanoseconds since 1970, None: now.
        """
        path = self._path(key, symbols)
        # No pipe may be opened: that would wait for its other end.
        if path in self.damaged or not path.is_file():
            return False
        try:
            _read_entry(path)
            _set_time(path, time.time_ns() if used_ns is None else used_ns)
        except (OSError, ValueError):
            return False
        return True

    def write(
        self,
        key: str,
        symbols: Sequence[Symbol],
        tensors: Mapping[str, npt.NDArray[Any]],
        used_ns: int | None = None,
    ) -> bool:
        """Save a state, in place of one of the same key and symbols; states used less lately make room for it.

        `used_ns`: when it was last used, in nanoseconds since 1970, None: now. Returns False where those used since
        leave it no room, and, with a warning, for a state that takes more than `max_bytes`. Raises
        `StateFolderError` where the file cannot be written.
        """
        path, used_ns = self._path(key, symbols), time.time_ns() if used_ns is None else used_ns
        data = _serialised(key, symbols, tensors)
        if len(data) > self.max_bytes:
            _log.warning(
                "the state of %d tokens takes %.1f MB, more than all that may be kept in %s (%.1f MB); it is not saved",
                *(len(symbols), len(data) / 1e6, self.path, self.max_bytes / 1e6),
            )
            return False
        try:
            if not self._make_room(len(data), path, used_ns):
                return False
            write_atomically(path, data)
            with contextlib.suppress(FileNotFoundError):
                # Another process, which thought it older, may have made room already.
                _set_time(path, used_ns)
        except OSError as error:
            raise StateFolderError(
                f"cannot save state in {self.path}: {error.strerror}; check the folder's permissions and free space"
            ) from error
        self.damaged.discard(path)
        self.written_bytes += len(data)
        return True

    def trim(self) -> None:
        """Remove what was used longest ago until the files of saved states take at most `max_bytes` together."""
        # Later than any file, so that even one from a clock that ran ahead may go.
        self._make_room(0, self.path, 2**63)

    def _path(self, key: str, symbols: Sequence[Symbol]) -> Path:
        return self.path / _name(key, _symbols_json(symbols))

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        """The files named as saved states are: path, bytes, time of last use."""
        for path in self._listed(_NAME):
            with contextlib.suppress(OSError):
                found = path.stat(follow_symlinks=False)
                yield path, found.st_size, found.st_mtime_ns

    def _listed(self, pattern: re.Pattern[str]) -> list[Path]:
        try:
            with os.scandir(self.path) as found:
                return [
                    self.path / item.name
                    for item in found
                    if pattern.fullmatch(item.name) and item.is_file(follow_symlinks=False)
                ]
        except OSError as error:
            _log.warning("saved state in %s cannot be listed: %s", self.path, error)
            return []

    def _make_room(self, size: int, path: Path, used_ns: int) -> bool:
        """Remove what was used longest ago until `size` bytes fit beside the rest, unless all that was used since."""
        files = sorted((file for file in self._files() if file[0] != path), key=lambda file: file[2])
        newer = sum(file_bytes for _, file_bytes, time_ns in files if time_ns > used_ns)
        if size + newer > self.max_bytes:
            _log.info("state of %d bytes is not saved in %s: what was used since leaves it no room", size, self.path)
            return False
        total = size + sum(file_bytes for _, file_bytes, _ in files)
        for oldest, file_bytes, _ in files:
            if total <= self.max_bytes:
                break
            oldest.unlink(missing_ok=True)
            total -= file_bytes
        self._remove_left_behind()
        return True

    def _remove_left_behind(self) -> None:
        for temporary in self._listed(_LEFT_BEHIND):
            with contextlib.suppress(OSError):
                if time.time() - temporary.stat().st_mtime > _LEFT_BEHIND_S:
                    temporary.unlink()

    def _warn(self, path: Path, why: object) -> None:
        self.damaged.add(path)
        _log.warning("saved state %s is not used: %s", path, why)


def _set_time(path: Path, used_ns: int) -> None:
    os.utime(path, ns=(used_ns, used_ns))


def _name(key: str, symbols_json: str) -> str:
    digest = hashlib.sha256(f"{key}\n{symbols_json}".encode()).hexdigest()
    return f"kv-{digest}.safetensors"


def _symbols_json(symbols: Sequence[Symbol]) -> str:
    # Numpy's whole numbers are no JSON.
    return json.dumps(symbols, separators=(",", ":"), default=int)


def _serialised(key: str, symbols: Sequence[Symbol], tensors: Mapping[str, npt.NDArray[Any]]) -> bytearray:
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "key": key,
        "symbols": _symbols_json(symbols),
        "tokens": str(len(symbols)),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "checksum": _UNKNOWN_CHECKSUM,
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    data = bytearray(save_safetensors(arrays, metadata=metadata))
    where = _CHECKSUM.search(data, 8, 8 + int.from_bytes(data[:8], "little"))
    assert where is not None
    data[where.start(1) : where.end(1)] = hashlib.sha256(data).hexdigest().encode()
    return data


def _read_whole(path: Path, size: int) -> bytes:
    """The file's bytes. Raises `ValueError` where their checksum is another, or they are not `size`."""
    with path.open("rb") as stream:
        data = stream.read(size + 1)
    if len(data) != size:
        raise ValueError(f"it has {'more' if len(data) > size else 'fewer'} bytes than its header says")
    where = _CHECKSUM.search(data, 8, 8 + int.from_bytes(data[:8], "little"))
    if where is None:
        raise ValueError("it has no checksum")
    digest = hashlib.sha256(data[: where.start(1)] + _UNKNOWN_CHECKSUM.encode())
    digest.update(memoryview(data)[where.end(1) :])
    if digest.hexdigest().encode() != where[1]:
        raise ValueError("its checksum does not match, so it was damaged or changed")
    return data


def _read_entry(path: Path) -> tuple[StateEntry, str]:
    """A file's entry and key, from its header. Raises `OSError`, and `ValueError` for a file that is no sound one."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        raw, header = read_header(stream, size, _MAX_HEADER_BYTES)
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError("it is a safetensors file without saved state")
    if metadata.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"found format version {metadata.get('format_version')!r}, this release reads {FORMAT_VERSION!r}"
        )
    if metadata.keys() != _METADATA_KEYS or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"found metadata fields {sorted(metadata)}, expected the texts {sorted(_METADATA_KEYS)}")
    if path.name != _name(metadata["key"], metadata["symbols"]):
        raise ValueError("its name is not that of the state it holds, so it was renamed, damaged or changed")
    state_bytes = _data_bytes(header)
    if size != 8 + len(raw) + state_bytes:
        raise ValueError(f"it has {size} bytes, and not as many as its header says, so it is truncated or damaged")
    return StateEntry(path, _parsed_symbols(metadata["symbols"]), state_bytes, size), metadata["key"]


def _data_bytes(header: Mapping[str, Any]) -> int:
    try:
        return max((int(part["data_offsets"][1]) for name, part in header.items() if name != "__metadata__"), default=0)
    except (KeyError, TypeError, IndexError, OverflowError) as error:
        raise ValueError("its header does not say where its tensors are") from error


def _parsed_symbols(text: str) -> tuple[Symbol, ...]:
    try:
        return tuple(_parsed_symbol(item) for item in json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it does not say what its state was read from ({error})") from error


def _parsed_symbol(item: Any) -> Symbol:
    if isinstance(item, int):
        return item
    token, digest, row = item
    return int(token), str(digest), int(row)
