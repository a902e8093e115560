"""LangChain messages as chat templates take them."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from offset_runtime.agents import ChatOffset
from offset_runtime.agents.messages import template_messages
from offset_runtime.errors import InvalidRequestError

CALL = {"id": "1", "name": "add", "args": {"a": 1}}
TEMPLATE_CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        (SystemMessage("a"), {"role": "system", "content": "a"}),
        (HumanMessage("a", name="ann"), {"role": "user", "content": "a"}),
        (AIMessage("a", name="bot"), {"role": "assistant", "content": "a"}),
        (AIMessageChunk("a"), {"role": "assistant", "content": "a"}),
        (ToolMessage("3", tool_call_id="1"), {"role": "tool", "content": "3", "tool_call_id": "1"}),
        (
            ToolMessage("no", tool_call_id="1", name="add", status="error"),
            {"role": "tool", "content": "no", "tool_call_id": "1", "name": "add"},
        ),
        (ChatMessage("a", role="user"), {"role": "user", "content": "a"}),
        (ChatMessage("a", role="developer"), {"role": "system", "content": "a"}),
        (AIMessage("", tool_calls=[CALL]), {"role": "assistant", "content": "", "tool_calls": [TEMPLATE_CALL]}),
    ],
)
def test_each_kind_of_message_has_its_role(message: BaseMessage, turn: dict[str, Any]) -> None:
    assert template_messages([message]) == [turn]


def test_turns_of_one_role_in_a_row_become_one() -> None:
    messages = [HumanMessage("a"), HumanMessage("b"), AIMessage("c"), AIMessage("d"), HumanMessage("e")]

    assert template_messages(messages) == [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c\n\nd"},
        {"role": "user", "content": "e"},
    ]


def test_system_messages_become_one_in_front() -> None:
    messages = [HumanMessage("a"), SystemMessage("one"), AIMessage("b"), SystemMessage("two"), HumanMessage("c")]

    assert [(turn["role"], turn["content"]) for turn in template_messages(messages)] == [
        ("system", "one\n\ntwo"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]


def test_tool_answers_and_calls_are_kept_apart() -> None:
    calls = AIMessage("", tool_calls=[CALL])
    messages = [calls, ToolMessage("3", tool_call_id="1"), ToolMessage("4", tool_call_id="2"), AIMessage("x"), calls]

    assert [turn["role"] for turn in template_messages(messages)] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
        "assistant",
    ]


def test_text_blocks_are_read_and_thoughts_left_out() -> None:
    human = HumanMessage(["plain", {"type": "text", "text": "block", "cache_control": {"type": "ephemeral"}}])
    ai = AIMessage([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "said"}])

    assert [turn["content"] for turn in template_messages([human, ai])] == ["plain\nblock", "said"]


def test_anthropics_tool_blocks_are_read() -> None:
    ai = AIMessage([{"type": "text", "text": "so"}, {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}])
    human = HumanMessage([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "2"}]}])

    assert template_messages([ai, human]) == [
        {"role": "assistant", "content": "so", "tool_calls": [TEMPLATE_CALL]},
        {"role": "user", "content": "2"},
    ]


@pytest.mark.parametrize("kind", ["image", "image_url", "audio", "file", "unheard_of"])
def test_other_blocks_are_refused_with_their_place(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"message 2 \(human\) holds a content block of type '{kind}'"):
        template_messages([SystemMessage("a"), HumanMessage([{"type": kind}])])


def test_what_is_no_turn_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="message 1 is a RemoveMessage"):
        template_messages([RemoveMessage(id="1")])


def test_an_unknown_role_is_refused(law: ChatOffset) -> None:
    with pytest.raises(InvalidRequestError, match="unknown message role 'narrator'"):
        law.invoke([ChatMessage("a", role="narrator")])


def test_an_empty_list_is_refused(law: ChatOffset) -> None:
    with pytest.raises(InvalidRequestError, match="no messages were given"):
        law.invoke([])


def test_the_model_reads_what_the_template_writes(scripted: Any) -> None:
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return "ok"

    scripted(script).invoke([("system", "be brief"), ("user", "hello"), ("ai", "yes"), ("user", "go on")])

    assert prompts[0] == "system\nbe brief\nuser\nhello\nassistant\nyes\nuser\ngo on\nassistant\n"
