"""Checkpoints of workflows in an SQLite file, so that a run survives its process."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from typing import TYPE_CHECKING

from offset_runtime.errors import OffsetError

if TYPE_CHECKING:
    from langgraph.checkpoint.sqlite import SqliteSaver


@contextlib.contextmanager
def sqlite_checkpoints(path: str | os.PathLike[str]) -> Iterator[SqliteSaver]:
    """Open the checkpoint file `path`, which is made if need be, for `build_graph`.

    Raises `OffsetError` when the extra ``sqlite`` is not installed or the file cannot be used.
    """
    try:
        from langgraph.checkpoint.sqlite import SqliteSaver
    except ImportError as error:
        raise OffsetError(
            "checkpoints in a file need the package langgraph-checkpoint-sqlite, which is not installed here; "
            "run: pip install 'offset-runtime[sqlite]'"
        ) from error
    try:
        with SqliteSaver.from_conn_string(os.fspath(path)) as saver:
            saver.setup()
            yield saver
    except sqlite3.Error as error:
        raise OffsetError(
            f"cannot use checkpoint file {os.fspath(path)}: {error}; name an SQLite file in a folder that exists"
        ) from error
