"""Which history a workflow has where it names none."""

from __future__ import annotations

from offset_runtime.graphs.history import history
from offset_runtime.graphs.schema import Workflow


def workflow(edges: list[dict[str, object]], **agents: dict[str, object]) -> Workflow:
    return Workflow.model_validate(
        {"version": 1, "name": "w", "model": {"base": "fake"}, "agents": agents, "edges": edges}
    )


CHAIN: list[dict[str, object]] = [
    {"source": "START", "target": "a"},
    {"source": "a", "target": "b"},
    {"source": "b", "target": "END"},
]
FORK: list[dict[str, object]] = [
    {"source": "START", "target": ["a", "b"]},
    {"source": ["a", "b"], "target": "c"},
    {"source": "c", "target": "END"},
]
LOOP: list[dict[str, object]] = [
    {"source": "START", "target": "a"},
    {"source": "a", "target": "b"},
    {"source": "b", "path": "reply_contains", "targets": {"again": "a", "*": "END"}},
]


def test_agents_one_after_another_have_separate_histories_and_other_patterns_share_one() -> None:
    assert history(workflow(CHAIN, a={}, b={})) == "separate"
    assert history(workflow(FORK, a={}, b={}, c={})) == "shared"
    assert history(workflow(LOOP, a={}, b={})) == "shared"
    handoff = workflow(
        [{"source": "START", "target": "a"}, {"source": "b", "target": "END"}], a={"handoffs": ["b"]}, b={}
    )
    assert history(handoff) == "shared"


def test_a_history_that_the_workflow_names_is_taken_and_one_that_only_one_agent_reads_is_not_shared() -> None:
    assert history(workflow(CHAIN, a={}, b={}).model_copy(update={"history": "verbatim"})) == "verbatim"
    apart = {"reads": ["START"]}
    assert history(workflow(FORK, a=apart, b=apart, c={})) == "separate"
