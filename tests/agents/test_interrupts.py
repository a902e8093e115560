"""Interrupted graphs and earlier checkpoints: what goes on does so in its own domain, and what had finished stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from offset_runtime.agents import ChatOffset, agent_node
from offset_runtime.graphs import sqlite_checkpoints

Way = Literal["sync", "async"]
THREAD: Any = {"configurable": {"thread_id": "t"}}
QUESTION: Any = {"messages": [("user", "hello")]}


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "memory":
        yield InMemorySaver()
        return
    with sqlite_checkpoints(tmp_path / "checkpoints.sqlite") as opened:
        yield opened


@pytest.fixture
def ran(law: ChatOffset, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The domains of the requests that the engine got."""
    engine, domains = law.load_runtime().engine, []
    submit = engine.submit

    def noted(request: Any, *more: Any) -> Any:
        domains.append(next((placement.offset.domain for placement in request.placements), None))
        return submit(request, *more)

    monkeypatch.setattr(engine, "submit", noted)
    return domains


def review(state: MessagesState) -> dict[str, Any]:
    return {"messages": [HumanMessage(interrupt({"draft": state["messages"][-1].text}))]}


def newsroom(model: ChatOffset, saver: Any, *, interrupt_before: list[str] | None = None, review: Any = review) -> Any:
    """A draft under `law`, a person's word on it, and an article under `news`."""
    builder = StateGraph(MessagesState)
    builder.add_node("draft", agent_node("draft", model.for_domain("law")))
    builder.add_node("review", review)
    builder.add_node("article", agent_node("article", model.for_domain("news"), history="shared"))
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "review")
    builder.add_edge("review", "article")
    builder.add_edge("article", END)
    return builder.compile(checkpointer=saver, interrupt_before=interrupt_before)


def alone(model: ChatOffset, messages: list[AnyMessage]) -> str:
    """What the article is to these messages, without a graph."""
    node = agent_node("article", model.for_domain("news"), history="shared")
    return str(node.invoke({"messages": messages})["messages"][0].content)


def test_an_interrupted_graph_goes_on_with_the_answer_and_streams_the_rest(
    law: ChatOffset, saver: Any, ran: list[str | None]
) -> None:
    graph = newsroom(law, saver)

    stopped = graph.invoke(QUESTION, THREAD)
    draft = stopped["messages"][-1]
    [asked] = stopped["__interrupt__"]
    assert asked.value == {"draft": draft.content}
    assert ran == ["law"]

    parts = list(graph.stream(Command(resume="shorter"), THREAD, stream_mode="messages"))
    messages = graph.get_state(THREAD).values["messages"]

    tokens = [(m, metadata) for m, metadata in parts if metadata["langgraph_node"] == "article" and m.content]
    assert ran == ["law", "news"]
    assert len(tokens) > 1
    assert {(metadata["agent"], metadata["domain"]) for _, metadata in tokens} == {("article", "news")}
    assert [m.name or m.content for m in messages] == ["hello", "draft", "shorter", "article"]
    assert messages[1] == draft
    assert "".join(str(m.content) for m, _ in tokens) == messages[-1].content == alone(law, messages[:3])


async def test_the_event_loop_resumes_and_streams_too(law: ChatOffset, ran: list[str | None]) -> None:
    graph = newsroom(law, InMemorySaver())

    await graph.ainvoke(QUESTION, THREAD)
    found = [part async for part in graph.astream(Command(resume="shorter"), THREAD, stream_mode="messages")]
    messages = (await graph.aget_state(THREAD)).values["messages"]

    tokens = [str(message.content) for message, metadata in found if metadata["langgraph_node"] == "article"]
    assert ran == ["law", "news"]
    assert len(tokens) > 1
    assert "".join(tokens) == messages[-1].content == alone(law, messages[:3])


