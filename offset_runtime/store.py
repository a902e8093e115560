"""A directory of offsets, one file a domain."""

from __future__ import annotations

import os
import re
from pathlib import Path

from offset_runtime.errors import OffsetFileError, UnknownDomainError
from offset_runtime.offset import SUFFIX, DomainOffset

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class OffsetStore:
    """Offsets by domain name in the directory `root`, as files ``<domain>.safetensors``.

    Nothing is read before it is asked for; the directory is made by the first `put`.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def path(self, domain: str) -> Path:
        """Return the file of `domain`; raises `OffsetFileError` for a name unfit for a file."""
        if not _NAME.fullmatch(domain):
            raise OffsetFileError(
                f"domain name {domain!r} cannot name a file; use 1 to 64 letters, digits, '.', '_' or '-', "
                "starting with a letter or digit"
            )
        return self.root / f"{domain}{SUFFIX}"

    def domains(self) -> list[str]:
        """Return the names of all domains in the store, sorted."""
        if not self.root.is_dir():
            return []
        files = (path for path in self.root.glob(f"*{SUFFIX}") if path.is_file())
        return sorted(path.stem for path in files if not path.name.startswith("."))

    def get(self, domain: str) -> DomainOffset:
        """Read the offset of `domain`.

        Raises `UnknownDomainError` when there is none and `OffsetFileError` when its file is unusable
        or says another domain than its name.
        """
        path = self.path(domain)
        if not path.is_file():
            raise UnknownDomainError(domain, self.domains(), where=str(self.root))
        offset = DomainOffset.load(path)
        if offset.domain != domain:
            raise OffsetFileError(
                f"offset file {path} holds domain {offset.domain!r}; rename the file to match, or train {domain!r}"
            )
        return offset

    def check_writable(self, domain: str) -> None:
        """Raise `OffsetFileError` where `put` would fail, as far as can be told without writing.

        For callers that are about to work for minutes on an offset.
        """
        path = self.path(domain)
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK) or path.is_dir():
            blocked = path if path.is_dir() else nearest
            raise OffsetFileError(
                f"the offset of domain {domain!r} could not be written to {path}: {blocked} is "
                f"{'a folder' if path.is_dir() else 'no folder that can be written to'}; choose another --store"
            )

    def put(self, offset: DomainOffset) -> Path:
        """Write `offset` under its domain's name, replacing an earlier one atomically."""
        return offset.save(self.path(offset.domain))
