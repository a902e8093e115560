"""agent_node: what an agent reads, what it returns, and how its tokens stream through a graph."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import BaseModel

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset, agent_node
from offset_runtime.errors import ContextOverflowError, InvalidRequestError, UnknownDomainError

Conversation = list[tuple[str, str]]


class Ear:
    """A model that answers "ok" and remembers what it was shown."""

    def __init__(self) -> None:
        self.heard: Conversation = []
        self.model = RunnableLambda(self._answer)

    def _answer(self, messages: list[AnyMessage]) -> AIMessage:
        self.heard = [(message.type, str(message.text)) for message in messages]
        return AIMessage("ok", id="reply")

    def read(self, messages: list[AnyMessage], **fields: Any) -> Conversation:
        agent_node("critic", self.model, **fields).invoke({"messages": messages})
        return self.heard


STATE = [
    HumanMessage("write a poem"),
    AIMessage("roses", name="poet"),
    AIMessage("violets", name="rival"),
    AIMessage("too short", name="critic"),
    AIMessage("roses are red", name="poet"),
]


def test_the_system_prompt_comes_first_and_is_left_out_when_empty() -> None:
    assert Ear().read([HumanMessage("hello")], system_prompt="Be kind.")[0] == ("system", "Be kind.")
    assert Ear().read([HumanMessage("hello")]) == [("human", "hello")]


def test_other_agents_speak_as_the_user_under_their_name_and_its_own_replies_are_its_turns() -> None:
    assert Ear().read(STATE) == [
        ("human", "write a poem\n\npoet:\nroses\n\nrival:\nviolets"),
        ("ai", "too short"),
        ("human", "poet:\nroses are red"),
    ]


@pytest.mark.parametrize(
    ("reads", "shown"),
    [
        (["START"], [("human", "write a poem")]),
        (["poet"], [("human", "poet:\nroses\n\npoet:\nroses are red")]),
        (["critic", "rival"], [("human", "rival:\nviolets"), ("ai", "too short")]),
    ],
)
def test_an_agent_reads_only_whom_it_may(reads: list[str], shown: Conversation) -> None:
    assert Ear().read(STATE, reads=reads) == shown


def test_replies_without_an_author_belong_to_the_users_conversation() -> None:
    history = [HumanMessage("hi"), AIMessage("hello"), HumanMessage("go on"), AIMessage("no", name="poet")]

    assert Ear().read(history, reads=["START"]) == [("human", "hi"), ("ai", "hello"), ("human", "go on")]


def test_a_tools_answer_belongs_to_the_agent_that_called_it() -> None:
    call = AIMessage("", name="poet", tool_calls=[{"id": "1", "name": "rhyme", "args": {}}])
    messages = [HumanMessage("hi"), call, ToolMessage("time, lime", tool_call_id="1")]

    assert Ear().read(messages) == [("human", "hi\n\npoet:\ntime, lime")]
    assert Ear().read(messages, reads=["START"]) == [("human", "hi")]


def test_an_agent_with_nothing_to_read_is_an_error() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"agent 'critic' has no message to read: it reads editor, and .* poet"
    ):
        Ear().read(STATE, reads=["editor"], system_prompt="Be kind.")


def test_reads_must_be_a_collection() -> None:
    with pytest.raises(InvalidRequestError, match=r"give a list, for example \['poet'\]"):
        agent_node("critic", Ear().model, reads="poet")


def test_the_state_is_left_as_it_was() -> None:
    before = [message.model_copy(deep=True) for message in STATE]

    Ear().read(STATE, system_prompt="Be kind.")

    assert before == STATE


async def test_the_reply_carries_the_agents_name() -> None:
    node = agent_node("critic", Ear().model)
    expected = {"messages": [AIMessage("ok", name="critic", id="reply")]}

    assert node.invoke({"messages": [HumanMessage("hi")]}) == expected
    assert await node.ainvoke({"messages": [HumanMessage("hi")]}) == expected


async def test_a_node_that_is_awaited_awaits_its_model() -> None:
    async def answer(messages: list[AnyMessage]) -> AIMessage:
        return AIMessage("awaited")

    node = agent_node("critic", RunnableLambda(lambda messages: AIMessage("blocked"), answer))

    assert (await node.ainvoke({"messages": [HumanMessage("hi")]}))["messages"][0].content == "awaited"


def test_a_state_may_be_an_object() -> None:
    class State(BaseModel):
        messages: list[AnyMessage]

    assert agent_node("critic", Ear().model).invoke(State(messages=[HumanMessage("hi")]))


@pytest.mark.parametrize(("target", "goto"), [("poet", "poet"), ("END", END)])
async def test_a_route_sends_the_reply_on(target: str, goto: str) -> None:
    routed: list[str] = []

    def route(reply: str) -> str:
        routed.append(reply)
        return target

    node = agent_node("critic", Ear().model, route=route)
    expected = Command(goto=goto, update={"messages": [AIMessage("ok", name="critic", id="reply")]})

    assert node.invoke({"messages": [HumanMessage("hi")]}) == expected
    assert await node.ainvoke({"messages": [HumanMessage("hi")]}) == expected
    assert routed == ["ok", "ok"]


def test_a_route_to_nowhere_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="the route of agent 'critic' returned None"):
        agent_node("critic", Ear().model, route=lambda reply: None).invoke({"messages": [HumanMessage("hi")]})


def parallel_graph(law: ChatOffset) -> Any:
    builder = StateGraph(MessagesState)
    for domain in ("law", "news"):
        model = law.for_domain(domain)
        builder.add_node(f"{domain}_agent", agent_node(f"{domain}_agent", model, system_prompt="Answer."))
        builder.add_edge(START, f"{domain}_agent")
    return builder.compile()


@pytest.fixture
def in_step(watched: Any, with_domains: Any) -> OffsetRuntime:
    """A runtime that starts once two requests came in, and goes on as tokens are read."""
    return with_domains(watched(expected=2, in_step=True))


async def collect(graph: Any, runtime: OffsetRuntime, way: Literal["sync", "async"]) -> list[tuple[Any, dict]]:
    found = []

    def take(part: Any) -> None:
        if part[0].content:
            runtime.backend.consume()
        found.append(part)

    question = {"messages": [("user", "hello")]}
    if way == "sync":
        for part in graph.stream(question, stream_mode="messages"):
            take(part)
    else:
        async for part in graph.astream(question, stream_mode="messages"):
            take(part)
    return found


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_parallel_agents_run_in_one_batch_and_their_tokens_interleave(
    in_step: OffsetRuntime, way: Literal["sync", "async"]
) -> None:
    model = ChatOffset(model="fake", runtime=in_step, max_tokens=8)

    parts = await collect(parallel_graph(model), in_step, way)
    agents = [metadata["agent"] for message, metadata in parts if message.content]
    switches = sum(before != after for before, after in pairwise(agents))

    assert {(metadata["agent"], metadata["domain"]) for _, metadata in parts} == {
        ("law_agent", "law"),
        ("news_agent", "news"),
    }
    assert max(in_step.backend.batch_sizes) == 2
    assert switches >= 3


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_each_reply_streams_once_and_equals_its_solo_run(
    in_step: OffsetRuntime, law: ChatOffset, way: Literal["sync", "async"]
) -> None:
    model = ChatOffset(model="fake", runtime=in_step, max_tokens=8)

    streamed = {"law": "", "news": ""}
    for message, metadata in await collect(parallel_graph(model), in_step, way):
        streamed[metadata["domain"]] += message.content

    for domain, text in streamed.items():
        solo = law.configured({"domain": domain, "max_tokens": 8})
        assert text == solo.invoke([("system", "Answer."), ("user", "hello")]).content


def test_a_handoff_streams_its_tokens_once(law: ChatOffset) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("first", agent_node("first", law, route=lambda reply: "second"), destinations=("second",))
    builder.add_node("second", agent_node("second", law.for_domain("news"), route=lambda reply: "END"))
    builder.add_edge(START, "first")
    graph = builder.compile()
    question = {"messages": [("user", "hello")]}

    streamed: dict[str, str] = {}
    for message, metadata in graph.stream(question, stream_mode="messages"):
        streamed[metadata["agent"]] = streamed.get(metadata["agent"], "") + str(message.content)

    assert streamed == {m.name: m.content for m in graph.invoke(question)["messages"] if m.name}


async def test_an_error_surfaces_as_itself(law: ChatOffset) -> None:
    graph = parallel_graph(law.configured({"max_tokens": 5000}))
    question = {"messages": [("user", "hello")]}

    with pytest.raises(ContextOverflowError, match="max_tokens of 5000"):
        graph.invoke(question)
    with pytest.raises(ContextOverflowError, match="max_tokens of 5000"):
        await graph.ainvoke(question)


def test_an_agent_in_no_domain_is_told_apart_in_the_metadata(law: ChatOffset) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("plain", agent_node("plain", law.for_domain(None)))
    builder.add_edge(START, "plain")

    parts = builder.compile().stream({"messages": [("user", "hello")]}, stream_mode="messages")

    assert {(metadata["agent"], metadata["domain"]) for _, metadata in parts} == {("plain", None)}


async def test_an_error_of_the_package_names_the_agent_and_is_else_the_same() -> None:
    raised = UnknownDomainError("law", ["tax"])

    def fail(_: object) -> AIMessage:
        raise raised

    node = agent_node("critic", RunnableLambda(fail))
    for _ in range(2):
        with pytest.raises(UnknownDomainError, match=r"^agent 'critic': unknown domain 'law'") as caught:
            node.invoke({"messages": STATE})
        assert (caught.value.domain, caught.value.__cause__) == ("law", raised)
    with pytest.raises(UnknownDomainError, match=r"^agent 'critic': unknown domain 'law'"):
        await node.ainvoke({"messages": STATE})
