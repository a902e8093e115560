"""The chat model on the real base: what only a real model can show."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableParallel

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset, OffsetLLM

pytestmark = pytest.mark.real_model

# Where the two best logits lie this close, float sums of another batch shape may pick the other.
TIE = 1e-3
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


async def test_a_stream_from_the_event_loop_equals_the_whole_reply(chat: ChatOffset) -> None:
    chunks = [chunk async for chunk in chat.astream(QUESTION, domain="one")]

    assert "".join(str(chunk.content) for chunk in chunks) == chat.invoke(QUESTION, domain="one").content


def test_logprob_tokens_spell_the_reply_spaces_included(chat: ChatOffset) -> None:
    reply = chat.invoke("Count to five.")

    assert "".join(entry["token"] for entry in reply.response_metadata["logprobs"]["content"]) == reply.content


def test_plain_text_is_continued(smollm_runtime: OffsetRuntime) -> None:
    llm = OffsetLLM(model="smollm2-135m", runtime=smollm_runtime, max_tokens=4)

    assert "Paris" in llm.invoke("The capital of France is")
