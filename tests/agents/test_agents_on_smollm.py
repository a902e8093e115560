"""The chat model on the real base: what only a real model can show."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableParallel
from langgraph.graph import START, MessagesState, StateGraph

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset, OffsetLLM, agent_node

pytestmark = pytest.mark.real_model

# Where the two best logits lie this close, float sums of another batch shape may pick the other.
TIE = 1e-3
PATIENCE_S = 60
QUESTION = [
    ("system", "You are brief."),
    ("user", "What is the capital of France?"),
    ("ai", "Paris."),
    ("user", "And of Italy?"),
]


@pytest.fixture(scope="module")
def chat(smollm_runtime: OffsetRuntime, make_offset: Any) -> ChatOffset:
    for seed, domain in enumerate(["one", "two"]):
        smollm_runtime.register(make_offset(smollm_runtime.backend.identity, domain, seed=seed, scale=0.1))
    return ChatOffset(model="smollm2-135m", runtime=smollm_runtime, max_tokens=8, logprobs=True, top_logprobs=2)


def assert_same_but_for_ties(reply: AIMessage, solo: AIMessage) -> None:
    found, expected = (message.response_metadata["logprobs"]["content"] for message in (reply, solo))
    for one, other in zip(found, expected, strict=False):
        if one["token"] != other["token"]:
            best, second = other["top_logprobs"]
            assert best["logprob"] - second["logprob"] < TIE, (reply.content, solo.content)
            return
    assert reply.content == solo.content


def test_the_base_answers_and_an_offset_changes_what_it_would_say(chat: ChatOffset) -> None:
    plain, offset = chat.invoke(QUESTION), chat.invoke(QUESTION, domain="one")

    assert "Rome" in plain.content
    assert plain.usage_metadata["input_tokens"] == offset.usage_metadata["input_tokens"]
    first, changed = (m.response_metadata["logprobs"]["content"][0]["top_logprobs"] for m in (plain, offset))
    assert first != changed


def test_a_batch_of_different_domains_equals_solo_runs(chat: ChatOffset) -> None:
    domains = ("one", "two", None)
    solo = {str(domain): chat.invoke(QUESTION, domain=domain) for domain in domains}

    together = RunnableParallel({str(domain): chat.for_domain(domain) for domain in domains}).invoke(QUESTION)

    for domain, reply in together.items():
        assert reply.response_metadata["model_name"] == solo[domain].response_metadata["model_name"]
        assert_same_but_for_ties(reply, solo[domain])


LONG = [("user", "Write a long story about the sea.")]
EIGHT = ["art", "biology", "cooking", "drama", "economics", "film", "geology", "history"]


@pytest.fixture(scope="module")
def eight(smollm_runtime: OffsetRuntime, make_offset: Any) -> ChatOffset:
    for seed, domain in enumerate(EIGHT):
        smollm_runtime.register(make_offset(smollm_runtime.backend.identity, domain, seed=seed, scale=0.1))
    return ChatOffset(model="smollm2-135m", runtime=smollm_runtime, max_tokens=8, logprobs=True, top_logprobs=2)


@pytest.fixture(scope="module")
def solo(eight: ChatOffset) -> dict[str, AIMessage]:
    return {domain: eight.invoke(LONG, domain=domain) for domain in EIGHT}


@pytest.fixture
def batches(eight: ChatOffset, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each pass held. The first waits until all eight have asked."""
    runtime, sizes, all_asked = eight.load_runtime(), list[int](), threading.Event()
    forward, submit, asked = runtime.backend.forward, runtime.engine.submit, list[Any]()

    def noted(*request: Any) -> Any:
        ticket = submit(*request)
        asked.append(request)
        if len(asked) == len(EIGHT):
            all_asked.set()
        return ticket

    def held(chunks: Any) -> Any:
        assert all_asked.wait(PATIENCE_S), f"only {len(asked)} asked at the same time"
        sizes.append(len(chunks))
        return forward(chunks)

    monkeypatch.setattr(runtime.engine, "submit", noted)
    monkeypatch.setattr(runtime.backend, "forward", held)
    return sizes


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_eight_branches_in_eight_domains_share_a_batch_stream_interleaved_and_equal_solo_runs(
    eight: ChatOffset, solo: dict[str, AIMessage], batches: list[int], way: str
) -> None:
    builder = StateGraph(MessagesState)
    for domain in EIGHT:
        builder.add_node(domain, agent_node(domain, eight.for_domain(domain)))
        builder.add_edge(START, domain)
    graph = builder.compile()
    question: Any = {"messages": LONG}
    settings: Any = {"config": {"max_concurrency": len(EIGHT) + 1}, "stream_mode": ["messages", "values"]}

    if way == "sync":
        parts = list(graph.stream(question, **settings))
    else:
        parts = [part async for part in graph.astream(question, **settings)]

    authors = [data[1]["agent"] for mode, data in parts if mode == "messages" and data[0].content]
    [*_, last] = [data["messages"] for mode, data in parts if mode == "values"]
    switches = sum(before != after for before, after in pairwise(authors))
    assert max(batches) == len(EIGHT)
    # One after the other would be seven.
    assert switches > 2 * len(EIGHT)
    replies = {message.name: message for message in last if message.name}
    assert sorted(replies) == EIGHT
    for domain, reply in replies.items():
        assert reply.response_metadata["domain"] == domain
        assert_same_but_for_ties(reply, solo[domain])


async def test_a_stream_from_the_event_loop_equals_the_whole_reply(chat: ChatOffset) -> None:
    chunks = [chunk async for chunk in chat.astream(QUESTION, domain="one")]

    assert "".join(str(chunk.content) for chunk in chunks) == chat.invoke(QUESTION, domain="one").content


def test_logprob_tokens_spell_the_reply_spaces_included(chat: ChatOffset) -> None:
    reply = chat.invoke("Count to five.")

    assert "".join(entry["token"] for entry in reply.response_metadata["logprobs"]["content"]) == reply.content


def test_plain_text_is_continued(smollm_runtime: OffsetRuntime) -> None:
    llm = OffsetLLM(model="smollm2-135m", runtime=smollm_runtime, max_tokens=4)

    assert "Paris" in llm.invoke("The capital of France is")
