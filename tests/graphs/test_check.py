"""Checks beyond syntax: what is reported, where, and with which nearest name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offset_runtime import OffsetRuntime
from offset_runtime.errors import WorkflowError
from offset_runtime.graphs import Workflow, load_workflow
from offset_runtime.graphs.check import find_model_problems, find_problems
from offset_runtime.graphs.loader import read_workflow

Write = Callable[[str], Path]
SaveOffset = Callable[..., Path]

HEAD = "version: 1\nname: newsroom\nmodel: {base: fake}\n"  # lines 1 to 3


def problems(write_workflow: Write, body: str, *, files: bool = True) -> list[str]:
    path = write_workflow(HEAD + body)
    found = [str(finding) for finding in find_problems(read_workflow(path), files=files)]
    return [text.replace(f"{path}, ", "") for text in found]


def test_a_sound_workflow_has_no_problems(write_workflow: Write, save_offset: SaveOffset) -> None:
    save_offset("news")
    body = """\
domains: {news: offsets/news.safetensors}
agents:
  a: {domain: news}
  b: {reads: [a, START]}
edges:
  - {from: __start__, to: a}
  - {source: a, path: reply_contains, targets: {again: a, "*": b}}
  - {source: b, target: __end__}
"""
    assert problems(write_workflow, body) == []


def test_an_undeclared_domain_is_named_with_the_nearest_one(write_workflow: Write, save_offset: SaveOffset) -> None:
    save_offset("news")
    body = """\
domains: {news: offsets/news.safetensors}
agents:
  a: {domain: newz}
edges: [{source: START, target: a}, {source: a, target: END}]
"""
    expected = "line 6: unknown domain 'newz' of agent 'a'; declared domains: news; did you mean 'news'?"
    assert problems(write_workflow, body) == [expected]


def test_a_domain_may_come_from_the_store(write_workflow: Write, save_offset: SaveOffset) -> None:
    save_offset("legal")
    body = """\
store: offsets
agents:
  a: {domain: legal}
  b: {domain: legl}
edges: [{source: START, target: [a, b]}, {source: [a, b], target: END}]
"""
    expected = "line 7: unknown domain 'legl' of agent 'b'; declared domains: legal; did you mean 'legal'?"
    assert problems(write_workflow, body) == [expected]


def test_a_missing_store_is_named(write_workflow: Write, tmp_path: Path) -> None:
    body = "store: nowhere\nagents:\n  a: {}\nedges: [{source: START, target: a}, {source: a, target: END}]\n"
    assert problems(write_workflow, body) == [
        f"line 4: no folder {tmp_path / 'nowhere'}; expected a folder of offset files"
    ]


def test_a_missing_offset_file_is_named(write_workflow: Write, tmp_path: Path) -> None:
    body = """\
domains:
  news: offsets/news.safetensors
agents:
  a: {domain: news}
edges: [{source: START, target: a}, {source: a, target: END}]
"""
    [problem] = problems(write_workflow, body)
    assert problem.startswith(f"line 5: domain 'news': no offset file at {tmp_path / 'offsets' / 'news.safetensors'}")
    assert "offset-runtime train" in problem
    assert problems(write_workflow, body, files=False) == []


@pytest.mark.parametrize("place", ["domains: {news: offsets/news.safetensors}", "store: offsets"])
def test_an_offset_of_another_prompt_format_is_named(
    write_workflow: Write, save_offset: SaveOffset, place: str
) -> None:
    save_offset("news", prompt_format="raw")
    body = (
        f"{place}\nagents:\n  a: {{domain: news}}\nedges: [{{source: START, target: a}}, {{source: a, target: END}}]\n"
    )
    [problem] = problems(write_workflow, body)
    assert problem.endswith(
        "the offset of domain 'news' was trained in prompt format 'raw', but agents chat; "
        "train it with 'offset-runtime train news --format chat'"
    )


def test_an_offset_of_another_base_is_found_once_the_base_is_loaded(
    write_workflow: Write, save_offset: SaveOffset, fake_runtime: OffsetRuntime
) -> None:
    other = fake_runtime.backend.identity.model_copy(update={"architecture": "llama"})
    save_offset("news")
    save_offset("legal", identity=other)
    body = """\
