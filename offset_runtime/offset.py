"""The domain offset: K rows of d numbers, what they were trained for, and the file that holds them."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from offset_runtime.errors import InvalidRequestError, OffsetFileError
from offset_runtime.identity import BaseIdentity
from offset_runtime.tensor_file import read_header, write_atomically

Anchor = Literal["sequence", "turn"]
PromptFormat = Literal["raw", "bos", "chat"]

ANCHORS: tuple[Anchor, ...] = get_args(Anchor)
PROMPT_FORMATS: tuple[PromptFormat, ...] = get_args(PromptFormat)

FORMAT_VERSION = "1"
TENSOR_NAME = "offset"
SUFFIX = ".safetensors"

# An offset's header holds a few kilobytes of metadata. A length far beyond that is a damaged or a
# hostile file, and is refused before anything of that size is allocated.
MAX_HEADER_BYTES = 1 << 20
MAX_FILE_BYTES = 64 << 20

_METADATA_KEYS = frozenset(
    {
        "format_version",
        "domain",
        "anchor",
        "prompt_format",
        "base",
        "training",
        "documents_digest",
        "metrics",
        "created_at",
        "digest",
    }
)


@dataclass(frozen=True, eq=False)
class DomainOffset:
    """A learned tensor added to the input embeddings of K prompt positions, and its provenance.

    `tensor` is float32 of shape (K, d), read-only. `training` holds the settings, `metrics` the
    held-out figures with and without the offset. Two offsets are equal when their digests are.

    Raises `InvalidRequestError` for a tensor that is not a finite float32 (K, d) array or for an
    unknown anchor or prompt format.
    """

    domain: str
    tensor: npt.NDArray[np.float32] = field(repr=False)
    anchor: Anchor
    prompt_format: PromptFormat
    base: BaseIdentity = field(repr=False)
    training: Mapping[str, Any] = field(default_factory=dict, repr=False)
    metrics: Mapping[str, Any] = field(default_factory=dict, repr=False)
    documents_digest: str = ""
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        problem = _tensor_problem(self.tensor, self.base.hidden_size)
        if problem is None and self.anchor not in ANCHORS:
            problem = f"anchor {self.anchor!r}, expected one of {', '.join(ANCHORS)}"
        if problem is None and self.prompt_format not in PROMPT_FORMATS:
            problem = f"prompt format {self.prompt_format!r}, expected one of {', '.join(PROMPT_FORMATS)}"
        if problem is None and not self.domain:
            problem = "an empty domain name"
        if problem is not None:
            raise InvalidRequestError(f"cannot make an offset for domain {self.domain!r}: found {problem}")
        frozen = np.array(self.tensor, dtype=np.float32, order="C")
        frozen.flags.writeable = False
        object.__setattr__(self, "tensor", frozen)
        object.__setattr__(self, "training", MappingProxyType(dict(self.training)))
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))

    @property
    def positions(self) -> int:
        """K, the number of prompt positions the offset is added to."""
        return int(self.tensor.shape[0])

    @property
    def hidden_size(self) -> int:
        """d, the size of an input embedding."""
        return int(self.tensor.shape[1])

    @cached_property
    def digest(self) -> str:
        """sha256 over the little-endian tensor bytes, K, d and the anchor, as 64 hex digits."""
        payload = hashlib.sha256(self.tensor.astype("<f4").tobytes())
        payload.update(f"|{self.positions}|{self.hidden_size}|{self.anchor}".encode())
        return payload.hexdigest()

    def scaled(self, strength: float) -> DomainOffset:
        """Return this offset times `strength`: another digest, and no metrics, which were measured at strength 1."""
        if not np.isfinite(strength):
            raise InvalidRequestError(f"strength must be a finite number, found {strength!r}")
        if strength == 1:
            return self
        with np.errstate(all="ignore"):
            # Beyond float32, and 0 times that, are not finite, which the new offset refuses.
            tensor = self.tensor * np.float32(strength)
        return dataclasses.replace(self, tensor=tensor, metrics={})

    def renamed(self, domain: str) -> DomainOffset:
        """Return this offset under another domain name (the digest stays)."""
        return self if domain == self.domain else dataclasses.replace(self, domain=domain)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are made anew: read-only views of mappings can be neither.
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _restored, (fields | {"training": dict(self.training), "metrics": dict(self.metrics)},)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DomainOffset) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the offset file atomically: a reader sees the old file or the new one, never a part.

        Raises `OffsetFileError` when it cannot be written, or when training or metrics are no JSON.
        """
        target = Path(path)
        metadata = {
            "format_version": FORMAT_VERSION,
            "domain": self.domain,
            "anchor": self.anchor,
            "prompt_format": self.prompt_format,
            "base": self.base.model_dump_json(),
            "training": self._field_json("training", self.training),
            "documents_digest": self.documents_digest,
            "metrics": self._field_json("metrics", self.metrics),
            "created_at": self.created_at,
            "digest": self.digest,
        }
        _write(target, save_safetensors({TENSOR_NAME: self.tensor}, metadata=metadata))
        return target

    def _field_json(self, name: str, value: Mapping[str, Any]) -> str:
        try:
            return json.dumps(dict(value), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise OffsetFileError(
                f"cannot write the offset of domain {self.domain!r}: its {name} are no JSON ({error}); "
                "use plain numbers, strings, lists and dicts"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DomainOffset:
        """Read an offset file, checking every field.

        Raises `OffsetFileError` for a missing, truncated, oversized or foreign file, an unknown
        version, a wrong shape or dtype, NaN or Inf, or a digest that does not match the tensor.
        """
        source = Path(path)
        data = _read_bounded(source)
        metadata = _read_metadata(source, data)
        tensor = _read_tensor(source, data)
        try:
            offset = cls(
                domain=metadata["domain"],
                tensor=tensor,
                anchor=metadata["anchor"],  # type: ignore[arg-type]  # checked in __post_init__
                prompt_format=metadata["prompt_format"],  # type: ignore[arg-type]
                base=BaseIdentity.model_validate_json(metadata["base"]),
                training=_json_object(source, "training", metadata),
                metrics=_json_object(source, "metrics", metadata),
                documents_digest=metadata["documents_digest"],
                created_at=metadata["created_at"],
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise _unusable(source, f"its base-model identity is malformed ({where}: {first['msg']})") from error
        except InvalidRequestError as error:
            raise _unusable(source, str(error)) from error
        if offset.digest != metadata["digest"]:
            raise _unusable(source, "its digest does not match its tensor, so the file was changed or damaged")
        return offset


def _restored(fields: Mapping[str, Any]) -> DomainOffset:
    return DomainOffset(**fields)


def _tensor_problem(tensor: object, hidden_size: int) -> str | None:
    if not isinstance(tensor, np.ndarray) or tensor.ndim != 2:
        return f"a tensor of shape {getattr(tensor, 'shape', '?')}, expected (K, {hidden_size})"
    if tensor.shape[0] < 1 or tensor.shape[1] != hidden_size:
        return f"a tensor of shape {tensor.shape}, expected (K, {hidden_size}) with K >= 1"
    if tensor.dtype != np.float32:
        return f"a tensor of dtype {tensor.dtype}, expected float32"
    if not np.isfinite(tensor).all():
        return "NaN or Inf in the tensor, expected finite numbers"
    return None


def _unusable(path: Path, why: str) -> OffsetFileError:
    return OffsetFileError(f"cannot use offset file {path}: {why}. Train the domain again, or restore the file.")


def _read_bounded(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise _unusable(path, "it is not a regular file")
        if size > MAX_FILE_BYTES:
            raise _unusable(path, f"it has {size} bytes; an offset file has at most {MAX_FILE_BYTES}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise OffsetFileError(
            f"no offset file at {path}; train one with 'offset-runtime train', or check the path"
        ) from error
    except OSError as error:
        raise _unusable(path, f"it cannot be read ({error.strerror})") from error


def _read_metadata(path: Path, data: bytes) -> dict[str, str]:
    header = _read_header(path, data)
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise _unusable(path, "it is a safetensors file without offset metadata")
    version = metadata.get("format_version")
    if version != FORMAT_VERSION:
        raise _unusable(path, f"found format version {version!r}, this release reads {FORMAT_VERSION!r}")
    missing = _METADATA_KEYS - metadata.keys()
    unknown = metadata.keys() - _METADATA_KEYS
    if missing or unknown:
        raise _unusable(path, f"metadata fields missing: {sorted(missing)}, unknown: {sorted(unknown)}")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise _unusable(path, f"its metadata field {key!r} is no text")
    try:
        datetime.fromisoformat(metadata["created_at"])
    except ValueError as error:
        raise _unusable(path, f"its creation time {metadata['created_at']!r} is no ISO 8601 time") from error
    return metadata


def _read_header(path: Path, data: bytes) -> object:
    try:
        return read_header(io.BytesIO(data), len(data), MAX_HEADER_BYTES)[1]
    except ValueError as error:
        raise _unusable(path, str(error)) from error


def _read_tensor(path: Path, data: bytes) -> npt.NDArray[np.float32]:
    try:
        tensors = load_safetensors(data)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _unusable(path, f"its tensor cannot be read ({error})") from error
    if set(tensors) != {TENSOR_NAME}:
        raise _unusable(path, f"found tensors {sorted(tensors)}, expected only {TENSOR_NAME!r}")
    return tensors[TENSOR_NAME]


def _json_object(path: Path, key: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        value = json.loads(metadata[key])
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"its metadata field {key!r} is not JSON") from error
    if not isinstance(value, dict):
        raise _unusable(path, f"its metadata field {key!r} is not a JSON object")
    return value


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        raise OffsetFileError(
            f"cannot write offset file {path}: {error.strerror}; check the folder's permissions and free space"
        ) from error
