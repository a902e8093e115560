"""How agents are shown a transcript: each in its own way, all alike, or every turn as it was written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset, agent_node
from offset_runtime.agents.transcript import INSTRUCTIONS, History, Transcript
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.engine import EngineSettings
from offset_runtime.errors import InvalidRequestError

Shown = list[tuple[str, str]]

STATE = [
    HumanMessage("write a poem"),
    AIMessage("roses", name="poet", additional_kwargs={INSTRUCTIONS: "Write."}),
    AIMessage("too short", name="critic", additional_kwargs={INSTRUCTIONS: "Judge."}),
]


def shown(name: str, history: History, instructions: str = "", messages: list[Any] = STATE) -> Shown:
    found = Transcript(name, instructions, None, history).show(messages)
    return [(message.type, str(message.text)) for message in found]


def test_a_shared_transcript_comes_before_the_agents_own_instructions() -> None:
    assert shown("critic", "shared", "Judge.") == [
        ("human", "write a poem\n\npoet:\nroses\n\ncritic:\ntoo short\n\n@critic: Judge.")
    ]


def test_a_shared_transcript_is_the_same_for_all_up_to_the_instructions() -> None:
    poet, critic = (shown(name, "shared", "Go.")[0][1].removesuffix(f"@{name}: Go.") for name in ("poet", "critic"))
    assert poet == critic


def test_an_agent_without_instructions_reads_the_shared_transcript_alone() -> None:
    assert shown("critic", "shared", messages=STATE[:2]) == [("human", "write a poem\n\npoet:\nroses")]


def test_a_verbatim_transcript_holds_every_turn_as_it_was_written() -> None:
    assert shown("poet", "verbatim", "Write more.") == [
        ("human", "write a poem\n\n@poet: Write."),
        ("ai", "roses"),
        ("human", "@critic: Judge."),
        ("ai", "too short"),
        ("human", "@poet: Write more."),
    ]


def test_a_verbatim_prompt_goes_on_where_the_last_one_and_its_reply_ended() -> None:
    transcript = Transcript("poet", "Write.", None, "verbatim")
    first = transcript.show([HumanMessage("a poem")])
    reply = transcript.sign(AIMessage("roses"))

    second = Transcript("critic", "Judge.", None, "verbatim").show([HumanMessage("a poem"), reply])

    assert [m.text for m in second[: len(first) + 1]] == [*(m.text for m in first), "roses"]


def test_only_a_verbatim_reply_carries_its_instructions_into_the_state() -> None:
    reply = AIMessage("roses", id="1")
    assert Transcript("poet", "Write.", None, "shared").sign(reply).additional_kwargs == {}
    assert Transcript("poet", "Write.", None, "verbatim").sign(reply).additional_kwargs == {INSTRUCTIONS: "Write."}


def team(runtime: OffsetRuntime, history: History, *, anchored: str) -> Any:
    """Three agents one after another, in the domains law, news and law."""
    graph = StateGraph(MessagesState)
    names = ["lawyer", "reporter", "judge"]
    for name, domain in zip(names, ["law", "news", "law"], strict=True):
        model = ChatOffset(model="fake", domain=f"{domain}-{anchored}", runtime=runtime, max_tokens=24)
        graph.add_node(name, agent_node(name, model, system_prompt=f"You are the {name}.", history=history))
    for source, target in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(source, target)
    return graph.compile()


@pytest.fixture
def team_runtime(fake_runtime: OffsetRuntime, make_offset: Callable[..., Any]) -> OffsetRuntime:
    for seed, domain in enumerate(["law", "news"]):
        for anchor in ("turn", "sequence"):
            identity = fake_runtime.backend.identity
            fake_runtime.register(make_offset(identity, f"{domain}-{anchor}", anchor=anchor, seed=seed))
    return fake_runtime


def turns_of(graph: Any) -> list[AIMessage]:
    text = "The harbour was closed on Monday after a storm, and nobody knew when it would open again."
    found: list[AIMessage] = graph.invoke({"messages": [HumanMessage(text)]})["messages"][1:]
    return found


def read(turn: AIMessage) -> int:
    """Prompt tokens that were read for a turn."""
    assert turn.usage_metadata is not None
    return turn.usage_metadata["input_tokens"] - turn.response_metadata["cache"]["hit_tokens"]


def test_in_a_verbatim_history_nothing_is_read_twice(team_runtime: OffsetRuntime) -> None:
    lawyer, reporter, judge = turns_of(team(team_runtime, "verbatim", anchored="turn"))

    # The reply's last token, the turn's end and the next instructions.
    between = len(b"<|im_start|>user\n@reporter: You are the reporter.<|im_end|>\n<|im_start|>assistant\n")
    assert read(reporter) < between + 4
    assert read(judge) <= read(reporter)
    assert read(lawyer) == lawyer.usage_metadata["input_tokens"]  # type: ignore[index]


def test_in_a_shared_history_a_turn_is_read_once_more_and_the_rest_is_shared(team_runtime: OffsetRuntime) -> None:
    _, reporter, judge = turns_of(team(team_runtime, "shared", anchored="turn"))

    for turn in (reporter, judge):
        assert turn.response_metadata["cache"]["hit_tokens"] > 80, "the user's message, whatever the domains"
    assert judge.response_metadata["cache"]["hit_tokens"] > reporter.response_metadata["cache"]["hit_tokens"]


def test_a_separate_history_shares_nothing_between_agents(team_runtime: OffsetRuntime) -> None:
    _, reporter, _ = turns_of(team(team_runtime, "separate", anchored="turn"))
    assert reporter.response_metadata["cache"]["hit_tokens"] < len("<|im_start|>system\nYou are the reporter")


@pytest.mark.parametrize("history", ["shared", "verbatim"])
def test_sequence_anchored_domains_share_no_history(team_runtime: OffsetRuntime, history: History) -> None:
    _, reporter, judge = turns_of(team(team_runtime, history, anchored="sequence"))
    assert reporter.response_metadata["cache"]["hit_tokens"] == 0, "another domain"
    assert judge.response_metadata["cache"]["hit_tokens"] > 80, "the lawyer's domain"


@pytest.mark.parametrize("history", ["separate", "shared", "verbatim"])
@pytest.mark.parametrize("anchored", ["turn", "sequence"])
def test_replies_equal_those_without_a_cache(team_runtime: OffsetRuntime, history: History, anchored: str) -> None:
    with OffsetRuntime(FakeBackend(), settings=EngineSettings(cache_bytes=0)) as cold:
        for offset in team_runtime.offsets.values():
            cold.register(offset)
        expected = [turn.text for turn in turns_of(team(cold, history, anchored=anchored))]

    for _ in range(2):
        assert [turn.text for turn in turns_of(team(team_runtime, history, anchored=anchored))] == expected


def test_a_reply_of_a_domain_trained_anew_is_read_without_an_offset_and_says_so(
    team_runtime: OffsetRuntime, make_offset: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = ChatOffset(
        model="fake", domain="news-turn", runtime=team_runtime, max_tokens=8, author_offsets="keep", temperature=0
    )
    history = [HumanMessage("hello"), model.for_domain("law-turn").invoke("hello"), HumanMessage("and?")]
    model.invoke(history)
    assert not caplog.records
    team_runtime.register(make_offset(team_runtime.backend.identity, "law-turn", anchor="turn", seed=9))

    with caplog.at_level(logging.WARNING):
        model.invoke(history)

    assert "law-turn" in caplog.text
    assert "without its offset" in caplog.text


def test_kept_and_dropped_offsets_are_different_histories(team_runtime: OffsetRuntime) -> None:
    model = ChatOffset(model="fake", domain="news-turn", runtime=team_runtime, max_tokens=12)
    history = [HumanMessage("hello"), model.for_domain("law-turn").invoke("hello"), HumanMessage("and?")]

    assert model.invoke(history).text != model.invoke(history, author_offsets="keep").text


def test_an_unknown_history_is_an_error_with_the_nearest_name() -> None:
    model = ChatOffset(model="fake")
    with pytest.raises(InvalidRequestError, match=r"history='sharde' of agent 'me' is unknown.*did you mean 'shared'"):
        agent_node("me", model, history="sharde")  # type: ignore[arg-type]


@pytest.mark.parametrize("upcoming", [["b"], "b", {"b": "1"}, {"b": 0}])
def test_who_reads_next_is_a_mapping_to_steps(upcoming: Any) -> None:
    with pytest.raises(InvalidRequestError, match="does not say who reads next"):
        agent_node("me", ChatOffset(model="fake"), upcoming=upcoming)


def test_a_wrapped_model_in_a_verbatim_history_must_keep_offsets_itself() -> None:
    dropping = ChatOffset(model="fake").with_retry()
    with pytest.raises(InvalidRequestError, match=r'wrapped in RunnableRetry.*author_offsets="keep"'):
        agent_node("me", dropping, history="verbatim")
    agent_node("me", ChatOffset(model="fake", author_offsets="keep").with_retry(), history="verbatim")
    agent_node("me", dropping, history="shared")


@pytest.mark.parametrize(
    ("told", "because"),
    [
        ({"strength": "0.5"}, "without its offset"),
        ({"strength": float("nan")}, "without its offset"),
        ({"strength": 10**400}, "without its offset"),
        ({"offset_digest": ["x"]}, "another one now"),
        ({"domain": "nowhere"}, "nowhere"),
    ],
)
def test_whatever_a_replys_metadata_hold_the_turn_goes_on_without_its_offset(
    team_runtime: OffsetRuntime, caplog: pytest.LogCaptureFixture, told: dict[str, Any], because: str
) -> None:
    model = ChatOffset(model="fake", domain="news-turn", runtime=team_runtime, max_tokens=4, author_offsets="keep")
    reply = model.invoke("hello")
    forged = reply.model_copy(update={"response_metadata": {**reply.response_metadata, **told}})

    assert model.invoke([HumanMessage("hello"), forged, HumanMessage("and?")]).text

    assert because in caplog.text


def test_replies_of_other_models_are_merged_as_ever_where_offsets_are_kept(team_runtime: OffsetRuntime) -> None:
    model = ChatOffset(model="fake", runtime=team_runtime, max_tokens=4)
    history = [HumanMessage("hello"), AIMessage("good"), AIMessage("day"), HumanMessage("and?")]
    assert model.invoke(history, author_offsets="keep").text == model.invoke(history).text


def test_langchains_cache_of_replies_is_shared_by_threads(team_runtime: OffsetRuntime) -> None:
    set_llm_cache(InMemoryCache())
    try:
        model = ChatOffset(model="fake", runtime=team_runtime, max_tokens=4)
        node = agent_node("me", model, upcoming={"me": 1})
        for thread in ("1", "2"):
            node.invoke({"messages": [HumanMessage("hello")]}, {"configurable": {"thread_id": thread}})
    finally:
        set_llm_cache(None)
    assert team_runtime.engine.cache_figures.entries == 1
    assert team_runtime.engine.cache_figures.hit_tokens == 0, "the second was answered without the engine"
