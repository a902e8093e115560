"""Pictures of workflows."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from offset_runtime.errors import OffsetError
from offset_runtime.graphs import Workflow
from offset_runtime.graphs.drawing import draw, mermaid, save_drawing


@pytest.fixture
def newsroom() -> Workflow:
    return Workflow.model_validate(
        {
            "version": 1,
            "name": "the newsroom",
            "model": {"base": "fake"},
            "domains": {"news": "n", "legal": "l"},
            "agents": {
                "reporter": {"domain": "news"},
                "end-editor": {"domain": "legal"},
                "desk": {"handoffs": ["reporter"]},
            },
            "edges": [
                {"source": "START", "target": "reporter"},
                {
                    "source": "reporter",
                    "path": "reply_contains",
                    "targets": {'"x"': "end-editor", "bad": "end-editor", "*": "END"},
                },
                {"source": "end-editor", "target": ["desk", "end-editor"]},
            ],
        }
    )


def texts(workflow: Workflow) -> set[str]:
    [axes] = draw(workflow).axes
    return {text.get_text() for text in axes.texts}


def test_mermaid_has_every_agent_and_every_way_with_its_labels(newsroom: Workflow) -> None:
    assert (
        mermaid(newsroom)
        == """\
flowchart TD
    START([START])
    a0["reporter<br/><small>news</small>"]
    a1["end-editor<br/><small>legal</small>"]
    a2["desk"]
    END([END])
    START --> a0
    a0 -. "&quot;x&quot;, bad" .-> a1
    a0 -. "*" .-> END
    a1 --> a2
    a1 --> a1
    a2 -. "handoff" .-> a0
    a2 -. "handoff" .-> END
    classDef domain0 fill:#dbe9f6,stroke:#2f6fad,color:#222222
    class a0 domain0
    classDef domain1 fill:#fde4cf,stroke:#c8641b,color:#222222
    class a1 domain1
    classDef domain2 fill:#eeeeee,stroke:#6b6b6b,color:#222222
    class a2 domain2
"""
    )


def test_a_picture_shows_agents_domains_labels_and_the_base(newsroom: Workflow) -> None:
    expected = {"reporter", "end-editor", "desk", "news", "legal", '"x", bad', "*", "handoff", "START", "END"}
    assert expected <= texts(newsroom)
    assert {"the newsroom", "base model: fake"} <= texts(newsroom)


def test_an_image_is_written_without_a_network(
    newsroom: Workflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a drawing must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    save_drawing(newsroom, tmp_path / "w.png")
    save_drawing(newsroom, tmp_path / "w.svg")
    save_drawing(newsroom, tmp_path / "w.mmd")
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "w.svg").read_text()
    assert (tmp_path / "w.mmd").read_text() == mermaid(newsroom)


def test_another_suffix_is_refused_with_those_that_work(newsroom: Workflow, tmp_path: Path) -> None:
    with pytest.raises(OffsetError, match=r"suffix '.gif'; expected .mmd \(Mermaid text\), .png"):
        save_drawing(newsroom, tmp_path / "w.gif")


def test_a_file_that_cannot_be_written_is_named(newsroom: Workflow, tmp_path: Path) -> None:
    with pytest.raises(OffsetError, match=r"cannot write .*nowhere.*: No such file or directory"):
        save_drawing(newsroom, tmp_path / "nowhere" / "w.png")


def test_drawing_leaves_the_state_of_pyplot_alone(newsroom: Workflow) -> None:
    from matplotlib import pyplot

    draw(newsroom)
    assert pyplot.get_fignums() == []


def test_dollar_signs_are_no_formulas(newsroom: Workflow, tmp_path: Path) -> None:
    edge = newsroom.edges[1].model_copy(update={"targets": {"$5 or $6": "END"}})
    save_drawing(newsroom.model_copy(update={"edges": (newsroom.edges[0], edge)}), tmp_path / "w.png")
