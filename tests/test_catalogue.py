"""What is said of offset files: every one is read, and every problem reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from offset_runtime import DomainOffset, OffsetStore
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.catalogue import (
    check_base,
    details,
    details_table,
    list_table,
    read_files,
    read_store,
    summary,
    verify_table,
)
from offset_runtime.errors import OffsetFileError

MakeOffset = Callable[..., DomainOffset]

METRICS = {"gain_percent": 17.25, "retention": {"kl": 0.031}, "documents": 12}


@pytest.fixture
def store(tmp_path: Path, make_offset: MakeOffset) -> OffsetStore:
    """A store with a trained offset, one without metrics, a damaged file and a renamed one."""
    identity = FakeBackend().identity
    store = OffsetStore(tmp_path / "offsets")
    trained = replace(make_offset(identity, "legal"), metrics=METRICS, training={"steps": 36})
    store.put(trained)
    store.put(make_offset(identity, "code", positions=5, anchor="sequence", prompt_format="raw"))
    (store.root / "broken.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    make_offset(identity, "news").save(store.root / "renamed.safetensors")
    return store


def shown(renderable: RenderableType, width: int = 160) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_every_file_of_a_store_is_an_entry_usable_or_not(store: OffsetStore) -> None:
    entries = {entry.path.stem: entry for entry in read_store(store)}
    assert list(entries) == ["broken", "code", "legal", "renamed"]
    assert entries["legal"].problem is None
    assert "without offset metadata" in (entries["broken"].problem or "")
    assert "holds domain 'news'" in (entries["renamed"].problem or "")


def test_a_name_unfit_for_a_domain_is_a_problem_of_that_file_only(store: OffsetStore) -> None:
    (store.root / "legal.safetensors").rename(store.root / "my legal.safetensors")
    entries = {entry.path.stem: entry for entry in read_store(store)}
    assert "cannot name a file" in (entries["my legal"].problem or "")
    assert entries["code"].problem is None


def test_an_empty_and_a_missing_store_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(OffsetFileError, match="there is no such folder"):
        read_store(OffsetStore(tmp_path / "nowhere"))
    with pytest.raises(OffsetFileError, match=r"no offsets in .*; train one"):
        read_store(OffsetStore(tmp_path))


def test_the_summary_reads_gain_and_retention_from_the_metrics(store: OffsetStore) -> None:
    path = store.path("legal")
    found = summary(store.get("legal"), path)
    assert (found["gain_percent"], found["retention_kl"]) == (17.25, 0.031)
    assert (found["positions"], found["anchor"], found["prompt_format"]) == (3, "turn", "chat")
    assert found["bytes"] == path.stat().st_size
    assert found["digest"] == store.get("legal").digest


@pytest.mark.parametrize("metrics", [{}, {"retention": None}, {"gain_percent": "much", "retention": 3}])
def test_an_offset_without_usable_metrics_is_listed_without_figures(
    tmp_path: Path, make_offset: MakeOffset, metrics: dict[str, object]
) -> None:
    offset = replace(make_offset(FakeBackend().identity), metrics=metrics)
    found = summary(offset, offset.save(tmp_path / "x.safetensors"))
    assert (found["gain_percent"], found["retention_kl"]) == (None, None)


def test_the_list_shows_every_file(store: OffsetStore) -> None:
    table = shown(list_table(read_store(store)))
    for text in ("legal", "+17.2", "0.031", "code", "sequence", "raw", "cannot be read", store.get("code").digest[:12]):
        assert text in table


def test_details_hold_every_field(store: OffsetStore) -> None:
    found = details(store.get("legal"), store.path("legal"))
    assert found["metrics"] == METRICS
    assert found["training"] == {"steps": 36}
    assert found["base"]["architecture"] == "fake"
    assert len(found["row_norms"]) == 3
    table = shown(details_table(found))
    for text in ("training.steps", "metrics.retention.kl", "0.031", "base.tokenizer_digest", "row_norms"):
        assert text in table


@pytest.mark.parametrize("width", [80, 55])
def test_details_never_cut_a_key(width: int) -> None:
    figures = {"reply_perplexity_without": 8.25, "reply_perplexity_with": 9.5}
    table = shown(details_table({"path": "/x[y]" * 30, "metrics": {"retention": figures}}), width)
    for key, value in figures.items():
        assert re.search(rf"metrics\.retention\.{key} +{value}\b", table)


def test_details_fold_keys_where_the_terminal_is_narrower() -> None:
    table = shown(details_table({"reply_perplexity_without": 8.25, "reply_perplexity_with": 9.5}), 20)
    assert "…" not in table
    assert re.sub(r"[\s\d.]", "", table) == "reply_perplexity_withoutreply_perplexity_with"


def test_files_are_checked_against_a_base_model(store: OffsetStore, make_offset: MakeOffset) -> None:
    identity = FakeBackend().identity
    foreign = make_offset(identity.model_copy(update={"architecture": "llama"}), "news")
    path = foreign.save(store.root / "news.safetensors")
    good, bad, broken = check_base(read_files([store.path("legal"), path, store.root / "broken.safetensors"]), identity)
    assert good.problem is None
    assert "another base model: architecture llama" in (bad.problem or "")
    assert "without offset metadata" in (broken.problem or "")
    table = shown(verify_table([good, bad, broken]))
    assert table.count("failed") == 2
    assert "domain legal" in table
    assert bad.as_json() == {"path": str(path), "domain": "news", "ok": False, "problem": bad.problem}
