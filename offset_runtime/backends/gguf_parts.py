"""The names of a GGUF model's files: one, or the parts of a split model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GgufParts:
    """Which part of how many `path` is, as its name says: 1 of 1 for a file that is no part of others."""

    path: Path
    number: int = 1
    count: int = 1

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the name of `path`; no file is looked at."""
        found = _NAME.fullmatch(path.name)
        return cls(path) if found is None else cls(path, int(found["number"]), int(found["count"]))

    def paths(self) -> list[Path]:
        """All parts, in their order."""
        found = _NAME.fullmatch(self.path.name)
        if found is None:
            return [self.path]
        names = (f"{found['stem']}-{n:05d}-of-{found['count']}{found['suffix']}" for n in range(1, self.count + 1))
        return [self.path.with_name(name) for name in names]
