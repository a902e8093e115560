"""The offset, its digest, and its file: written atomically, read strictly."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as save_safetensors

from offset_runtime import DomainOffset
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import InvalidRequestError, OffsetFileError
from offset_runtime.identity import BaseIdentity
from offset_runtime.offset import MAX_FILE_BYTES, MAX_HEADER_BYTES

MakeOffset = Callable[..., DomainOffset]


@pytest.fixture(scope="module")
def identity() -> BaseIdentity:
    return FakeBackend().identity


@pytest.fixture
def saved(tmp_path: Path, identity: BaseIdentity, make_offset: MakeOffset) -> Path:
    return make_offset(identity, domain="legal").save(tmp_path / "legal.safetensors")


def metadata_of(path: Path) -> dict[str, str]:
    data = path.read_bytes()
    found: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return found


def rewrite(path: Path, tensors: dict[str, np.ndarray[Any, Any]] | None = None, **changes: str | None) -> None:
    """Write the file again with other tensors or metadata; None removes a field."""
    tensors = tensors or {"offset": np.array(DomainOffset.load(path).tensor)}
    metadata = metadata_of(path) | changes
    path.write_bytes(save_safetensors(tensors, metadata={k: v for k, v in metadata.items() if v is not None}))


def test_a_file_gives_back_what_was_saved(tmp_path: Path, identity: BaseIdentity) -> None:
    offset = DomainOffset(
        domain="legal",
        tensor=np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16),
        anchor="sequence",
        prompt_format="bos",
        base=identity,
        training={"steps": 36, "lr": 1e-2},
        metrics={"gain_percent": 12.5, "retention": {"kl": 0.02}},
        documents_digest="ab" * 32,
    )
    read = DomainOffset.load(offset.save(tmp_path / "deep" / "er" / "legal.safetensors"))
    assert read == offset
    for field in ("domain", "anchor", "prompt_format", "base", "training", "metrics", "documents_digest", "created_at"):
        assert getattr(read, field) == getattr(offset, field)
    np.testing.assert_array_equal(read.tensor, offset.tensor)
    assert (read.positions, read.hidden_size) == (2, 16)


def test_the_digest_follows_tensor_shape_and_anchor_and_nothing_else(
    identity: BaseIdentity, make_offset: MakeOffset
) -> None:
    offset = make_offset(identity)
    assert len(offset.digest) == 64
    assert offset.renamed("other").digest == offset.digest
    assert make_offset(identity, anchor="sequence").digest != offset.digest
    assert make_offset(identity, seed=1).digest != offset.digest
    assert offset.scaled(0.5).digest != offset.digest
    wide = BaseIdentity(**identity.model_dump() | {"hidden_size": 24})
    one = DomainOffset("x", offset.tensor.reshape(2, 24), "turn", "chat", wide)
    assert one.tensor.tobytes() == offset.tensor.tobytes()
    assert one.digest != offset.digest


def test_offsets_are_equal_when_their_digests_are(identity: BaseIdentity, make_offset: MakeOffset) -> None:
    assert make_offset(identity) == make_offset(identity, domain="other")
    assert make_offset(identity) != make_offset(identity, seed=1)
    assert len({make_offset(identity), make_offset(identity), make_offset(identity, seed=1)}) == 2


def test_the_tensor_is_a_read_only_copy(identity: BaseIdentity) -> None:
    mine = np.zeros((1, 16), np.float32)
    offset = DomainOffset("x", mine, "turn", "chat", identity)
    digest = offset.digest
    mine[0, 0] = 9
    assert offset.tensor[0, 0] == 0
    assert offset.digest == digest
    with pytest.raises(ValueError, match="read-only"):
        offset.tensor[0, 0] = 1
    with pytest.raises(TypeError):
        offset.metrics["gain"] = 1  # type: ignore[index]


def test_strength_scales_the_rows(identity: BaseIdentity, make_offset: MakeOffset) -> None:
    offset = make_offset(identity)
    np.testing.assert_array_equal(offset.scaled(0.5).tensor, offset.tensor * np.float32(0.5))
    assert offset.scaled(1) is offset
    for strength in (float("nan"), float("inf"), 1e39):
        with pytest.raises(InvalidRequestError, match=r"finite"):
            offset.scaled(strength)


def test_offsets_can_be_copied_and_pickled(identity: BaseIdentity, make_offset: MakeOffset) -> None:
    offset = make_offset(identity)
    for other in (copy.copy(offset), copy.deepcopy(offset), pickle.loads(pickle.dumps(offset))):
        assert other == offset
        assert other.domain == offset.domain
        assert not other.tensor.flags.writeable


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": np.zeros((3, 8), np.float32)}, r"shape \(3, 8\), expected \(K, 16\)"),
        ({"tensor": np.zeros((0, 16), np.float32)}, "with K >= 1"),
        ({"tensor": np.zeros(16, np.float32)}, r"shape \(16,\)"),
        ({"tensor": np.zeros((1, 16))}, "dtype float64, expected float32"),
        ({"tensor": [[0.0] * 16]}, "found a tensor of shape"),
        ({"tensor": np.full((1, 16), np.nan, np.float32)}, "NaN or Inf"),
        ({"tensor": np.full((1, 16), np.inf, np.float32)}, "NaN or Inf"),
        ({"anchor": "end"}, "anchor 'end', expected one of sequence, turn"),
        ({"prompt_format": "html"}, "prompt format 'html', expected one of raw, bos, chat"),
        ({"domain": ""}, "an empty domain name"),
    ],
)
def test_an_offset_that_cannot_be_is_refused(identity: BaseIdentity, changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"domain": "x", "tensor": np.zeros((1, 16), np.float32), "anchor": "turn"}
    with pytest.raises(InvalidRequestError, match=message):
        DomainOffset(**fields | {"prompt_format": "chat", "base": identity} | changes)


def expect_unusable(path: Path, message: str) -> None:
    with pytest.raises(OffsetFileError, match=message) as caught:
        DomainOffset.load(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_anywhere_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for size in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(data) - 1):
        saved.write_bytes(data[:size])
        expect_unusable(saved, "truncated|cannot be read")


@given(at=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_with_any_byte_changed_is_refused_or_read_as_valid(saved: Path, at: float, bits: int) -> None:
    data = bytearray(saved.read_bytes())
    original = DomainOffset.load(saved)
    position = int(at * len(data))
    data[position] ^= bits
    damaged = saved.with_name("damaged.safetensors")
    damaged.write_bytes(data)
    with contextlib.suppress(OffsetFileError):
        # A changed letter of a free text or figure is still a valid file; the tensor never differs.
        assert DomainOffset.load(damaged) == original


def test_an_oversized_header_is_refused_before_anything_is_allocated(saved: Path) -> None:
    saved.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}")
    expect_unusable(saved, f"its header claims {MAX_HEADER_BYTES + 1} bytes; at most {MAX_HEADER_BYTES}")
    saved.write_bytes(b"\xff" * 8 + b"{}")
    expect_unusable(saved, "its header claims")


def test_an_oversized_file_is_refused_unread(saved: Path) -> None:
    os.truncate(saved, MAX_FILE_BYTES + 1)
    expect_unusable(saved, f"it has {MAX_FILE_BYTES + 1} bytes")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"offset": np.zeros((3, 16), np.float16)}, "dtype float16, expected float32"),
        ({"offset": np.zeros((3, 16), np.float64)}, "dtype float64, expected float32"),
        ({"offset": np.zeros((3, 8), np.float32)}, r"shape \(3, 8\), expected \(K, 16\)"),
        ({"offset": np.zeros((0, 16), np.float32)}, "with K >= 1"),
        ({"offset": np.zeros(48, np.float32)}, r"shape \(48,\)"),
        ({"offset": np.full((3, 16), np.nan, np.float32)}, "NaN or Inf"),
        ({"offset": np.full((3, 16), -np.inf, np.float32)}, "NaN or Inf"),
        ({"offset": np.zeros((3, 16), np.float32), "extra": np.zeros(1, np.float32)}, r"found tensors \['extra', 'off"),
        ({"delta": np.zeros((3, 16), np.float32)}, r"found tensors \['delta'\], expected only 'offset'"),
        ({"offset": np.ones((3, 16), np.float32)}, "its digest does not match its tensor"),
    ],
)
def test_a_foreign_or_changed_tensor_is_refused(
    saved: Path, tensors: dict[str, np.ndarray[Any, Any]], message: str
) -> None:
    rewrite(saved, tensors)
    expect_unusable(saved, message)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "Q4"])
def test_a_dtype_that_numpy_does_not_know_is_refused(saved: Path, dtype: str) -> None:
    header = {"offset": {"dtype": dtype, "shape": [1, 16], "data_offsets": [0, 32]}, "__metadata__": metadata_of(saved)}
    text = json.dumps(header).encode()
    saved.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 32)
    expect_unusable(saved, "its tensor cannot be read")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": "2"}, "found format version '2', this release reads '1'"),
        ({"format_version": None}, "found format version None"),
        ({"anchor": None}, r"fields missing: \['anchor'\], unknown: \[\]"),
        ({"digest": None}, r"fields missing: \['digest'\]"),
        ({"colour": "red"}, r"fields missing: \[\], unknown: \['colour'\]"),
        ({"anchor": "end"}, "anchor 'end', expected one of"),
        ({"anchor": "sequence"}, "its digest does not match"),
        ({"prompt_format": "html"}, "prompt format 'html'"),
        ({"domain": ""}, "an empty domain name"),
        ({"base": "{}"}, "its base-model identity is malformed"),
        ({"base": "not json"}, "its base-model identity is malformed"),
        ({"training": "{"}, "its metadata field 'training' is not JSON"),
        ({"training": "9" * 5000}, "its metadata field 'training' is not JSON"),
        ({"training": "[" * 100_000}, "its metadata field 'training' is not JSON"),
        ({"metrics": "[1]"}, "its metadata field 'metrics' is not a JSON object"),
        ({"created_at": "yesterday"}, "its creation time 'yesterday' is no ISO 8601 time"),
        ({"digest": "0" * 64}, "its digest does not match its tensor"),
    ],
)
def test_wrong_metadata_is_refused(saved: Path, changes: dict[str, str | None], message: str) -> None:
    rewrite(saved, **changes)
    expect_unusable(saved, message)


@pytest.mark.parametrize(
    ("sketch", "message"),
    [("!!", "sketch: .*must be base64"), ("AAAA", "must be base64"), ("AHw=", "must hold finite numbers")],
)
def test_a_damaged_sketch_is_refused(saved: Path, sketch: str, message: str) -> None:
    rewrite(saved, base=json.dumps(json.loads(metadata_of(saved)["base"]) | {"sketch": sketch}))
    expect_unusable(saved, message)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[" * 200_000, "its header is not JSON"),
        (b"\xff\xfe", "its header is not JSON"),
        (b"[]", "without offset metadata"),
        (b'{"__metadata__": 3}', "without offset metadata"),
        (b"{}", "without offset metadata"),
    ],
)
def test_a_header_that_is_no_offset_header_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    expect_unusable(path, message)


def test_metadata_that_is_no_text_is_refused(saved: Path) -> None:
    text = json.dumps({"__metadata__": metadata_of(saved) | {"domain": 7}}).encode()
    saved.write_bytes(len(text).to_bytes(8, "little") + text)
    expect_unusable(saved, "its metadata field 'domain' is no text")


def test_a_plain_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(save_safetensors({"offset": np.zeros((3, 16), np.float32)}))
    expect_unusable(path, "a safetensors file without offset metadata")


class Payload:
    """Leaves a folder behind where its pickle is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def test_a_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "x.safetensors", tmp_path / "trace"
    path.write_bytes(pickle.dumps(Payload(trace)))
    expect_unusable(path, "truncated|header claims")
    assert not trace.exists()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    expect_unusable(tmp_path / "folder.safetensors", "not a regular file")
    os.mkfifo(tmp_path / "pipe.safetensors")
    expect_unusable(tmp_path / "pipe.safetensors", "not a regular file")
    expect_unusable(tmp_path / "none.safetensors", "no offset file at .*; train one with 'offset-runtime train'")
    (tmp_path / "plain").write_text("text")
    expect_unusable(tmp_path / "plain" / "x.safetensors", "cannot be read|no offset file")