domains:
  news: offsets/news.safetensors
  legal: offsets/legal.safetensors
agents:
  a: {domain: news}
edges: [{source: START, target: a}, {source: a, target: END}]
"""
    path = write_workflow(HEAD + body)
    [finding] = find_model_problems(load_workflow(path), fake_runtime)
    assert str(finding).startswith(
        f"{path}, line 6: the offset of domain 'legal' was made for another base model: "
        "architecture llama (this model: fake)"
    )


AGENTS = "agents:\n  writer: {}\n  editor: {}\nedges:\n"  # lines 4 to 7; edges begin in line 8


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        (
            ["{source: START, target: writer}", "{source: writer, target: editer}", "{source: editor, target: END}"],
            [
                "line 9: edge to unknown agent 'editer'; expected one of writer, editor, END; did you mean 'editor'?",
            ],
        ),
        (
            [
                "{source: START, target: writer}",
                "{source: writr, target: editor}",
                "{source: writer, target: editor}",
                "{source: editor, target: END}",
            ],
            ["line 9: edge from unknown agent 'writr'; expected one of writer, editor, START; did you mean 'writer'?"],
        ),
        (
            ["{source: START, target: writer}", "{source: [writer, editor], target: END}"],
            ["line 6: agent 'editor' is unreachable: no way from START leads to it"],
        ),
        (
            ["{source: START, target: [writer, editor]}", "{source: writer, target: END}"],
            ["line 6: agent 'editor' has no outgoing edge; add {source: editor, target: END} or handoffs"],
        ),
        (
            ["{source: writer, target: editor}", "{source: editor, target: END}"],
            ["line 7: no edge starts at START, so nothing would run; add {source: START, target: writer}"],
        ),
        (
            [
                "{source: START, target: [writer, editor]}",
                "{source: START, target: editor}",
                "{source: [writer, editor], target: END}",
            ],
            ["line 9: the edge from START to editor is there twice (first: line 8)"],
        ),
        (
            ["{source: START, target: [writer, editor]}", "{source: [writer, editor], target: [END, START]}"],
            ["line 9: START cannot be the target of an edge; name the first agent to start again"],
        ),
        (
            [
                "{source: START, target: writer}",
                "{source: [START, writer], target: editor}",
                "{source: editor, target: END}",
            ],
            ["line 9: START cannot be waited for together with agents; leave it out of the list"],
        ),
        (
            [
                "{source: START, target: writer}",
                "{source: writer, target: editor}",
                "{source: editor, path: reply_contains, targets: {again: writer}}",
            ],
            [
                "line 10: 'reply_contains' needs a target for '*', taken where no other key is found in the reply",
                "line 9: writer -> editor -> writer is a cycle without an exit: no run could leave it. Add an edge "
                "with 'path' and 'targets' (or handoffs) that may lead to END or to an agent outside the cycle",
            ],
        ),
    ],
    ids=[
        "unknown target",
        "unknown source",
        "unreachable",
        "no way on",
        "no start",
        "twice",
        "to START",
        "waiting for START",
        "no exit",
    ],
)
def test_edges(write_workflow: Write, edges: list[str], expected: list[str]) -> None:
    body = AGENTS + "".join(f"  - {edge}\n" for edge in edges)
    found = problems(write_workflow, body)
    path = write_workflow(HEAD + body)
    assert sorted(text.replace(f"{path}, ", "") for text in found) == sorted(expected)


def test_a_cycle_all_of_whose_edges_are_always_taken_has_no_exit(write_workflow: Write) -> None:
    # writer goes to END too, but each time also round again: such a run would never end.
    edges = "  - {source: START, target: writer}\n  - {source: writer, target: [editor, END]}\n"
    [problem] = problems(write_workflow, AGENTS + edges + "  - {source: editor, target: writer}\n")
    assert problem.startswith("line 9: writer -> editor -> writer is a cycle without an exit")


def test_reads_and_handoffs_name_agents(write_workflow: Write) -> None:
    body = """\
