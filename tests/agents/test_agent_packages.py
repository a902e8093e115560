"""Agents of the official packages with a domain: create_agent and its middleware, supervisor, swarm, deepagents."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from deepagents import create_deep_agent
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm
from pydantic import BaseModel

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset, DomainMiddleware, DomainRouter
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import InvalidRequestError, UnknownDomainError

MakeScripted = Callable[..., ChatOffset]


class Answer(BaseModel):
    city: str
    sunny: bool


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"It is sunny in {city}."


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def domains(messages: list[BaseMessage]) -> list[str | None]:
    """The domains of the model's replies; messages that no model wrote are passed over."""
    replies = [m for m in messages if isinstance(m, AIMessage) and "offset_digest" in m.response_metadata]
    return [reply.response_metadata["domain"] for reply in replies]


@pytest.fixture
def scripted_domains(scripted: MakeScripted, with_domains: Any) -> MakeScripted:
    """Return the function that makes a scripted chat model on a base that knows `law` and `news`."""

    def make(script: Callable[[str], str], **fields: Any) -> ChatOffset:
        model = scripted(script, **fields)
        with_domains(model.load_runtime())
        return model

    return make


def look_up(prompt: str) -> str:
    return "Sunny." if "<tool_response>" in prompt else "I look it up.\n" + call("get_weather", city="Rome")


def test_create_agent_calls_a_tool_and_answers_in_the_domain_of_its_model(scripted_domains: MakeScripted) -> None:
    agent = create_agent(scripted_domains(look_up, domain="law"), tools=[get_weather])

    messages = agent.invoke({"messages": [("user", "Weather in Rome?")]})["messages"]

    assert [type(message).__name__ for message in messages] == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
    assert messages[1].tool_calls[0]["args"] == {"city": "Rome"}
    assert messages[2].content == "It is sunny in Rome."
    assert messages[3].content == "Sunny."
    assert domains(messages) == ["law", "law"]


async def test_create_agent_runs_on_an_event_loop_and_streams_its_text(scripted_domains: MakeScripted) -> None:
    agent = create_agent(scripted_domains(look_up, domain="law"), tools=[get_weather])

    parts = [
        (message.text, metadata["domain"])
        async for message, metadata in agent.astream({"messages": [("user", "Weather?")]}, stream_mode="messages")
        if not isinstance(message, ToolMessage)
    ]

    assert "".join(text for text, _ in parts) == "I look it up.\nSunny."
    assert {domain for _, domain in parts} == {"law"}


def test_two_calls_of_one_reply_both_run(scripted_domains: MakeScripted) -> None:
    def both(prompt: str) -> str:
        asked = "\n".join(call("get_weather", city=city) for city in ("Rome", "Oslo"))
        return "Sunny in both." if "<tool_response>" in prompt else asked

    agent = create_agent(scripted_domains(both), tools=[get_weather])

    messages = agent.invoke({"messages": [("user", "Weather?")]})["messages"]

    assert [m.content for m in messages if isinstance(m, ToolMessage)] == [
        "It is sunny in Rome.",
        "It is sunny in Oslo.",
    ]
    assert messages[-1].content == "Sunny in both."


def test_a_call_of_a_tool_that_is_not_there_is_answered_and_not_raised(scripted_domains: MakeScripted) -> None:
    def mistaken(prompt: str) -> str:
        return "Sorry." if "<tool_response>" in prompt else call("get_wether", city="Rome")

    agent = create_agent(scripted_domains(mistaken), tools=[get_weather])

    messages = agent.invoke({"messages": [("user", "Weather?")]})["messages"]

    assert messages[2].status == "error"
    assert messages[-1].content == "Sorry."


def test_an_agent_with_a_response_format_calls_its_tools_and_then_answers_in_that_form(
    scripted_domains: MakeScripted,
) -> None:
    def script(prompt: str) -> str:
        return '{"city": "Rome", "sunny": true}' if "<tool_response>" in prompt else call("get_weather", city="Rome")

    agent = create_agent(scripted_domains(script, domain="law"), tools=[get_weather], response_format=Answer)

    state = agent.invoke({"messages": [("user", "Weather?")]})

    assert state["structured_response"] == Answer(city="Rome", sunny=True)
    assert domains(state["messages"]) == ["law", "law"]


def test_a_base_that_writes_anything_still_replies_in_the_agents_response_format(law: ChatOffset) -> None:
    agent = create_agent(law.configured({"max_tokens": 400}), tools=[], response_format=Answer)

    assert isinstance(agent.invoke({"messages": [("user", "Weather?")]})["structured_response"], Answer)


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        ("news", "news"),
        (lambda request: "news" if "press" in request.messages[-1].text else None, "news"),
        (lambda request: None, None),
        (lambda request: request.runtime.context["domain"], "news"),
    ],
)
async def test_middleware_gives_each_call_its_domain(law: ChatOffset, domain: Any, expected: str | None) -> None:
    agent = create_agent(law, tools=[get_weather], middleware=[DomainMiddleware(domain)], context_schema=dict)
    asked = {"messages": [("user", "the press says")]}

    for state in (
        agent.invoke(asked, context={"domain": "news"}),
        await agent.ainvoke(asked, context={"domain": "news"}),
    ):
        assert domains(state["messages"]) == [expected]
        assert (
            state["messages"][-1].content
            == law.for_domain(expected).bind_tools([get_weather]).invoke("the press says").content
        )


