"""A folder of saved KV state: one .safetensors file for what a model had read, found again by that.

A file is named by a digest of the backend's `state_key` and of the symbols (`placement.symbols`), so state of another
model, as far as that key tells models apart, or of other offsets is not taken for the right one. A checksum over the
whole file finds damage. Whatever is damaged or foreign is left alone, with a warning. Each file holds the token ids it
stands for, in the clear.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from offset_runtime.errors import StateFolderError
from offset_runtime.placement import Symbol
from offset_runtime.state_file import StateEntry, file_name, read_entry, read_whole, serialised
from offset_runtime.tensor_file import write_atomically

_log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 1024 * 10**6

_NAME = re.compile(r"kv-[0-9a-f]{64}\.safetensors")
# What an interrupted `write_atomically` leaves; after an hour nobody writes it any more.
_LEFT_BEHIND = re.compile(r"\.kv-[0-9a-f]{64}\.safetensors\.[0-9a-f]{8}")
_LEFT_BEHIND_S = 3600


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
                entry, key_found = read_entry(path)
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
            data = read_whole(entry.path, entry.file_bytes)
            tensors = load_safetensors(data)
        except FileNotFoundError:
            _log.info("saved state %s is gone; another process made room", entry.path)
            return None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self._warn(entry.path, error)
            return None
        self.read_bytes += len(data)
        return tensors

    def holds(self, key: str, symbols: Sequence[Symbol]) -> bool:
        """Whether there is a file of this state that is not known to be damaged."""
        path = self._path(key, symbols)
        # No pipe may be opened: that would wait for its other end.
        return path not in self.damaged and path.is_file()

    def touch(self, key: str, symbols: Sequence[Symbol], used_ns: int | None = None) -> bool:
        """Set when a saved state was last used; False where the folder has none, or only a damaged one.

        `used_ns`: nanoseconds since 1970, None: now.
        """
        path = self._path(key, symbols)
        if not self.holds(key, symbols):
            return False
        try:
            read_entry(path)
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
        data = serialised(key, symbols, tensors)
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
        return self.path / file_name(key, symbols)

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
