"""A file of saved KV state: a .safetensors with the state's tensors, and what the model had read.

Its name is a digest of the backend's `state_key` and of the symbols (`placement.symbols`), and a checksum covers all of
it but itself. It holds the token ids that it stands for, in the clear.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save as save_safetensors

from offset_runtime.placement import Symbol
from offset_runtime.tensor_file import read_header

FORMAT = "offset-runtime state"
FORMAT_VERSION = "1"

# A token takes at most some 90 bytes of it.
_MAX_HEADER_BYTES = 32 << 20
_METADATA_KEYS = {"format", "format_version", "key", "symbols", "tokens", "created_at", "checksum"}
# The checksum counts as zeros in itself.
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
_UNKNOWN_CHECKSUM = "0" * 64


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A file whose header is sound: what its state was read from, and bytes of the state and in all."""

    path: Path
    symbols: tuple[Symbol, ...]
    state_bytes: int
    file_bytes: int


def file_name(key: str, symbols: Sequence[Symbol]) -> str:
    """The name of the file for the state of `symbols` under the backend's `key`."""
    return _name(key, _symbols_json(symbols))


def _name(key: str, symbols_json: str) -> str:
    digest = hashlib.sha256(f"{key}\n{symbols_json}".encode()).hexdigest()
    return f"kv-{digest}.safetensors"


def _symbols_json(symbols: Sequence[Symbol]) -> str:
    # Numpy's whole numbers are no JSON.
    return json.dumps(symbols, separators=(",", ":"), default=int)


def serialised(key: str, symbols: Sequence[Symbol], tensors: Mapping[str, npt.NDArray[Any]]) -> bytearray:
    """The bytes of a file with the state `tensors` of `symbols` under the backend's `key`."""
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


def read_whole(path: Path, size: int) -> bytes:
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


def read_entry(path: Path) -> tuple[StateEntry, str]:
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
