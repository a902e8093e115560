"""What offset files say of themselves: for `list`, `show` and `verify`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from offset_runtime.errors import OffsetError, OffsetFileError
from offset_runtime.identity import BaseIdentity
from offset_runtime.offset import SUFFIX, DomainOffset
from offset_runtime.store import OffsetStore

DIGEST_PREFIX = 12


@dataclass(frozen=True, slots=True)
class Entry:
    """An offset file: what it holds, or why it cannot be used."""

    path: Path
    offset: DomainOffset | None = None
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "domain": self.offset.domain if self.offset else None,
            "ok": self.problem is None,
            "problem": self.problem,
        }


def read_store(store: OffsetStore) -> list[Entry]:
    """Read every offset of a store; raises `OffsetFileError` when it holds none."""
    domains = store.domains()
    if not domains:
        missing = "" if store.root.is_dir() else ": there is no such folder"
        raise OffsetFileError(
            f"no offsets in {store.root}{missing}; train one with 'offset-runtime train', or name another folder "
            "with --store"
        )
    entries = []
    for domain in domains:
        path = store.root / f"{domain}{SUFFIX}"
        try:
            entries.append(Entry(path, store.get(domain)))
        except OffsetError as error:
            entries.append(Entry(path, problem=str(error)))
    return entries


def read_files(paths: Iterable[Path]) -> list[Entry]:
    """Read offset files."""
    entries = []
    for path in paths:
        try:
            entries.append(Entry(path, DomainOffset.load(path)))
        except OffsetError as error:
            entries.append(Entry(path, problem=str(error)))
    return entries


def check_base(entries: Iterable[Entry], base: BaseIdentity) -> list[Entry]:
    """Find a problem in every entry whose offset was made for another base model."""
    checked = []
    for entry in entries:
        problem = entry.problem
        if entry.offset is not None:
            try:
                base.check(entry.offset.base, domain=entry.offset.domain)
            except OffsetError as error:
                problem = str(error)
        checked.append(Entry(entry.path, entry.offset, problem))
    return checked


def summary(offset: DomainOffset, path: Path) -> dict[str, Any]:
    """Return the fields that `list` shows, for JSON."""
    return {
        "domain": offset.domain,
        "positions": offset.positions,
        "anchor": offset.anchor,
        "prompt_format": offset.prompt_format,
        "gain_percent": _number(offset.metrics, "gain_percent"),
        "retention_kl": _number(offset.metrics.get("retention"), "kl"),
        "bytes": path.stat().st_size,
        "digest": offset.digest,
        "created_at": offset.created_at,
        "path": str(path),
    }


def details(offset: DomainOffset, path: Path) -> dict[str, Any]:
    """Return every field of an offset but the tensor itself, for JSON."""
    norms = [round(float(sum(x * x for x in row) ** 0.5), 4) for row in offset.tensor.tolist()]
    return {
        **summary(offset, path),
        "hidden_size": offset.hidden_size,
        "row_norms": norms,
        "base": offset.base.model_dump(),
        "training": dict(offset.training),
        "documents_digest": offset.documents_digest,
        "metrics": dict(offset.metrics),
    }


def list_table(entries: Iterable[Entry]) -> Table:
    """One line an offset."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("domain", style="bold")
    for heading, right in (
        ("K", True), ("anchor", False), ("format", False), ("gain %", True), ("KL", True),
        ("bytes", True), ("digest", False), ("created", False),
    ):  # fmt: skip
        table.add_column(heading, justify="right" if right else "left")
    for entry in entries:
        if entry.offset is None:
            table.add_row(entry.path.stem, *[""] * 7, Text("cannot be read", style="red"))
            continue
        row = summary(entry.offset, entry.path)
        table.add_row(
            row["domain"],
            str(row["positions"]),
            row["anchor"],
            row["prompt_format"],
            _figure(row["gain_percent"], "+.1f"),
            _figure(row["retention_kl"], ".3f"),
            f"{row['bytes']:,}",
            row["digest"][:DIGEST_PREFIX],
            row["created_at"][:10],
        )
    return table


def details_table(fields: Mapping[str, Any]) -> Table:
    """All fields of one offset, nested ones under their path."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    # Some keys differ at their end only. So values give way first, and a key that still does not fit is folded.
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in _flat("", fields):
        table.add_row(Text(key, overflow="fold", no_wrap=False), Text(value))
    return table


def verify_table(entries: Iterable[Entry]) -> Table:
    """One line a file: usable, or why not."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for entry in entries:
        verdict = Text("ok", style="green") if entry.problem is None else Text("failed", style="red")
        domain = entry.offset.domain if entry.offset else ""
        table.add_row(verdict, Text(str(entry.path)), Text(entry.problem or f"domain {domain}"))
    return table


def _flat(prefix: str, fields: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        elif key == "sketch":
            yield f"{prefix}{key}", f"{str(value)[:DIGEST_PREFIX]}…"
        elif isinstance(value, float):
            yield f"{prefix}{key}", f"{value:.4g}"
        elif isinstance(value, list):
            yield f"{prefix}{key}", ", ".join(str(item) for item in value)
        else:
            yield f"{prefix}{key}", "–" if value is None else str(value)


def _number(fields: object, key: str) -> float | None:
    # Metrics are whatever the training run wrote; an offset without them is still an offset.
    value = fields.get(key) if isinstance(fields, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
