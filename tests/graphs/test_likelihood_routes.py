"""Edges that send a message to the domain under whose offset it is likeliest."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from rich.console import Console
from rich.text import Text

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset, DomainRouter
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import WorkflowError
from offset_runtime.graphs import (
    AgentFinished,
    RouteChosen,
    build_graph,
    load_workflow,
    run_workflow,
    show_events,
    sqlite_checkpoints,
)
from offset_runtime.graphs.check import find_problems
from offset_runtime.graphs.drawing import mermaid
from offset_runtime.graphs.loader import read_workflow

Write = Callable[[str], Path]

HEAD = """
version: 1
name: desk
model: {base: fake}
domains: {news: offsets/news.safetensors, law: offsets/law.safetensors}
agents:
  reporter: {domain: news, max_tokens: 4}
  lawyer: {domain: law, max_tokens: 4}
  editor: {max_tokens: 4}
edges:
  - {source: reporter, target: END}
  - {source: lawyer, target: END}
  - {source: editor, target: END}
"""
ROUTE = "  - {source: START, route: likelihood, targets: {news: reporter, law: lawyer, '*': editor}%s}\n"


@pytest.fixture
def runtime() -> Iterator[OffsetRuntime]:
    with OffsetRuntime(FakeBackend()) as opened:
        yield opened


@pytest.fixture
def desk(write_workflow: Write, save_offset: Callable[..., Path]) -> Callable[..., Path]:
    """Return the function that writes the workflow with an edge that routes from START."""
    for seed, domain in enumerate(["news", "law"]):
        save_offset(domain, seed=seed)
    return lambda more="", edge=ROUTE: write_workflow(HEAD + (edge % more if "%s" in edge else edge))


def problems(path: Path) -> list[str]:
    return [str(p).replace(f"{path}, ", "") for p in find_problems(read_workflow(path), files=True)]


def test_a_message_goes_to_the_agent_of_its_domain(desk: Any, runtime: OffsetRuntime) -> None:
    path = desk()
    graph = build_graph(load_workflow(path), runtime=runtime)
    model = ChatOffset(model="fake", store=path.parent / "offsets", runtime=runtime)
    router = DomainRouter(model, ["news", "law"])
    went = set()
    for text in (f"message {number}" for number in range(12)):
        events = list(run_workflow(graph, text))
        [chosen] = [event for event in events if isinstance(event, RouteChosen)]
        [turn] = [event for event in events if isinstance(event, AgentFinished)]
        scores = {score.domain: score.difference_per_token for score in router.scores(text)}
        assert chosen == RouteChosen("START", router.route(text), pytest.approx(scores))
        assert turn.agent == {"news": "reporter", "law": "lawyer"}[str(chosen.domain)]
        went.add(turn.agent)
    assert went == {"reporter", "lawyer"}, "among twelve messages are some of each domain"


def test_below_the_margin_it_goes_to_the_star(desk: Any, runtime: OffsetRuntime) -> None:
    graph = build_graph(load_workflow(desk(", margin: 1000")), runtime=runtime)
    state: Any = asyncio.run(graph.ainvoke({"messages": [HumanMessage("hello")]}))
    assert [message.name for message in state["messages"]] == [None, "editor"]
    assert state["routes"]["START"]["route"] is None
    assert sorted(state["routes"]["START"]["scores"]) == ["law", "news"]


def test_a_reply_is_routed_too_and_each_route_keeps_its_scores(desk: Any, runtime: OffsetRuntime) -> None:
    path = desk(", margin: 1000")
    text = path.read_text().replace("agents:", "agents:\n  chief: {max_tokens: 6}")
    text = text.replace("editor, target: END", "editor, target: chief")
    path.write_text(text + (ROUTE % "").replace("START", "chief"))
    turns = list(run_workflow(build_graph(load_workflow(path), runtime=runtime), "hello"))
    routes = [e.source for e in turns if isinstance(e, RouteChosen)]
    agents = [e.agent for e in turns if isinstance(e, AgentFinished)]
    assert routes == ["START", "chief"]
    assert agents[:2] == ["editor", "chief"]
    assert agents[2] in ("reporter", "lawyer")


def test_a_workflow_without_routes_has_messages_alone_in_its_state(
    write_workflow: Write, runtime: OffsetRuntime
) -> None:
    path = write_workflow("""
        version: 1
        name: plain
        model: {base: fake}
        agents: {a: {max_tokens: 2}}
        edges: [{source: START, target: a}, {source: a, target: END}]
    """)
    assert set(build_graph(load_workflow(path), runtime=runtime).invoke({"messages": [HumanMessage("x")]})) == {
        "messages"
    }


def test_the_scores_are_in_the_checkpoints(desk: Any, runtime: OffsetRuntime, tmp_path: Path) -> None:
    config: Any = {"configurable": {"thread_id": "1"}}
    with sqlite_checkpoints(tmp_path / "runs.sqlite") as saver:
        graph = build_graph(load_workflow(desk()), checkpointer=saver, runtime=runtime)
        events = list(run_workflow(graph, "hello", config=config))
        [chosen] = [event for event in events if isinstance(event, RouteChosen)]
        assert graph.get_state(config).values["routes"]["START"] == {"route": chosen.domain, "scores": chosen.scores}


def test_the_route_is_shown(desk: Any) -> None:
    events = [RouteChosen("START", "news", {"news": 0.5, "law": -0.25}), RouteChosen("START", None, {})]
    for as_json, terminal in ((False, False), (False, True), (True, False)):
        file = io.StringIO()
        show_events(events, console=Console(file=file, width=100, force_terminal=terminal), as_json=as_json)
        shown = file.getvalue()
        if as_json:
            first = {
                "event": "route_chosen",
                "source": "START",
                "domain": "news",
                "scores": {"news": 0.5, "law": -0.25},
            }
            assert json.loads(shown.splitlines()[0]) == first
        else:
            assert "route from START: news (news +0.50, law -0.25)" in plain(shown)
            assert "route from START: unsure\n" in plain(shown)


def plain(shown: str) -> str:
    return Text.from_ansi(shown).plain.replace(" \n", "\n")


def test_the_ways_bear_the_domains_in_the_drawing(desk: Any) -> None:
    drawn = mermaid(load_workflow(desk()))
    assert 'START -. "news" .-> a0' in drawn
    assert 'START -. "*" .-> a2' in drawn


def test_a_route_that_agents_are_waited_for_behind_is_a_choice(desk: Any) -> None:
    path = desk()
    text = path.read_text().replace("  - {source: reporter, target: END}\n  - {source: lawyer, target: END}\n", "")
    path.write_text(text + "  - {source: [reporter, lawyer], target: editor}\n")
    assert any("goes on to only one of its targets" in problem for problem in problems(path))


@pytest.mark.parametrize(
    ("edge", "told"),
    [
        ("{source: START, route: likelihood, targets: {news: reporter, law: lawyer}}", "needs a target for '*'"),
        ("{source: START, route: likelihood, targets: {news: reporter, '*': lawyer}}", "two or more domains"),
        (
            "{source: START, route: likelihood, targets: {newz: reporter, law: lawyer, '*': editor}}",
            "unknown domain 'newz' of the route from START; declared domains: law, news; did you mean 'news'?",
        ),
        (
            "{source: [reporter, lawyer], route: likelihood, targets: {news: END, law: END, '*': END}}",
            "an edge with 'route' has one source",
        ),
    ],
)
def test_what_is_wrong_with_a_route_is_found_with_its_line(desk: Any, edge: str, told: str) -> None:
    path = desk(edge=f"  - {edge}\n")
    found = problems(path)
    assert [problem for problem in found if told in problem and problem.startswith("line 13: ")], found


def test_an_offset_in_the_store_that_a_route_alone_uses_is_read_too(desk: Any, save_offset: Any) -> None:
    save_offset("speech", prompt_format="raw", anchor="sequence")
    edge = ROUTE.replace("law: lawyer", "law: lawyer, speech: editor") % ""
    path = desk(edge=edge)
    path.write_text(path.read_text().replace("agents:", "store: offsets\nagents:"))
    [problem] = problems(path)
    assert problem.startswith("line 14: the offset of domain 'speech' was trained in prompt format 'raw'")


@pytest.mark.parametrize(
    ("edge", "told"),
    [
        ("{source: START, route: likelyhood, targets: {news: reporter, '*': editor}}", "'likelihood'"),
        ("{source: START, route: likelihood}", "'route' and 'targets' go together"),
        ("{source: START, targets: {news: reporter}}", "'path' or 'route'; both are missing"),
        ("{source: START, target: editor, route: likelihood}", "found 'target' beside 'route'"),
        ("{source: START, path: reply_contains, route: likelihood, targets: {'*': editor}}", "'path' beside 'route'"),
        ("{source: START, path: reply_contains, margin: 1, targets: {'*': editor}}", "'margin' without 'route"),
        ("{source: START, route: likelihood, margin: -1, targets: {news: reporter, '*': editor}}", "margin"),
    ],
)
def test_an_edge_says_one_way_to_choose(desk: Any, edge: str, told: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        read_workflow(desk(edge=f"  - {edge}\n"))
    assert told in str(caught.value)
    assert "line 13" in str(caught.value)
