"""Which history a workflow has where it names none."""

from __future__ import annotations

from patterns import CHAIN, FORK, LOOP, workflow

from offset_runtime.graphs.history import history


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
