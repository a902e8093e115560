"""Which way a workflow goes on."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from offset_runtime.errors import WorkflowError
from offset_runtime.graphs.routing import edge_router, handoff_instruction, handoff_route, path_function
from offset_runtime.graphs.schema import Agent, Edge


def edge(path: str, **targets: str) -> Edge:
    return Edge.model_validate({"source": "a", "path": path, "targets": targets})


def state(*replies: str) -> dict[str, Any]:
    return {"messages": [HumanMessage("refund?"), *map(AIMessage, replies)]}


def test_reply_contains_takes_the_first_key_in_order_whatever_its_case() -> None:
    route = edge_router(edge("reply_contains", refund="billing", bug="tech", **{"*": "END"}), Path())
    assert route(state("A BUG and then a Refund.")) == ["refund"]
    assert route(state("A BUG.")) == ["bug"]


def test_reply_contains_reads_only_the_last_reply() -> None:
    route = edge_router(edge("reply_contains", refund="billing", **{"*": "END"}), Path())
    assert route(state("a refund", "thank you")) == ["*"]


def test_reply_contains_does_not_take_a_star_in_the_text_for_its_default() -> None:
    route = edge_router(edge("reply_contains", **{"*": "END", "bug": "tech"}), Path())
    assert route(state("** a bug **")) == ["bug"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of routes beside the workflow."""
    (tmp_path / "my_routes.py").write_text(
        "def one(state):\n    return state['messages'][-1].text\ndef two(state):\n    return ['x', 'y']\n"
    )
    monkeypatch.delitem(sys.modules, "my_routes", raising=False)
    return tmp_path


def test_a_path_function_is_called_with_the_state(module: Path) -> None:
    assert edge_router(edge("my_routes:one", x="a", y="b"), module)(state("y")) == ["y"]


def test_a_path_function_may_return_several_keys(module: Path) -> None:
    assert edge_router(edge("my_routes:two", x="a", y="b"), module)(state("")) == ["x", "y"]


def test_a_key_that_is_none_is_named_with_the_nearest(module: Path) -> None:
    with pytest.raises(WorkflowError) as caught:
        edge_router(edge("my_routes:one", refund="a", bug="b"), module)(state("refnd"))
    assert str(caught.value) == (
        "path 'my_routes:one' of the edge from 'a' returned 'refnd'; expected one of its targets: refund, bug; "
        "did you mean 'refund'?"
    )


def test_the_search_path_is_left_as_it_was(module: Path) -> None:
    before = list(sys.path)
    path_function("my_routes:one", module)
    assert sys.path == before


def test_a_module_of_the_same_name_from_elsewhere_is_not_taken_silently(module: Path, tmp_path: Path) -> None:
    path_function("my_routes:one", module)
    other = tmp_path / "other"
    other.mkdir()
    (other / "my_routes.py").write_text("def one(state):\n    return 'z'\n")
    with pytest.raises(WorkflowError, match=r"was already imported from .*give the file another name"):
        path_function("my_routes:one", other)


@pytest.mark.parametrize(
    "reply",
    [
        "Not mine.\nhandoff: billing",
        "Not mine.\n\nHandoff: Billing.",
        "**handoff: billing**",
        "handoff: tech\nNo, wait.\nhandoff: `billing`\n",
        "- handoff: <billing>",
        "_handoff: billing_",
        "**handoff: billing-**",
        '"handoff: billing"',
        "\u201chandoff: billing\u201d",
        "1. handoff: billing",
        "(2) **Handoff:** the billing agent",
        "handoff\uff1abilling",
        "handoff: the **billing**",
    ],
)
def test_a_handoff_line_is_read_as_small_models_write_it(reply: str) -> None:
    assert handoff_route("desk", ["billing", "tech"])(reply) == "billing"


@pytest.mark.parametrize("reply", ["", "All done.", "I could do a handoff: no.", "handoff:"])
def test_without_a_handoff_line_the_workflow_ends(reply: str) -> None:
    assert handoff_route("desk", ["billing"])(reply) == "END"


def test_an_unknown_handoff_ends_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert handoff_route("desk", ["billing", "tech"])("handoff: bill") == "END"
    assert "agent 'desk' handed over to 'bill', which is none of its handoffs (billing, tech)" in caplog.text


def test_the_instruction_names_the_agents_and_what_they_do() -> None:
    agents = {"billing": Agent(description="refunds"), "tech": Agent()}
    assert handoff_instruction(agents, ["billing", "tech", "END"]) == (
        'To pass the conversation on, end your reply with a line "handoff: NAME", '
        "where NAME is one of: billing (refunds), tech, END."
    )


@pytest.mark.parametrize(
    ("reply", "key"),
    [
        ("a Refund, please", "refund"),
        ("refunds", "*"),
        ("prerefund", "*"),
        ("a tax return", "tax return"),
        ("in C++.", "c++"),
        ("\u6211\u8981\u9000\u6b3e\u4e86", "\u9000\u6b3e"),
    ],
)
def test_reply_contains_looks_for_whole_words(reply: str, key: str) -> None:
    keys = dict.fromkeys(("refund", "tax return", "c++", "\u9000\u6b3e", "*"), "END")
    assert edge_router(edge("reply_contains", **keys), Path())(state(reply)) == [key]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("state['nope']", " failed in {folder}/my_routes.py, line 2: KeyError('nope'); correct the function"),
        ("__import__('sys').exit(3)", " failed in {folder}/my_routes.py, line 2: SystemExit(3); correct the function"),
        ("{}", " returned {{}}; expected one of its targets: x"),
        ("[[]]", " returned []; expected one of its targets: x"),
        ("None", " returned None; expected one of its targets: x"),
        ("[]", " returned no key; expected one or more of its targets: x"),
    ],
)
def test_a_path_function_that_fails_is_named_with_its_place(module: Path, body: str, expected: str) -> None:
    (module / "my_routes.py").write_text(f"def one(state):\n    return {body}\n")
    route = edge_router(edge("my_routes:one", x="a"), module, where="w.yaml, line 9")
    with pytest.raises(WorkflowError) as caught:
        route(state("x"))
    start = "w.yaml, line 9: path 'my_routes:one' of the edge from 'a'"
    assert str(caught.value) == start + expected.format(folder=module)


def test_a_name_that_ends_in_a_sign_is_taken_as_it_is() -> None:
    assert handoff_route("desk", ["desk_", "desk"])("handoff: desk_") == "desk_"


@pytest.mark.parametrize("reply", ["I hand off to billing.", "Hand-off: billing", "My handoff: billing"])
def test_what_is_nearly_a_handoff_is_logged(reply: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert handoff_route("desk", ["billing"])(f"Well.\n{reply}\n") == "END"
    assert f"agent 'desk' wrote {reply!r}, which is no line 'handoff: NAME'; the workflow ends here" in caplog.text


def test_a_reply_without_a_handoff_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        handoff_route("desk", ["billing"])("All done; off to bed.")
    assert not caplog.records
