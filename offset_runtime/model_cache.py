"""The folder in which models are kept that were made ready once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from offset_runtime.errors import OffsetError

CACHE_VARIABLE = "OFFSET_RUNTIME_CACHE"


def cache_directory() -> Path:
    """The folder itself: $OFFSET_RUNTIME_CACHE, or the user's cache directory."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else user_cache_path("offset-runtime")


@contextmanager
def work_folder(size: str) -> Iterator[Path]:
    """Yield an empty folder beside the entries of the cache, so that what is made in it can be renamed to one.

    `size`: what an entry takes, for the message. Raises `OffsetError` where the cache cannot be written.
    """
    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder, prefix=".unfinished-"))
    except OSError as error:
        raise unwritable(folder, size, error) from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def unwritable(folder: Path, size: str, error: Exception) -> OffsetError:
    """The error that says that nothing can be kept in `folder`."""
    return OffsetError(
        f"cannot write the model cache {folder}: {error}; free space there ({size}), "
        f"or set {CACHE_VARIABLE} to another writable folder"
    )
