"""What all our .safetensors files have in common: how they are written, and how their header is read."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, data: bytes | bytearray) -> None:
    """Write `data` to `path`: a reader sees the old file or the new one, never a part. Folders are made.

    Raises `OSError`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Opened, and not made by tempfile, so that the file gets the mode the user's umask gives.
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_header(stream: BinaryIO, file_bytes: int, most_bytes: int) -> tuple[bytes, object]:
    """Read the header of a file of `file_bytes` bytes: its JSON as it is written, and what that says.

    Raises `ValueError`, whose text says why, for a header that is truncated, longer than `most_bytes` or no JSON.
    """
    size = stream.read(8)
    if len(size) < 8:
        raise ValueError(f"it is truncated ({len(size)} bytes)")
    header_bytes = int.from_bytes(size, "little")
    # Before anything of that size is allocated.
    if header_bytes > most_bytes:
        raise ValueError(f"its header claims {header_bytes} bytes; at most {most_bytes} are allowed")
    if header_bytes > file_bytes - 8:
        raise ValueError(f"it is truncated (header of {header_bytes} bytes, file of {file_bytes})")
    header = stream.read(header_bytes)
    try:
        return header, json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not a safetensors file (its header is not JSON)") from error