agents:
  desk: {handoffs: [lawyr, END]}
  lawyer: {reads: [dsk, STRAT]}
edges: [{source: START, target: desk}, {source: lawyer, target: END}]
"""
    assert problems(write_workflow, body) == [
        "line 5: handoff of agent 'desk' to unknown agent 'lawyr'; expected one of desk, lawyer, END; "
        "did you mean 'lawyer'?",
        "line 6: agent 'lawyer' reads unknown agent 'dsk'; expected one of desk, lawyer, START; did you mean 'desk'?",
        "line 6: agent 'lawyer' reads unknown agent 'STRAT'; expected one of desk, lawyer, START; "
        "did you mean 'START'?",
    ]


def test_an_agent_has_handoffs_or_edges_but_not_both(write_workflow: Write) -> None:
    body = """\
agents:
  desk: {handoffs: [lawyer]}
  lawyer: {}
edges: [{source: START, target: desk}, {source: [desk, lawyer], target: END}]
"""
    [problem] = problems(write_workflow, body)
    assert problem.startswith("line 5: agent 'desk' has handoffs and an outgoing edge; it needs one or the other")


def test_an_agent_cannot_be_called_like_the_ends(write_workflow: Write) -> None:
    body = "agents:\n  END: {}\nedges: [{source: START, target: END}]\n"
    assert problems(write_workflow, body)[0] == (
        "line 5: END is the name of the workflow's own end; give the agent another name"
    )


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("routes", "path 'routes' is no 'module:function' and not 'reply_contains'"),
        ("rutes:pick", "no module 'rutes', neither in {folder} nor among the installed ones; did you mean 'routes'?"),
        ("routes:pik", "path 'routes:pik': module 'routes' has no function 'pik'; did you mean 'pick'?"),
        ("routes:number", "path 'routes:number' is not an ordinary function"),
        ("routes:later", "path 'routes:later' is not an ordinary function"),
        ("routes:none", "path 'routes:none': none() cannot be called with one argument; expected a function that"),
        ("routes:two", "path 'routes:two': two(state, more) cannot be called with one argument"),
        ("leaving:pick", "path 'leaving:pick': importing module 'leaving' failed: SystemExit(3)"),
        ("broken:pick", "path 'broken:pick': importing module 'broken' failed: ZeroDivisionError"),
        ("needy:pick", "path 'needy:pick': module 'needy' needs 'no_such_thing'"),
    ],
)
def test_a_bad_path_is_named(
    write_workflow: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, expected: str
) -> None:
    for module in ("routes", "broken", "needy", "leaving"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "routes.py").write_text(
        "number = 3\ndef pick(state):\n    return 'x'\nasync def later(state):\n    return 'x'\n"
        "def none():\n    return 'x'\ndef two(state, more):\n    return 'x'\n"
    )
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "needy.py").write_text("import no_such_thing\n")
    edge = f"  - {{source: writer, path: '{reference}', targets: {{x: editor}}}}\n"
    start = "  - {source: START, target: writer}\n  - {source: editor, target: END}\n"
    [problem] = problems(write_workflow, AGENTS + start + edge)
    assert problem.startswith("line 10: ")
    assert expected.format(folder=tmp_path) in problem


def test_everything_wrong_is_reported_at_once_in_the_order_of_the_file(write_workflow: Write) -> None:
    body = """\
agents:
  a: {domain: news}
  b: {}
  c: {reads: [d]}
edges:
  - {source: START, target: a}
  - {source: a, target: e}
  - {source: c, target: END}
