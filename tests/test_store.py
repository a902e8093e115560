"""A directory of offsets by domain name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from offset_runtime import DomainOffset, OffsetStore
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import OffsetFileError, UnknownDomainError

MakeOffset = Callable[..., DomainOffset]

IDENTITY = FakeBackend().identity


def test_what_is_put_can_be_got(tmp_path: Path, make_offset: MakeOffset) -> None:
    store = OffsetStore(tmp_path / "offsets")
    assert store.domains() == []
    legal = make_offset(IDENTITY, domain="legal")
    assert store.put(legal) == tmp_path / "offsets" / "legal.safetensors"
    store.put(make_offset(IDENTITY, domain="code.v2", seed=1))
    assert store.domains() == ["code.v2", "legal"]
    assert store.get("legal") == legal
    assert store.get("code.v2").domain == "code.v2"


def test_putting_a_domain_again_replaces_it(tmp_path: Path, make_offset: MakeOffset) -> None:
    store = OffsetStore(tmp_path)
    store.put(make_offset(IDENTITY, domain="legal"))
    later = make_offset(IDENTITY, domain="legal", seed=1)
    store.put(later)
    assert store.get("legal") == later
    assert store.domains() == ["legal"]


def test_an_unknown_domain_is_an_error_that_names_the_nearest(tmp_path: Path, make_offset: MakeOffset) -> None:
    store = OffsetStore(tmp_path)
    with pytest.raises(UnknownDomainError, match="no domain is registered"):
        store.get("legal")
    store.put(make_offset(IDENTITY, domain="legal"))
    with pytest.raises(
        UnknownDomainError, match=r"unknown domain 'leagl' in .*known domains: legal; did you mean 'leg"
    ):
        store.get("leagl")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../legal", "a/b", "/legal", "a\0b", "-x", ".hidden", "a b", "x" * 65, "é"]
)
def test_names_unfit_for_a_file_never_reach_the_file_system(tmp_path: Path, make_offset: MakeOffset, name: str) -> None:
    store = OffsetStore(tmp_path)
    with pytest.raises(OffsetFileError, match="cannot name a file; use 1 to 64 letters"):
        store.get(name)
    if name:
        with pytest.raises(OffsetFileError, match="cannot name a file"):
            store.put(make_offset(IDENTITY, domain=name))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_holds_another_domain_is_refused(tmp_path: Path, make_offset: MakeOffset) -> None:
    store = OffsetStore(tmp_path)
    store.put(make_offset(IDENTITY, domain="legal")).rename(tmp_path / "news.safetensors")
    with pytest.raises(OffsetFileError, match=r"news\.safetensors holds domain 'legal'; rename the file to match"):
        store.get("news")


def test_folders_and_temporary_files_are_no_domains(tmp_path: Path, make_offset: MakeOffset) -> None:
    store = OffsetStore(tmp_path)
    store.put(make_offset(IDENTITY, domain="legal"))
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / ".legal.safetensors.1a2b").write_bytes(b"part")
    (tmp_path / ".hidden.safetensors").write_bytes(b"part")
    assert store.domains() == ["legal"]
    with pytest.raises(UnknownDomainError):
        store.get("folder")


def test_a_damaged_file_is_an_error_and_not_a_missing_domain(tmp_path: Path) -> None:
    (tmp_path / "legal.safetensors").write_bytes(b"part")
    with pytest.raises(OffsetFileError, match="truncated"):
        OffsetStore(tmp_path).get("legal")
