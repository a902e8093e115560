"""Documents to train and test on, read from folders, text files and JSONL files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offset_runtime.errors import DocumentError

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".text"})

# Read as one text each of these would pass, and be learned with its brackets and commas.
DATA_SUFFIXES = frozenset({".json", ".csv", ".tsv", ".xml", ".yaml", ".yml"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or a conversation whose assistant turns are what is learned.

    `messages` is empty for a plain text; otherwise (role, content) pairs, and `text` is their joined
    content.
    """

    text: str
    messages: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Documents:
    """Documents in the order they were found, and a count of what was left out and why."""

    items: list[Document] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def digest(self) -> str:
        """sha256 over all documents in order, as 64 hex digits."""
        hasher = hashlib.sha256()
        for document in self.items:
            roles = ",".join(role for role, _ in document.messages)
            hasher.update(f"{roles}\0{document.text}\0".encode())
        return hasher.hexdigest()


def read_documents(sources: Iterable[str | os.PathLike[str]]) -> Documents:
    """Read folders (all .jsonl and text files below, hidden ones left alone), .jsonl files and text files.

    A JSONL line holds ``text``, or ``messages`` (role, content), or ``prompt`` and ``completion``. A
    text file is one document, or several where lines of ``---`` part it. Empty, duplicated and
    undecodable documents are left out, counted and named in one warning.

    Raises `DocumentError` when a source is missing or of another kind, a JSONL line is malformed, or
    nothing is left.
    """
    found = Documents()
    names = [Path(source) for source in sources]
    for path in names:
        for file in _files(path, found):
            found.items.extend(_read_file(file, found))
    found.items = _unique(found.items, found.skipped)
    listing = ", ".join(str(name) for name in names)
    if not found.items:
        why = f" (left out: {_describe(found.skipped)})" if found.skipped else ""
        raise DocumentError(
            f"no documents in {listing}{why}; expected .jsonl files, or text files "
            f"({', '.join(sorted(TEXT_SUFFIXES))}) in UTF-8 with some text"
        )
    if found.skipped:
        _log.warning("%s: left out %s; %d documents remain", listing, _describe(found.skipped), len(found.items))
    return found


def _describe(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} {why}" for why, count in sorted(skipped.items()))


def _files(path: Path, found: Documents) -> list[Path]:
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and not _hidden(f.relative_to(path)))
        wanted = [f for f in files if f.suffix.lower() in TEXT_SUFFIXES | {".jsonl"}]
        if len(wanted) < len(files):
            found.skipped["files of another type"] += len(files) - len(wanted)
        return wanted
    if not path.is_file():
        raise DocumentError(f"no file or folder {path}; give a folder, a .jsonl file or a text file")
    if path.suffix.lower() in DATA_SUFFIXES:
        raise DocumentError(
            f"{path} holds data, not a text; write its records to a .jsonl file, one JSON object with 'text' a line"
        )
    return [path]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_file(path: Path, found: Documents) -> list[Document]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror}") from error
    if "\0" in text:
        # UTF-16 without a byte order mark decodes as UTF-8, with a NUL after every ASCII letter.
        found.skipped["not in UTF-8"] += 1
        return []
    if path.suffix.lower() == ".jsonl":
        # Only "\n" ends a JSON line: str.splitlines would also cut at U+2028 inside a string.
        lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
        documents = [_from_json(path, number, line) for number, line in lines]
    else:
        documents = [Document(part.strip()) for part in _parts(text)]
    kept = [document for document in documents if document.text.strip()]
    if len(kept) < max(len(documents), 1):
        found.skipped["empty"] += max(len(documents), 1) - len(kept)
    whole = [document for document in kept if _encodable(document.text)]
    if len(whole) < len(kept):
        found.skipped["with half a character"] += len(kept) - len(whole)
    return whole


def _parts(text: str) -> list[str]:
    parts: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip() == "---":
            parts.append([])
        else:
            parts[-1].append(line)
    return ["\n".join(part) for part in parts]


def _encodable(text: str) -> bool:
    # JSON can spell one half of a surrogate pair, which is no character and has no bytes.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _from_json(path: Path, number: int, line: str) -> Document:
    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DocumentError(f"{where}: not JSON ({why}); expected one JSON object a line") from error
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return Document(record["text"])
        if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
            return _conversation([("user", record["prompt"]), ("assistant", record["completion"])])
        if isinstance(record.get("messages"), list):
            return _conversation(_turns(where, record["messages"]))
    found = f"keys {sorted(record)}" if isinstance(record, dict) else type(record).__name__
    raise DocumentError(f"{where}: found {found}; expected 'text', 'messages', or 'prompt' and 'completion' as strings")


def _turns(where: str, messages: Sequence[Any]) -> list[tuple[str, str]]:
    turns = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise DocumentError(
                f"{where}: every message needs a role (system, user or assistant) and a content string; "
                f"found {message!r}"
            )
        turns.append((role, content))
    if not any(role == "assistant" and content.strip() for role, content in turns):
        raise DocumentError(f"{where}: no assistant message, so there is nothing to learn")
    return turns


def _conversation(turns: list[tuple[str, str]]) -> Document:
    return Document("\n".join(content for _, content in turns), tuple(turns))


def _unique(documents: list[Document], skipped: Counter[str]) -> list[Document]:
    unique = list(dict.fromkeys(documents))
    if len(unique) < len(documents):
        skipped["duplicated"] += len(documents) - len(unique)
    return unique