async def test_middleware_with_a_router_takes_the_domain_it_finds(law: ChatOffset) -> None:
    router = DomainRouter(law, ["law", "news"])
    unsure = DomainRouter(law, ["law", "news"], margin=1e9)
    plain = law.for_domain(None)
    asked = {"messages": [("user", "the press says")]}
    found = router.route("the press says")

    for middleware, expected in ((DomainMiddleware(router), found), (DomainMiddleware(unsure), None)):
        agent = create_agent(plain, middleware=[middleware])
        assert domains(agent.invoke(asked)["messages"]) == [expected]
        assert domains((await agent.ainvoke(asked))["messages"]) == [expected]


def test_middleware_for_a_domain_that_is_not_there_is_an_error(law: ChatOffset) -> None:
    agent = create_agent(law, middleware=[DomainMiddleware("nws")])

    with pytest.raises(UnknownDomainError, match="news"):
        agent.invoke({"messages": [("user", "hello")]})


async def _pick(request: ModelRequest[Any]) -> str:
    return "law"


@pytest.mark.parametrize("domain", [3, ChatOffset, _pick])
def test_middleware_of_something_that_names_no_domain_is_refused(domain: Any) -> None:
    with pytest.raises(InvalidRequestError, match="expected the name of a domain"):
        DomainMiddleware(domain)


# The package uses a function that LangGraph has deprecated.
@pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecationWarning")
def test_a_supervisor_hands_over_to_the_agents_of_two_domains(scripted_domains: MakeScripted) -> None:
    def script(prompt: str) -> str:
        if "You are the lawyer" in prompt:
            return "The lawyer's view."
        if "You are the reporter" in prompt:
            return "The reporter's text."
        if "The reporter's text." in prompt:
            return "Done."
        return call("transfer_to_reporter" if "The lawyer's view." in prompt else "transfer_to_lawyer")

    base = scripted_domains(script)
    agents = [
        create_agent(base.for_domain("law"), name="lawyer", system_prompt="You are the lawyer."),
        create_agent(base.for_domain("news"), name="reporter", system_prompt="You are the reporter."),
    ]
    team = create_supervisor(agents, model=base, prompt="You lead the team.").compile()

    messages = team.invoke({"messages": [("user", "A contract was signed.")]})["messages"]

    assert messages[-1].content == "Done."
    assert domains(messages) == [None, "law", None, "news", None]


def test_a_swarm_goes_on_with_the_agent_that_was_handed_over_to(scripted_domains: MakeScripted) -> None:
    def script(prompt: str) -> str:
        if "You are the reporter" in prompt:
            return "The reporter's text."
        return call("transfer_to_reporter")

    base = scripted_domains(script)
    lawyer = create_agent(
        base.for_domain("law"),
        tools=[create_handoff_tool(agent_name="reporter")],
        name="lawyer",
        system_prompt="You are the lawyer.",
    )
    reporter = create_agent(base.for_domain("news"), name="reporter", system_prompt="You are the reporter.")
    swarm = create_swarm([lawyer, reporter], default_active_agent="lawyer").compile(checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}

    first = swarm.invoke({"messages": [("user", "A contract was signed.")]}, thread)["messages"]
    second = swarm.invoke({"messages": [("user", "More.")]}, thread)["messages"]

    assert domains(first) == ["law", "news"]
    assert domains(second) == ["law", "news", "news"]


def test_deepagents_sub_agents_speak_in_their_own_domain(with_domains: Any) -> None:
    def script(prompt: str) -> str:
        if "You are the lawyer" in prompt:
            return "The lawyer's view."
        if "The lawyer's view." in prompt:
            return "Done."
        return call("task", description="Read the contract.", subagent_type="lawyer")

    # What deepagents tells the model of its own tools takes some ten thousand tokens of one byte each.
    with OffsetRuntime(FakeBackend(script, context_tokens=200_000)) as runtime:
        base = ChatOffset(model="fake", runtime=with_domains(runtime))
        lawyer = {
            "name": "lawyer",
            "description": "Reads contracts.",
            "system_prompt": "You are the lawyer.",
            "model": base.for_domain("law"),
            "tools": [],
        }
        agent = create_deep_agent(model=base.for_domain("news"), subagents=[lawyer])  # type: ignore[list-item]

        parts = list(agent.stream({"messages": [("user", "Is it valid?")]}, stream_mode="messages", subgraphs=True))

    said = [(metadata["domain"], m.text) for _, (m, metadata) in parts if not isinstance(m, ToolMessage)]
    assert "".join(text for domain, text in said if domain == "law") == "The lawyer's view."
    assert "".join(text for domain, text in said if domain == "news") == "Done."