"""
    path = write_workflow(HEAD + body)
    with pytest.raises(WorkflowError) as caught:
        load_workflow(path)
    lines = [line.removeprefix(f"{path}, line ").partition(":")[0] for line in str(caught.value).split("\n")]
    assert lines == ["5", "6", "6", "7", "7", "10"]


def test_a_workflow_made_in_python_is_checked_too() -> None:
    made: dict[str, Any] = {
        "version": 1,
        "name": "x",
        "model": {"base": "fake"},
        "agents": {"a": {}},
        "edges": [{"source": "START", "target": "b"}],
    }
    found = [str(finding) for finding in find_problems(Workflow.model_validate(made), files=False)]
    assert "workflow['edges'][0]['target']: edge to unknown agent 'b'; expected one of a, END" in found


THREE = "agents:\n  a: {}\n  b: {}\n  c: {}\n"  # lines 4 to 7; edges begin in line 9
SPLIT = "  - {source: START, path: reply_contains, targets: {x: a, '*': b}}\n"
JOIN = "  - {source: [a, b], target: c}\n"
LAST = "  - {source: c, target: END}\n"


def test_a_join_of_which_a_split_runs_only_one_source_is_reported(write_workflow: Write) -> None:
    assert problems(write_workflow, THREE + "edges:\n" + SPLIT + JOIN + LAST) == [
        "line 10: c waits for a and b, but START goes on to only one of its targets, so they never all run and c "
        "never would; write one edge for each: {source: a, target: c}, {source: b, target: c}"
    ]


def test_a_join_behind_handoffs_is_reported(write_workflow: Write) -> None:
    body = THREE + "  d: {handoffs: [a, b]}\nedges:\n  - {source: START, target: d}\n" + JOIN + LAST
    [problem] = problems(write_workflow, body)
    assert problem.startswith("line 11: c waits for a and b, but d goes on to only one")


@pytest.mark.parametrize(
    "edges",
    [
        "  - {source: START, target: [a, b]}\n" + JOIN + LAST,
        # b runs after a too.
        SPLIT + "  - {source: a, target: b}\n" + JOIN + LAST,
        # Whichever runs, END follows.
        SPLIT + "  - {source: [a, b], target: END}\n  - {source: START, target: c}\n" + LAST,
        # The choice is made again, and may be another.
        "  - {source: START, target: c}\n  - {source: c, path: reply_contains, targets: {x: a, y: b, '*': END}}\n"
        "  - {source: [a, b], target: d}\n  - {source: [a], target: c}\n  - {source: b, target: c}\n"
        "  - {source: d, target: END}\n",
    ],
)
def test_a_join_that_may_run_is_no_problem(write_workflow: Write, edges: str) -> None:
    agents = THREE + ("  d: {}\n" if "target: d" in edges else "")
    assert problems(write_workflow, agents + "edges:\n" + edges) == []


def test_a_join_behind_a_path_function_may_run_as_that_may_return_both(
    write_workflow: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "routes", raising=False)
    (tmp_path / "routes.py").write_text("def pick(state):\n    return ['x', 'y']\n")
    split = "edges:\n  - {source: START, path: 'routes:pick', targets: {x: a, y: b}}\n"
    assert problems(write_workflow, THREE + split + JOIN + LAST) == []


def test_an_empty_key_of_reply_contains_is_refused(write_workflow: Write) -> None:
    edges = (
        "  - {source: START, target: writer}\n  - {source: editor, target: END}\n"
        "  - {source: writer, path: reply_contains, targets: {'': editor, '*': END}}\n"
    )
    assert problems(write_workflow, AGENTS + edges) == [
        "line 10: 'reply_contains' has a target with an empty key; name the words to look for, or '*'"
    ]


def test_max_tokens_that_fill_the_context_are_found_once_the_base_is_loaded(
    write_workflow: Write, fake_runtime: OffsetRuntime
) -> None:
    body = """\
agents:
  a: {max_tokens: 4095}
  b:
    max_tokens: 4096
edges: [{source: START, target: a}, {source: a, target: b}, {source: b, target: END}]
"""
    path = write_workflow(HEAD + body)
    [finding] = find_model_problems(load_workflow(path), fake_runtime)
    assert str(finding) == (
        f"{path}, line 7: max_tokens of agent 'b' is 4096, which leaves no room for a prompt in the context of "
        "4096 tokens of fake; lower it"
    )