def test_an_unreadable_file_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As root every file can be read, so the refusal is made here.
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    expect_unusable(saved, r"it cannot be read \(Permission denied\)")


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    saved: Path, identity: BaseIdentity, make_offset: MakeOffset, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = saved.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "write":
        monkeypatch.setattr(Path, "open", fail)
    elif step == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OffsetFileError, match=r"cannot write offset file .*legal.*: No space left on device"):
        make_offset(identity, domain="legal", seed=1).save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["legal.safetensors"]


def test_an_interrupted_write_leaves_no_temporary_file(
    saved: Path, identity: BaseIdentity, make_offset: MakeOffset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_offset(identity, domain="legal", seed=1).save(saved)
    assert [path.name for path in saved.parent.iterdir()] == ["legal.safetensors"]


def test_saving_where_a_folder_lies_or_no_folder_can_be_is_an_error(
    tmp_path: Path, identity: BaseIdentity, make_offset: MakeOffset
) -> None:
    offset = make_offset(identity)
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").write_text("text")
    for path in (tmp_path / "folder", tmp_path / "plain" / "x.safetensors"):
        with pytest.raises(OffsetFileError, match="cannot write offset file"):
            offset.save(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "plain"]


def test_a_saved_file_has_the_mode_of_the_umask(
    tmp_path: Path, identity: BaseIdentity, make_offset: MakeOffset
) -> None:
    before = os.umask(0o027)
    try:
        path = make_offset(identity).save(tmp_path / "x.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
