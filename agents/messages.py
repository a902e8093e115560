"""From LangChain messages to the messages of a chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from offset_runtime.errors import InvalidRequestError

_CHAT_ROLES = {"human": "user", "ai": "assistant", "developer": "system"}
_TEXT_BLOCKS = frozenset({"text", "input_text", "output_text"})
# What a model thought, and calls that also stand in `AIMessage.tool_calls`, are no text of the turn.
_UNSPOKEN_BLOCKS = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call"}
)


def template_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Lay `messages` out as chat templates take them: dicts with `role` and `content` (a string).

    Many templates accept one system message, at the front, and strictly alternating turns. So all
    system messages are merged into one in front, and consecutive messages of one role into one, with a
    blank line between. A message's `name` and blocks of thought are not shown to the model.

    Raises `InvalidRequestError` for an empty list, for content other than text, and for messages that
    are no chat turns.
    """
    return template_turns(messages, ())[0]


def template_turns(
    messages: Sequence[BaseMessage], apart: Collection[int]
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """As `template_messages`, with the messages `apart` (indices) merged with no other.

    Returns the turns, and of those messages the index by that of their turn. Raises what `template_messages` raises.
    """
    if not messages:
        raise InvalidRequestError("no messages were given; a chat model needs at least one, for example a user's")
    turns = [_turn(message, place) for place, message in enumerate(messages, start=1)]
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    merged: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(filter(None, system))}] if system else []
    sources: dict[int, int] = {}
    for index, turn in enumerate(turns):
        if turn["role"] == "system":
            continue
        if index in apart:
            sources[len(merged)] = index
            merged.append(turn)
        elif merged and len(merged) - 1 not in sources and _can_merge(merged[-1], turn):
            merged[-1]["content"] = "\n\n".join(filter(None, [merged[-1]["content"], turn["content"]]))
        else:
            merged.append(turn)
    return merged, sources


def _can_merge(last: Mapping[str, Any], turn: Mapping[str, Any]) -> bool:
    # A tool's answer belongs to one call, and a call is followed by its answer.
    return bool(last["role"] == turn["role"] != "tool") and "tool_calls" not in last and "tool_calls" not in turn


def _turn(message: BaseMessage, place: int) -> dict[str, Any]:
    content = _text(message.content, f"message {place} ({message.type})")
    match message:
        case SystemMessage():
            return {"role": "system", "content": content}
        case HumanMessage():
            return {"role": "user", "content": content}
        case AIMessage():
            calls = _tool_calls(message)
            return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        case ToolMessage():
            named = {"name": message.name} if message.name else {}
            return {"role": "tool", "content": content, "tool_call_id": message.tool_call_id, **named}
        case FunctionMessage():
            return {"role": "tool", "content": content, "name": message.name}
        case ChatMessage():
            return {"role": _CHAT_ROLES.get(message.role, message.role), "content": content}
    raise InvalidRequestError(
        f"message {place} is a {type(message).__name__}, which is no turn of a chat; "
        "expected system, human, AI, tool or chat messages"
    )


def _tool_calls(message: AIMessage) -> list[dict[str, Any]]:
    """The message's calls in the shape chat templates know, from `tool_calls` or from `tool_use` blocks."""
    calls = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    if not calls and isinstance(message.content, list):
        blocks = [block for block in message.content if isinstance(block, dict)]
        blocks = [block for block in blocks if block.get("type") in ("tool_use", "tool_call")]
        written = [block.get("input", block.get("args", {})) for block in blocks]
        calls = [(b.get("id"), b.get("name", ""), args) for b, args in zip(blocks, written, strict=True)]
    return [
        {"id": i, "type": "function", "function": {"name": name, "arguments": _plain(args)}} for i, name, args in calls
    ]


def _plain(arguments: Any) -> Any:
    """Arguments as JSON has them: tools may have been given dates and the like."""
    return json.loads(json.dumps(arguments, default=str))


def _text(content: str | Sequence[str | Mapping[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    parts = [block if isinstance(block, str) else _block_text(block, where) for block in content]
    return "\n".join(part for part in parts if part)


def _block_text(block: Mapping[str, Any], where: str) -> str:
    kind = str(block.get("type"))
    if kind in _TEXT_BLOCKS:
        return str(block.get("text") or "")
    if kind in _UNSPOKEN_BLOCKS:
        return ""
    if kind == "tool_result":
        result = block.get("content") or ""
        return _text(result if isinstance(result, str | list) else json.dumps(result, default=str), where)
    raise InvalidRequestError(
        f"{where} holds a content block of type {kind!r}, but the model reads text only; "
        "send the content as text blocks, for example a description"
    )