def test_agents_beside_an_interrupt_do_not_run_again(law: ChatOffset, saver: Any, ran: list[str | None]) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("review", review)
    builder.add_edge(START, "review")
    for domain in ("law", "news"):
        builder.add_node(domain, agent_node(domain, law.for_domain(domain)))
        builder.add_edge(START, domain)
    graph = builder.compile(checkpointer=saver)

    graph.invoke(QUESTION, THREAD)
    assert sorted(map(str, ran)) == ["law", "news"]
    messages = graph.invoke(Command(resume="both are fine"), THREAD)["messages"]

    assert sorted(map(str, ran)) == ["law", "news"]
    written = {m.name: m.content for m in messages if isinstance(m, AIMessage)}
    assert written == {domain: law.for_domain(domain).invoke("hello").content for domain in ("law", "news")}
    assert "both are fine" in [m.content for m in messages]


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_a_graph_stops_before_a_node_and_goes_on_with_what_was_changed_meanwhile(
    law: ChatOffset, ran: list[str | None], way: Way
) -> None:
    graph = newsroom(law, InMemorySaver(), interrupt_before=["article"], review=lambda state: {})

    stopped = graph.invoke(QUESTION, THREAD) if way == "sync" else await graph.ainvoke(QUESTION, THREAD)
    assert (graph.get_state(THREAD).next, ran) == (("article",), ["law"])
    edited = stopped["messages"][-1].model_copy(update={"content": "edited by hand"})
    graph.update_state(THREAD, {"messages": [edited]})
    found = graph.invoke(None, THREAD) if way == "sync" else await graph.ainvoke(None, THREAD)

    messages = found["messages"]
    assert ran == ["law", "news"]
    assert [str(m.content) for m in messages[:2]] == ["hello", "edited by hand"]
    assert messages[-1].content == alone(law, messages[:2])


def before(graph: Any, node: str) -> Any:
    """The newest checkpoint after which `node` was to run."""
    return next(state for state in graph.get_state_history(THREAD) if state.next == (node,))


def test_a_fork_from_an_earlier_checkpoint_replies_anew_in_the_right_domain(
    law: ChatOffset, saver: Any, ran: list[str | None]
) -> None:
    graph = newsroom(law, saver, review=lambda state: {})
    first = graph.invoke(QUESTION, THREAD)["messages"]
    ran.clear()

    past = before(graph, "article")
    assert [m.name for m in past.values["messages"]] == [None, "draft"]
    edited = past.values["messages"][-1].model_copy(update={"content": "edited by hand"})
    fork = graph.update_state(past.config, {"messages": [edited]})
    parts = list(graph.stream(None, fork, stream_mode="messages"))
    second = graph.get_state(THREAD).values["messages"]

    assert ran == ["news"]
    assert second[-1].content == alone(law, second[:2]) != first[-1].content
    assert {metadata["domain"] for message, metadata in parts if message.content} == {"news"}
    for reply, domain in [(second[-1], "news"), (second[1], "law")]:
        assert reply.response_metadata["domain"] == domain
        assert reply.response_metadata["offset_digest"] == law.for_domain(domain).offset().digest


def test_an_earlier_checkpoint_run_again_gives_the_same_reply(
    law: ChatOffset, saver: Any, ran: list[str | None]
) -> None:
    graph = newsroom(law, saver, review=lambda state: {})
    first = graph.invoke(QUESTION, THREAD)["messages"]
    ran.clear()

    second = graph.invoke(None, before(graph, "draft").config)["messages"]

    assert ran == ["law", "news"]
    assert [m.content for m in second] == [m.content for m in first]


def test_a_fork_may_put_the_question_to_another_agent(law: ChatOffset, saver: Any, ran: list[str | None]) -> None:
    builder = StateGraph(MessagesState)
    for domain in ("law", "news"):
        builder.add_node(domain, agent_node(domain, law.for_domain(domain)))
    builder.add_node("desk", lambda state: {})
    builder.add_edge(START, "desk")
    builder.add_conditional_edges("desk", lambda state: "news" if "bridge" in state["messages"][-1].text else "law")
    graph = builder.compile(checkpointer=saver)

    graph.invoke(QUESTION, THREAD)
    past = before(graph, "desk")
    [asked] = past.values["messages"]
    fork = graph.update_state(past.config, {"messages": [asked.model_copy(update={"content": "a bridge"})]})
    messages = graph.invoke(None, fork)["messages"]

    assert ran == ["law", "news"]
    assert [m.name for m in messages] == [None, "news"]
    assert messages[-1].content == law.for_domain("news").invoke("a bridge").content
