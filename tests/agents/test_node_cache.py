"""domain_cache_policy: the same call again is not made again, and no other call gets its result."""

from __future__ import annotations

import asyncio
import copy
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langgraph.cache.memory import InMemoryCache
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from offset_runtime import DomainOffset, OffsetRuntime
from offset_runtime.agents import ChatOffset, agent_node, domain_cache_policy
from offset_runtime.errors import InvalidRequestError, OffsetFileError, UnknownDomainError

Way = Literal["sync", "async"]


def graph(model: Any, cache: InMemoryCache[Any], **settings: Any) -> Any:
    """One agent, always under the same name: all that LangGraph's own key has beside the input."""
    node = agent_node("agent", model, **settings)
    builder = StateGraph(MessagesState)
    builder.add_node("agent", node, cache_policy=domain_cache_policy(node))
    builder.add_edge(START, "agent")
    return builder.compile(cache=cache)


def ask(asked: Any, text: str = "hello") -> AIMessage:
    reply: AIMessage = asked.invoke({"messages": [("user", text)]})["messages"][-1]
    return reply


@pytest.fixture
def submissions(law: ChatOffset, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine was asked for."""
    engine, asked = law.load_runtime().engine, []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda *request: (asked.append(request), submit(*request))[1])
    return asked


@pytest.mark.parametrize("way", ["sync", "async"])
def test_the_same_input_again_gives_the_same_reply_without_the_model(
    law: ChatOffset, submissions: list[Any], way: Way
) -> None:
    asked = graph(law, InMemoryCache())
    # Each run gives its messages new ids.
    inputs: list[Any] = [{"messages": [HumanMessage("hello", id=number)]} for number in "12"]

    if way == "sync":
        first, second = (asked.invoke(each)["messages"] for each in inputs)
    else:
        first, second = (asyncio.run(asked.ainvoke(each))["messages"] for each in inputs)

    assert first[-1] == second[-1]
    assert (first[-1].name, first[-1].response_metadata["domain"]) == ("agent", "law")
    assert len(submissions) == 1


@pytest.mark.parametrize("way", ["sync", "async"])
def test_two_domains_never_share_a_result(law: ChatOffset, submissions: list[Any], way: Way) -> None:
    cache: InMemoryCache[Any] = InMemoryCache()
    question: Any = {"messages": [("user", "hello")]}
    replies = {}
    for domain in ("law", "news", None):
        asked = graph(law.for_domain(domain), cache)
        found = asked.invoke(question) if way == "sync" else asyncio.run(asked.ainvoke(question))
        replies[domain] = found["messages"][-1]

    assert len(submissions) == 3
    assert {domain: reply.response_metadata["domain"] for domain, reply in replies.items()} == {
        domain: domain for domain in replies
    }
    assert len({str(reply.content) for reply in replies.values()}) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"strength": 0.5},
        {"max_tokens": 5},
        {"seed": 1},
        {"temperature": 0.5},
        {"stop": ["x"]},
        {"author_offsets": "keep"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_decides_a_reply_decides_what_is_shared(
    law: ChatOffset, submissions: list[Any], changed: dict[str, Any]
) -> None:
    cache: InMemoryCache[Any] = InMemoryCache()
    fields = {"model": "fake", "domain": "law", "runtime": law.runtime, "max_tokens": 12}

    for settings in (fields, {**fields, **changed}, fields):
        ask(graph(ChatOffset(**settings), cache))

    assert len(submissions) == 2


@pytest.mark.parametrize(
    "changed",
    [{"system_prompt": "Be brief."}, {"history": "verbatim"}, {"reads": ["START"]}, {"route": lambda reply: "END"}],
    ids=lambda changed: next(iter(changed)),
)
def test_so_do_the_settings_of_the_agent(law: ChatOffset, submissions: list[Any], changed: dict[str, Any]) -> None:
    cache: InMemoryCache[Any] = InMemoryCache()

    for settings in ({}, changed, {}, changed):
        ask(graph(law, cache, **settings))

    assert len(submissions) == 2


def test_a_domain_that_was_trained_anew_misses(store: Path, make_offset: Any, fake_runtime: OffsetRuntime) -> None:
    cache: InMemoryCache[Any] = InMemoryCache()

    def reply() -> AIMessage:
        return ask(
            graph(ChatOffset(model="fake", domain="law", store=store, runtime=fake_runtime, max_tokens=8), cache)
        )

    before, again = reply(), reply()
    make_offset(fake_runtime.backend.identity, "law", seed=9).save(store / "law.safetensors")
    after = reply()

    assert before == again
    assert after.content != before.content
    assert after.response_metadata["offset_digest"] != before.response_metadata["offset_digest"]


def test_an_offset_that_is_registered_anew_misses_under_the_same_policy(
    law: ChatOffset, make_offset: Any, submissions: list[Any]
) -> None:
    asked = graph(law, InMemoryCache())
    runtime = law.load_runtime()

    before = ask(asked)
    runtime.register(make_offset(runtime.backend.identity, "law", seed=9))
    after = ask(asked)

    assert after.content != before.content
    assert len(submissions) == 2


async def test_no_file_is_read_while_the_graph_runs(
    store: Path, fake_runtime: OffsetRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = graph(ChatOffset(model="fake", domain="law", store=store, runtime=fake_runtime), InMemoryCache())
    monkeypatch.setattr(DomainOffset, "load", lambda *_: pytest.fail(f"read in {threading.current_thread().name}"))

    found = await asked.ainvoke({"messages": [("user", "hello")]})

    assert found["messages"][-1].response_metadata["domain"] == "law"


def test_a_node_function_of_ones_own_is_keyed_by_its_chat_model(law: ChatOffset, submissions: list[Any]) -> None:
    cache: InMemoryCache[Any] = InMemoryCache()

    def own(model: Any, **policy: Any) -> Any:
        builder = StateGraph(MessagesState)
        node = RunnableLambda(lambda state: {"messages": [model.invoke(state["messages"])]})
        builder.add_node("agent", node, cache_policy=domain_cache_policy(model, **policy))
        builder.add_edge(START, "agent")
        return builder.compile(cache=cache)

    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    speakers = [law, law.for_domain("news"), law.bind(domain="news", max_tokens=4), law.bind_tools([tool])]
    domains = [ask(own(model)).response_metadata["domain"] for model in speakers * 2]

    assert domains == ["law", "news", "news", "law"] * 2
    assert len(submissions) == len(speakers)
    ask(own(law, system_prompt="Be brief."))
    assert len(submissions) == len(speakers) + 1


def test_an_entry_is_out_of_date_after_its_ttl(law: ChatOffset) -> None:
    assert domain_cache_policy(law, ttl=60).ttl == 60
    assert domain_cache_policy(law).ttl is None


CALLED = AIMessage(
    "",
    tool_calls=[{"id": "a1", "name": "add", "args": {"x": 1}}, {"id": "a2", "name": "add", "args": {"x": 2}}],
)
WRITTEN = AIMessage(
    "Agreed.",
    name="critic",
    response_metadata={"domain": "law", "offset_digest": "d", "strength": 1.0, "timings": {"decode_s": 0.1}},
)
STATE = [HumanMessage("hello"), WRITTEN, CALLED, ToolMessage("one", tool_call_id="a1"), HumanMessage(["go", "on"])]


def key(model: ChatOffset, messages: Any) -> str:
    found = domain_cache_policy(model).key_func({"messages": messages})
    assert isinstance(found, str)
    return found


def with_changes(index: int, **fields: Any) -> list[Any]:
    changed = copy.deepcopy(STATE)
    for name, value in fields.items():
        setattr(changed[index], name, value)
    return changed


CALLED_OTHERWISE = [{**call, "id": call["id"] + "x"} for call in CALLED.tool_calls]


@pytest.mark.parametrize(
    "same",
    [
        with_changes(0, id="another"),
        with_changes(1, response_metadata={**WRITTEN.response_metadata, "timings": {"decode_s": 9.9}}),
        [
            *STATE[:2],
            *with_changes(2, tool_calls=CALLED_OTHERWISE)[2:3],
            ToolMessage("one", tool_call_id="a1x"),
            STATE[4],
        ],
        tuple(STATE),
    ],
    ids=["ids", "timings", "ids of calls", "a tuple"],
)
def test_messages_that_say_the_same_have_one_key(law: ChatOffset, same: Any) -> None:
    assert key(law, same) == key(law, STATE)


@pytest.mark.parametrize(
    "other",
    [
        with_changes(0, content="Hello"),
        with_changes(1, name="poet"),
        with_changes(1, response_metadata={**WRITTEN.response_metadata, "offset_digest": "e"}),
        with_changes(1, response_metadata={**WRITTEN.response_metadata, "strength": 0.5}),
        with_changes(1, additional_kwargs={"offset_runtime_instructions": "Be brief."}),
        with_changes(2, tool_calls=CALLED.tool_calls[::-1]),
        with_changes(3, tool_call_id="a2"),
        with_changes(3, status="error"),
        with_changes(4, content=["go on"]),
        [AIMessage("hello"), *STATE[1:]],
        STATE[::-1],
        STATE[:-1],
    ],
    ids=[
        "content",
        "author",
        "offset",
        "strength",
        "instructions",
        "order of calls",
        "call that is answered",
        "failed call",
        "blocks",
        "type",
        "order",
        "length",
    ],
)
def test_messages_that_do_not_have_different_keys(law: ChatOffset, other: Any) -> None:
    assert key(law, other) != key(law, STATE)


class State(BaseModel):
    messages: list[Any]
    topic: str = "tea"


def test_the_rest_of_the_input_counts_too(law: ChatOffset) -> None:
    of = domain_cache_policy(law).key_func
    same = [{"a": 1, "b": {1, 2, 3}}, {"b": {3, 2, 1}, "a": 1}]
    other = [{"a": True, "b": {1, 2, 3}}, {"a": "1", "b": {1, 2, 3}}, {1: "a"}, {"1": "a"}, [1, 2], [[1], 2], None]
    objects = [State(messages=STATE), State(messages=STATE, topic="milk"), b"raw", Path("raw")]

    assert of(same[0]) == of(same[1])
    assert of(State(messages=with_changes(0, id="x"))) == of(objects[0])
    assert len({of(each) for each in [same[0], *other, *objects]}) == 1 + len(other) + len(objects)


def test_an_input_that_cannot_be_told_apart_is_an_error(law: ChatOffset) -> None:
    with pytest.raises(InvalidRequestError, match=r"holds a lock, which cannot be part of a cache key"):
        domain_cache_policy(law).key_func({"lock": threading.Lock()})


def test_what_does_not_say_its_domain_is_refused(law: ChatOffset) -> None:
    with pytest.raises(InvalidRequestError, match="RunnableLambda does not say in which domain it replies"):
        domain_cache_policy(RunnableLambda(lambda state: state))
    with pytest.raises(InvalidRequestError, match="RunnableLambda does not say"):
        domain_cache_policy(agent_node("critic", RunnableLambda(lambda state: AIMessage("ok"))))
    with pytest.raises(InvalidRequestError, match="instructions of agent 'critic' are known"):
        domain_cache_policy(agent_node("critic", law), system_prompt="Be brief.")
    with pytest.raises(InvalidRequestError, match="ttl=0; expected seconds"):
        domain_cache_policy(law, ttl=0)


def test_an_offset_that_cannot_be_read_is_known_when_the_graph_is_made(law: ChatOffset, tmp_path: Path) -> None:
    with pytest.raises(UnknownDomainError, match="'tax'"):
        domain_cache_policy(law.for_domain("tax"))
    (tmp_path / "bad.safetensors").write_bytes(b"not an offset")
    with pytest.raises(OffsetFileError):
        domain_cache_policy(ChatOffset(model="fake", domain="bad", store=tmp_path))


def test_a_cached_reply_is_added_to_the_messages_of_a_thread_once_a_turn(law: ChatOffset) -> None:
    builder = StateGraph(MessagesState)
    node = agent_node("agent", law, reads=["START"])
    builder.add_node("agent", node, cache_policy=domain_cache_policy(node))
    builder.add_node("again", lambda state: {})
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", lambda state: "again" if len(state["messages"]) < 4 else "__end__")
    builder.add_edge("again", "agent")

    # The agent reads the same message each time, and yet replies anew: an entry has the id of its reply, and two
    # messages of one id are one to LangGraph.
    found = builder.compile(cache=InMemoryCache()).invoke({"messages": [("user", "hello")]})["messages"]

    assert [message.type for message in found] == ["human", "ai", "ai", "ai"]
