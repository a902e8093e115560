"""The folder of saved state: what is written is found by key and symbols alone, and what is damaged is never used."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as save_safetensors

from offset_runtime.errors import StateFolderError
from offset_runtime.placement import Symbol
from offset_runtime.state_folder import StateFolder

KEY = "a model"
DIGEST = "d" * 64
SYMBOLS: tuple[Symbol, ...] = (1, 2, (3, DIGEST, 0), (4, DIGEST, 1), 5)
STATE = {"keys": np.arange(24, dtype=np.float32).reshape(2, 12), "bits": np.arange(6, dtype=np.uint16)}


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "kv")


def saved_file(folder: StateFolder) -> Path:
    assert folder.write(KEY, SYMBOLS, STATE)
    [path] = folder.path.iterdir()
    return path


def usable(folder: StateFolder, key: str = KEY) -> list[tuple[tuple[Symbol, ...], dict[str, Any]]]:
    found = [(entry.symbols, folder.read(entry)) for entry in folder.entries(key)]
    return [(symbols, tensors) for symbols, tensors in found if tensors is not None]


def symbols_held(folder: StateFolder) -> list[tuple[Symbol, ...]]:
    return [entry.symbols for entry in folder.entries(KEY)]


# What is written is found


def test_a_written_state_is_read_as_it_was(folder: StateFolder) -> None:
    assert folder.write(KEY, SYMBOLS, STATE)
    [(symbols, tensors)] = usable(StateFolder(folder.path))
    assert symbols == SYMBOLS
    assert tensors.keys() == STATE.keys()
    for name, array in STATE.items():
        assert tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(tensors[name], array)


def test_entries_come_newest_first_and_a_touch_makes_one_the_newest(folder: StateFolder) -> None:
    for token in (1, 2, 3):
        folder.write(KEY, (token,), STATE)
    assert symbols_held(folder) == [(3,), (2,), (1,)]
    assert folder.touch(KEY, (1,))
    assert not folder.touch(KEY, (4,))
    assert not folder.touch("another", (1,))
    assert symbols_held(folder) == [(1,), (3,), (2,)]
    now = time.time_ns()
    folder.touch(KEY, (3,), now - 10**9)
    folder.write(KEY, (5,), STATE, now - 2 * 10**9)
    assert symbols_held(folder) == [(1,), (2,), (3,), (5,)]


def test_the_same_state_again_takes_the_place_of_the_first(folder: StateFolder) -> None:
    folder.write(KEY, SYMBOLS, STATE)
    folder.write(KEY, SYMBOLS, {"keys": np.zeros(3, np.float32)})
    [(_, tensors)] = usable(folder)
    assert tensors["keys"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("order", ["C", "F", "cut"])
def test_arrays_of_any_memory_layout_are_written_as_they_read(folder: StateFolder, order: str) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    array = array[:, ::2] if order == "cut" else np.array(array, order=order)  # type: ignore[call-overload]
    folder.write(KEY, SYMBOLS, {"keys": array})
    [(_, tensors)] = usable(folder)
    np.testing.assert_array_equal(tensors["keys"], array)


def test_token_ids_may_be_numpys(folder: StateFolder) -> None:
    folder.write(KEY, (np.int64(1), (np.int32(2), DIGEST, 0)), STATE)  # type: ignore[arg-type]
    assert symbols_held(folder) == [(1, (2, DIGEST, 0))]
    assert folder.touch(KEY, (1, (2, DIGEST, 0)))


def test_bytes_read_and_written_are_counted(folder: StateFolder) -> None:
    path = saved_file(folder)
    size = path.stat().st_size
    assert (folder.read_bytes, folder.written_bytes) == (0, size)
    usable(folder)
    assert (folder.read_bytes, folder.written_bytes) == (size, size)
    [entry] = folder.entries(KEY)
    assert (entry.file_bytes, entry.state_bytes) == (size, sum(array.nbytes for array in STATE.values()))


# What is foreign or damaged is not


@pytest.mark.parametrize(
    ("key", "symbols"),
    [
        ("another model", SYMBOLS),
        (KEY, SYMBOLS[:-1]),
        (KEY, (1, 2, 3, 4, 5)),
        (KEY, (1, 2, (3, "e" * 64, 0), (4, DIGEST, 1), 5)),
        (KEY, (1, 2, (3, DIGEST, 1), (4, DIGEST, 1), 5)),
    ],
)
def test_another_key_or_other_symbols_are_another_state(
    folder: StateFolder, key: str, symbols: tuple[Symbol, ...]
) -> None:
    first = saved_file(folder)
    assert not folder.touch(key, symbols)
    assert folder.write(key, symbols, {"keys": np.zeros(1, np.float32)})
    assert len(list(folder.path.iterdir())) == 2
    assert first.exists()


def test_states_of_another_model_are_left_out_with_one_warning(
    folder: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    for token in (1, 2, 3):
        folder.write("another", (token,), STATE)
    folder.write(KEY, SYMBOLS, STATE)
    assert symbols_held(folder) == [SYMBOLS]
    [record] = caplog.records
    assert "and 2 more is of another model or version, and is not used" in record.message
    assert str(folder.path / "kv-") in record.message
    assert len(list(folder.path.iterdir())) == 4


def edited(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Writes the file anew with changed bytes."""

    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Writes the file anew with a changed header."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:size])
        change(header)
        raw = json.dumps(header).encode()
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[size:])

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (edited(lambda data: b""), "truncated"),
    "cut in the header": (edited(lambda data: data[:100]), "truncated"),
    "cut in the tensors": (edited(lambda data: data[:-1]), "truncated"),
    "longer": (edited(lambda data: data + b"x"), "truncated or damaged"),
    "an oversized header": (edited(lambda data: (1 << 40).to_bytes(8, "little") + data[8:]), "header claims"),
    "no safetensors": (edited(lambda data: b"\x10" + bytes(7) + b"not JSON at all!"), "not a safetensors file"),
    "another safetensors file": (edited(lambda data: save_safetensors(STATE)), "without saved state"),
    "no header object": (edited(lambda data: (2).to_bytes(8, "little") + b"[]"), "without saved state"),
    "another version": (with_header(lambda h: h["__metadata__"].update(format_version="2")), "version '2'"),
    "another key": (with_header(lambda h: h["__metadata__"].update(key="another")), "its name is not"),
    "other symbols": (with_header(lambda h: h["__metadata__"].update(symbols="[1,2]")), "its name is not"),
    "a field more": (with_header(lambda h: h["__metadata__"].update(more="x")), "metadata fields"),
    "another time": (with_header(lambda h: h["__metadata__"].update(created_at="2020")), "checksum"),
    "other names": (with_header(lambda h: h.update(values=h.pop("keys"))), "checksum"),
    "another type": (with_header(lambda h: h["keys"].update(dtype="I32")), "checksum"),
    "no offsets": (with_header(lambda h: h["keys"].pop("data_offsets")), "where its tensors are"),
    "offsets beyond numbers": (
        with_header(lambda h: h["keys"].update(data_offsets=[0, float("inf")])),
        "where its tensors are",
    ),
    "a changed tensor": (edited(lambda data: data[:-1] + bytes([data[-1] ^ 1])), "checksum"),
    "renamed": (lambda path: path.rename(path.with_name(f"kv-{'0' * 64}.safetensors")), "its name is not"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_left_out_with_a_warning_and_written_anew(
    folder: StateFolder, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    damage, reason = DAMAGE[name]
    damage(saved_file(folder))
    [damaged] = folder.path.iterdir()
    assert usable(folder) == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(damaged) in caplog.text
    assert reason in caplog.text
    assert damaged.exists()
    assert not folder.touch(KEY, SYMBOLS)
    assert folder.write(KEY, SYMBOLS, STATE)
    assert len(usable(folder)) == 1


@pytest.mark.parametrize(
    "symbols", ["5", '"ab"', "[null]", "[[1,2]]", '[["x","y",1]]', "[1.5]", '{"a":1}', "[", "[" * 100_000]
)
def test_symbols_that_are_none_are_damage_though_their_name_fits(
    folder: StateFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, symbols: str
) -> None:
    monkeypatch.setattr("offset_runtime.state_file._symbols_json", lambda _: symbols)
    folder.write(KEY, SYMBOLS, STATE)
    assert folder.entries(KEY) == []
    assert "does not say what its state was read from" in caplog.text


@given(data=st.data(), mask=st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_a_changed_byte_anywhere_is_found(folder: StateFolder, data: st.DataObject, mask: int) -> None:
    for path in folder.path.iterdir():
        path.unlink()
    path = saved_file(folder)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= mask
    path.write_bytes(content)
    assert usable(folder) == []


def test_a_file_damaged_after_it_was_listed_is_not_read(folder: StateFolder, caplog: pytest.LogCaptureFixture) -> None:
    path = saved_file(folder)
    [entry] = folder.entries(KEY)
    path.write_bytes(path.read_bytes()[:-4])
    assert folder.read(entry) is None
    assert f"saved state {path} is not used" in caplog.text


def test_a_file_that_another_process_removed_is_no_damage(
    folder: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved_file(folder)
    [entry] = folder.entries(KEY)
    path.unlink()
    assert folder.read(entry) is None
    assert not caplog.records


def test_a_file_that_cannot_be_read_is_left_out(
    folder: StateFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As root every file can be read, so the refusal is made here.
    saved_file(folder)

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert folder.entries(KEY) == []
    assert "Permission denied" in caplog.text


def test_a_folder_that_is_gone_holds_nothing(folder: StateFolder, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(folder.path)
    assert folder.entries(KEY) == []
    assert "cannot be listed" in caplog.text


# The size limit


def test_the_files_used_longest_ago_make_room(tmp_path: Path) -> None:
    size = saved_file(StateFolder(tmp_path / "probe")).stat().st_size
    folder = StateFolder(tmp_path / "kv", max_bytes=3 * size)
    for token in range(4):
        assert folder.write(KEY, (token, *SYMBOLS[1:]), STATE)
    assert [symbols[0] for symbols in symbols_held(folder)] == [3, 2, 1]
    folder.touch(KEY, (1, *SYMBOLS[1:]))
    folder.write(KEY, (4, *SYMBOLS[1:]), STATE)
    assert [symbols[0] for symbols in symbols_held(folder)] == [4, 1, 3]
    # Written anew in its own place.
    folder.write(KEY, (3, *SYMBOLS[1:]), STATE)
    assert [symbols[0] for symbols in symbols_held(folder)] == [3, 4, 1]
    # Older than all that is there.
    assert not folder.write(KEY, (5, *SYMBOLS[1:]), STATE, used_ns=1)
    assert [symbols[0] for symbols in symbols_held(folder)] == [3, 4, 1]


def test_a_state_larger_than_the_limit_is_not_written_and_nothing_gives_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = saved_file(StateFolder(tmp_path / "kv")).stat().st_size
    folder = StateFolder(tmp_path / "kv", max_bytes=size)
    assert not folder.write(KEY, (7,), {"keys": np.zeros(2 * size, np.uint8)})
    assert symbols_held(folder) == [SYMBOLS]
    assert "the state of 1 tokens takes" in caplog.text
    assert "it is not saved" in caplog.text


def test_no_other_file_is_counted_listed_or_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved_file(StateFolder(tmp_path))
    size = path.stat().st_size
    others = [tmp_path / "news.safetensors", tmp_path / f"{path.name}.bak", tmp_path / "notes.txt"]
    for other in others:
        other.write_bytes(path.read_bytes())
    (tmp_path / f"kv-{'1' * 64}.safetensors").mkdir()
    link = tmp_path / f"kv-{'2' * 64}.safetensors"
    link.symlink_to(others[0])
    folder = StateFolder(tmp_path, max_bytes=size)
    assert symbols_held(folder) == [SYMBOLS]
    folder.write(KEY, (9, *SYMBOLS[1:]), STATE)
    assert not path.exists()
    assert all(other.exists() for other in (*others, link, tmp_path / f"kv-{'1' * 64}.safetensors"))
    assert not caplog.records


def test_what_an_interrupted_write_left_is_removed_after_an_hour(folder: StateFolder) -> None:
    path = saved_file(folder)
    old, new, other = (folder.path / f".{name}" for name in (f"{path.name}.0123abcd", f"{path.name}.89abcdef", "x.0"))
    for left in (old, new, other):
        left.write_bytes(b"part")
    for left in (old, other):
        os.utime(left, (0, 0))
    folder.write(KEY, (7,), STATE)
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)


# Several at once, and folders that are none


def test_writers_and_readers_at_once_never_meet_a_damaged_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = saved_file(StateFolder(tmp_path / "probe")).stat().st_size
    start = threading.Barrier(6)

    def write(seed: int) -> None:
        folder = StateFolder(tmp_path / "kv", max_bytes=3 * size)
        start.wait()
        for n in range(40):
            token = (seed * n) % 5
            folder.write(KEY, (token, *SYMBOLS[1:]), {"keys": STATE["keys"] + np.float32(token)})

    def read(_: int) -> None:
        folder = StateFolder(tmp_path / "kv")
        start.wait()
        for _ in range(60):
            for symbols, tensors in usable(folder):
                assert tensors["keys"][0, 0] == symbols[0]

    with ThreadPoolExecutor(6) as pool:
        for done in [*(pool.submit(write, n) for n in (1, 2, 3)), *(pool.submit(read, n) for n in range(3))]:
            done.result()
    assert not caplog.records
    assert len(list((tmp_path / "kv").iterdir())) <= 5


def test_a_path_where_no_folder_can_be_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").write_text("text")
    for path in (tmp_path / "plain", tmp_path / "plain" / "kv"):
        with pytest.raises(StateFolderError, match=f"cannot keep state in {path}: .*; give a folder"):
            StateFolder(path)
    # As root every folder can be written, so the refusal is made here.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StateFolderError, match="may not read and write there"):
        StateFolder(tmp_path)


def test_a_failed_write_is_an_error_and_leaves_no_part(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StateFolderError, match=r"cannot save state in .*: No space left on device"):
        folder.write(KEY, SYMBOLS, STATE)
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize("size", [-1, 1.5, None, "5"])
def test_a_limit_that_is_no_size_is_an_error(tmp_path: Path, size: Any) -> None:
    with pytest.raises(StateFolderError, match="is no size"):
        StateFolder(tmp_path, size)


def test_a_path_that_no_file_can_have_is_an_error() -> None:
    with pytest.raises(StateFolderError, match="cannot keep state"):
        StateFolder("a\0b")


def test_trimming_keeps_what_was_used_last_whatever_the_clock_says(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    for number in range(3):
        later = time.time_ns() + (number + 1) * 10**12
        folder.write(KEY, [number], {"state": np.zeros(100, np.float32)}, used_ns=later)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())

    StateFolder(tmp_path, size // 2).trim()

    assert symbols_held(folder) == [(2,)]


def test_a_pipe_under_the_name_of_a_state_is_no_state(folder: StateFolder) -> None:
    path = saved_file(folder)
    path.unlink()
    os.mkfifo(path)
    assert symbols_held(folder) == []
    assert not folder.touch(KEY, SYMBOLS)
