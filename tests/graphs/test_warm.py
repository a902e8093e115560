"""Reading ahead what agents begin with, and what their turns tell the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest
from waiting import until

from offset_runtime import OffsetRuntime
from offset_runtime.engine import Engine
from offset_runtime.graphs import AgentFinished, Workflow, build_graph, run_workflow, warm_up
from offset_runtime.request import Request, Reuse

AGENTS = {
    "writer": {"system_prompt": "Write the lead paragraph of an article.", "max_tokens": 4},
    "editor": {"system_prompt": "Shorten it to one sentence.", "max_tokens": 4},
}
EDGES = [
    {"source": "START", "target": "writer"},
    {"source": "writer", "target": "editor"},
    {"source": "editor", "target": "END"},
]


def workflow(**more: Any) -> Workflow:
    return Workflow.model_validate(
        {"version": 1, "name": "w", "model": {"base": "fake"}, "agents": AGENTS, "edges": EDGES, **more}
    )


def test_both_agents_find_their_system_prompts_read(fake_runtime: OffsetRuntime) -> None:
    tokens = warm_up(workflow(), fake_runtime)
    until(lambda: fake_runtime.engine.cache_figures.entries == 2)

    finished = list(run_workflow(build_graph(workflow(), runtime=fake_runtime), "hi"))
    turns = [event for event in finished if isinstance(event, AgentFinished)]

    assert sum(turn.usage.cached_tokens for turn in turns) >= tokens
    for turn in turns:
        assert turn.usage.cached_tokens > len(str(AGENTS[turn.agent]["system_prompt"]))
    assert finished[-1].cached_tokens == sum(turn.usage.cached_tokens for turn in turns)  # type: ignore[union-attr]


def test_there_is_nothing_to_read_ahead_of_a_shared_transcript(fake_runtime: OffsetRuntime) -> None:
    assert warm_up(workflow(history="shared"), fake_runtime) == 0


def test_an_unknown_domain_is_left_to_the_agents_turn(fake_runtime: OffsetRuntime) -> None:
    agents = {**AGENTS, "editor": {**AGENTS["editor"], "domain": "nowhere"}}
    assert warm_up(workflow(agents=agents), fake_runtime) > 0


@pytest.mark.parametrize(
    ("history", "told"),
    [
        ("separate", [Reuse("t1", "writer", {"editor": 1}), Reuse("t1", "editor", {})]),
        ("shared", [Reuse("t1", "transcript", {"transcript": 1}), Reuse("t1", "transcript", {})]),
    ],
)
def test_each_turn_tells_the_cache_who_reads_next(
    fake_runtime: OffsetRuntime, monkeypatch: pytest.MonkeyPatch, history: str, told: list[Reuse]
) -> None:
    seen: list[Reuse | None] = []
    submit = Engine.submit

    def noting(self: Engine, request: Request, sink: Any) -> Any:
        seen.append(request.reuse)
        return submit(self, request, sink)

    monkeypatch.setattr(Engine, "submit", noting)
    graph = build_graph(workflow(history=history), runtime=fake_runtime)

    list(run_workflow(graph, "hi", config={"configurable": {"thread_id": "t1"}}))

    assert seen == told
