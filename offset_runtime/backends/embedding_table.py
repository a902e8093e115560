"""The token embedding table of a GGUF file, de-quantised row by row as rows are needed.

The table stays in the file: what is read is mapped, as llama.cpp maps it, so the pages are shared and no second
copy is held. The `gguf` package's own reader visits every string of the vocabulary (2 s for 50,000 tokens on a
slow core); here the header is only skipped through, for the one tensor that is wanted. The layout is the file
format's: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize

from offset_runtime.backends.gguf_parts import GgufParts
from offset_runtime.errors import ModelNotFoundError, UnsupportedModelError

_TENSOR = b"token_embd.weight"
_DEFAULT_ALIGNMENT = 32
# Arrays of arrays may be written, and no file has them.
_MOST_NESTED = 4

_WIDTHS = {
    GGUFValueType.UINT8: 1,
    GGUFValueType.INT8: 1,
    GGUFValueType.BOOL: 1,
    GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2,
    GGUFValueType.UINT32: 4,
    GGUFValueType.INT32: 4,
    GGUFValueType.FLOAT32: 4,
    GGUFValueType.UINT64: 8,
    GGUFValueType.INT64: 8,
    GGUFValueType.FLOAT64: 8,
}


class EmbeddingTable:
    """Rows of `token_embd.weight` of a GGUF file, or of the first part of a split one.

    `size`: rows; `width`: numbers a row. Raises `ModelNotFoundError` for a file that is damaged or lacks the
    table, `UnsupportedModelError` for a quantisation that the gguf package cannot undo.
    """

    def __init__(self, path: Path) -> None:
        for part in GgufParts.of(path).paths():
            found = _find(part)
            if found is not None:
                break
        else:
            raise ModelNotFoundError(f"GGUF file {path} holds no tensor {_TENSOR.decode()}; it is no language model")
        self.width, self.size, self._type = found.width, found.rows, found.type
        self._bytes = np.memmap(part, np.uint8, "r", found.offset, (found.rows, found.row_bytes))
        try:
            self.rows([0])
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"the embedding table of {path.name} is quantised as {self._type.name}, which the gguf package "
                "cannot undo, so offsets cannot be added to it; use a file whose token_embd.weight has another type"
            ) from error

    @property
    def type_name(self) -> str:
        """The table's quantisation, such as ``Q8_0``."""
        return self._type.name

    def rows(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Return the rows (n, width) of `token_ids`, as the file holds them, unscaled."""
        return np.asarray(dequantize(np.asarray(self._bytes[np.asarray(token_ids)]), self._type), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a table of `rows` rows of `width` numbers, `row_bytes` bytes each, lies in a file."""

    offset: int
    rows: int
    width: int
    row_bytes: int
    type: GGMLQuantizationType


def _find(path: Path) -> _Place | None:
    """Where the table lies, or None where the file has none."""
    try:
        with path.open("rb") as stream:
            if not path.stat().st_size:
                raise _damaged(path, "it is empty")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Header(view).find(_TENSOR)
    except OSError as error:
        raise ModelNotFoundError(f"cannot read GGUF file {path}: {error.strerror or error}") from error
    # A damaged header leads anywhere: to sizes beyond any file, and to types that there are not.
    except struct.error as error:
        raise _damaged(path, "it ends within its header") from error
    except (ValueError, KeyError, OverflowError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, why: object) -> ModelNotFoundError:
    return ModelNotFoundError(f"cannot read GGUF file {path}: {why}. It is damaged or of another kind; get it again.")


class _Header:
    """Walks through the metadata and the list of tensors at the start of a GGUF file."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._at = 0
        self._alignment = _DEFAULT_ALIGNMENT

    def find(self, name: bytes) -> _Place | None:
        if self._view[:4] != b"GGUF":
            raise ValueError(f"it begins with {self._view[:4]!r}, expected b'GGUF'")
        self._at = 4
        version, tensors, pairs = self._take("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"its format version is {version}, expected 2 or 3")
        for _ in range(pairs):
            self._skip_pair()
        found = None
        for _ in range(tensors):
            tensor, shape, kind, offset = self._tensor()
            if tensor == name:
                found = shape, GGMLQuantizationType(kind), offset
        return None if found is None else self._place(*found)

    def _place(self, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int) -> _Place:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        width, rows = shape if len(shape) == 2 else (0, 0)
        if self._alignment < 1 or rows < 1 or width < 1 or width % block:
            raise ValueError(f"its embedding table has shape {shape}, type {kind.name}, alignment {self._alignment}")
        # The data begin at the next multiple of the alignment behind the list of tensors.
        start = -(-self._at // self._alignment) * self._alignment + offset
        row_bytes = width // block * block_bytes
        if start + rows * row_bytes > len(self._view):
            raise ValueError(f"its embedding table ends at byte {start + rows * row_bytes} of {len(self._view)}")
        return _Place(start, rows, width, row_bytes, kind)

    def _take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(form, self._view, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> bytes:
        (size,) = self._take("<Q")
        self._at += size
        return self._view[self._at - size : self._at]

    def _skip_pair(self) -> None:
        key = self._string()
        kind = self._take("<I")[0]
        if key == b"general.alignment":
            (self._alignment,) = self._take("<I")
        else:
            self._skip_value(GGUFValueType(kind))

    def _skip_value(self, kind: GGUFValueType, depth: int = 0) -> None:
        if kind == GGUFValueType.STRING:
            self._skip_strings(1)
        elif kind == GGUFValueType.ARRAY:
            item, count = self._take("<IQ")
            if item == GGUFValueType.STRING:
                self._skip_strings(count)
            elif item == GGUFValueType.ARRAY:
                if depth == _MOST_NESTED:
                    raise ValueError("its metadata hold arrays nested too deep")
                for _ in range(count):
                    self._skip_value(GGUFValueType.ARRAY, depth + 1)
            else:
                self._at += _WIDTHS[GGUFValueType(item)] * count
        else:
            self._at += _WIDTHS[kind]

    def _skip_strings(self, count: int) -> None:
        # The hot loop of a load: a vocabulary has up to 260,000 strings.
        view, at, size_of = self._view, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + size_of(view, at)[0]
        self._at = at

    def _tensor(self) -> tuple[bytes, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._take("<I")
        if dimensions > 4:
            raise ValueError(f"a tensor has {dimensions} dimensions, expected at most 4")
        shape = self._take(f"<{dimensions}Q")
        kind, offset = self._take("<IQ")
        return name, shape, kind, offset
