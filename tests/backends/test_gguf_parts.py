"""The files of a split model are known by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from offset_runtime.backends.gguf_parts import GgufParts


@pytest.mark.parametrize("name", ["model.gguf", "m-1-of-3.gguf", "m-00001-of-00003.txt"])
def test_a_file_by_itself_is_all_of_its_model(name: str) -> None:
    part = GgufParts.of(Path("a") / name)
    assert (part.number, part.count, part.paths()) == (1, 1, [Path("a") / name])


@pytest.mark.parametrize(("stem", "suffix"), [("m", ".gguf"), ("m[v1]*", ".GGUF")])
def test_any_part_names_all(stem: str, suffix: str) -> None:
    part = GgufParts.of(Path("a") / f"{stem}-00002-of-00003{suffix}")
    assert (part.number, part.count) == (2, 3)
    assert [path.name for path in part.paths()] == [f"{stem}-0000{n}-of-00003{suffix}" for n in (1, 2, 3)]
