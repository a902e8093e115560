"""retry_policy: what passes is tried again, and nothing else is."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from langgraph.graph import START, MessagesState, StateGraph

from offset_runtime.agents import ChatOffset, agent_node, retry_policy
from offset_runtime.errors import (
    ContextOverflowError,
    GenerationError,
    InvalidRequestError,
    KVCacheFullError,
    OffsetError,
    QueueFullError,
    UnknownDomainError,
)

Way = Literal["sync", "async"]
QUESTION: Any = {"messages": [("user", "hello")]}
AT_ONCE = retry_policy(first_wait_s=0)


class Refusals:
    """Has a runtime's engine refuse the first requests with `error`."""

    def __init__(self, runtime: Any, monkeypatch: pytest.MonkeyPatch, error: OffsetError, count: int) -> None:
        self.asked = 0
        submit = runtime.engine.submit

        def refused(*request: Any) -> Any:
            self.asked += 1
            if self.asked <= count:
                raise error
            return submit(*request)

        monkeypatch.setattr(runtime.engine, "submit", refused)


def graph(model: ChatOffset, policy: Any = AT_ONCE) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent_node("agent", model), retry_policy=policy)
    builder.add_edge(START, "agent")
    return builder.compile()


def run(model: ChatOffset, way: Way) -> str:
    found = graph(model).invoke(QUESTION) if way == "sync" else asyncio.run(graph(model).ainvoke(QUESTION))
    return str(found["messages"][-1].content)


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("error", [QueueFullError("full"), KVCacheFullError("no room")], ids=lambda e: type(e).__name__)
def test_what_passes_is_tried_again(
    law: ChatOffset, monkeypatch: pytest.MonkeyPatch, error: OffsetError, way: Way
) -> None:
    expected = law.invoke("hello").content
    refusals = Refusals(law.runtime, monkeypatch, error, count=2)

    assert run(law.configured({"max_retries": 0}), way) == expected
    assert refusals.asked == 3


@pytest.mark.parametrize("way", ["sync", "async"])
def test_what_does_not_pass_is_raised_after_the_last_attempt(
    law: ChatOffset, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    refusals = Refusals(law.runtime, monkeypatch, QueueFullError("full"), count=100)

    with pytest.raises(QueueFullError, match="agent 'agent': full"):
        run(law.configured({"max_retries": 0}), way)
    assert refusals.asked == 3


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize(
    "error",
    [GenerationError("failed"), ContextOverflowError("too long"), UnknownDomainError("law", []), OSError("disk")],
    ids=lambda error: type(error).__name__,
)
def test_what_would_fail_alike_is_not_tried_again(
    law: ChatOffset, monkeypatch: pytest.MonkeyPatch, error: Any, way: Way
) -> None:
    refusals = Refusals(law.runtime, monkeypatch, error, count=1)

    with pytest.raises(type(error)):
        run(law, way)
    assert refusals.asked == 1


def test_an_unknown_domain_runs_the_node_once(law: ChatOffset) -> None:
    runs: list[str] = []

    def node(state: Any) -> Any:
        runs.append("agent")
        return {"messages": [law.for_domain("tax").invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("agent", node, retry_policy=AT_ONCE)
    builder.add_edge(START, "agent")

    with pytest.raises(UnknownDomainError, match="'tax'"):
        builder.compile().invoke(QUESTION)
    assert runs == ["agent"]


def test_branches_that_succeeded_do_not_run_again(law: ChatOffset, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = StateGraph(MessagesState)
    ran: list[str] = []

    def failing_once(state: Any) -> Any:
        ran.append("busy")
        if ran.count("busy") == 1:
            raise QueueFullError("full")
        return {"messages": [law.invoke(state["messages"])]}

    def steady(state: Any) -> Any:
        ran.append("steady")
        return {"messages": [law.for_domain("news").invoke(state["messages"])]}

    builder.add_node("busy", failing_once, retry_policy=AT_ONCE)
    builder.add_node("steady", steady, retry_policy=AT_ONCE)
    builder.add_edge(START, "busy")
    builder.add_edge(START, "steady")

    replies = builder.compile().invoke(QUESTION)["messages"][1:]

    assert sorted(ran) == ["busy", "busy", "steady"]
    assert {reply.response_metadata["domain"] for reply in replies} == {"law", "news"}


def test_waits_grow_up_to_a_limit_and_are_spread() -> None:
    policy = retry_policy(max_attempts=7, first_wait_s=0.25)

    assert (policy.max_attempts, policy.initial_interval, policy.backoff_factor) == (7, 0.25, 2.0)
    assert policy.max_interval == 8
    assert policy.jitter
    assert retry_policy(first_wait_s=30).max_interval == 30


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_attempts": 0}, r"max_attempts=0; expected how often"),
        ({"max_attempts": True}, r"max_attempts=True"),
        ({"first_wait_s": -1}, r"first_wait_s=-1; expected seconds"),
        ({"first_wait_s": float("nan")}, r"first_wait_s=nan"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        retry_policy(**fields)
