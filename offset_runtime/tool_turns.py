"""Chat messages with tools, calls and results, as the model's chat template takes them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offset_runtime.backends.base import Message, Tokenizer
from offset_runtime.errors import InvalidRequestError
from offset_runtime.tool_formats import ToolFormat, knows_tools, tool_format
from offset_runtime.tools import Tool, ToolCall

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_EXPECTED_CALL = '{"type": "function", "function": {"name": "search", "arguments": {"query": "news"}}}'


@dataclass(frozen=True, slots=True)
class ToolTurns:
    """`messages` for the template, and the `specs` of tools where it takes them."""

    messages: Sequence[Message]
    specs: Sequence[Mapping[str, Any]] | None = None


def tool_turns(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], form: ToolFormat | None = None
) -> ToolTurns:
    """The messages and the tools to render; calls in the model's own format where `form` is None.

    A template that knows tools takes both, in OpenAI's shape. For one that does not, all is put in words: tools in the
    system message, calls in the assistant's, results in a user's.

    Raises `InvalidRequestError` for tools of one name, and for calls in another shape than OpenAI's.
    """
    _check_tools(tools)
    calls = {index: _calls(message, index + 1) for index, message in enumerate(messages) if message.get("tool_calls")}
    if not (tools or calls or any(message["role"] == "tool" for message in messages)):
        return ToolTurns(messages)
    written = form or tool_format(tokenizer)
    if not knows_tools(tokenizer):
        return ToolTurns(_in_words(messages, calls, tools, written))
    adapted = [_adapted(m, calls.get(i, []), short_ids=written.name == "mistral") for i, m in enumerate(messages)]
    return ToolTurns(adapted, [tool.spec() for tool in tools] or None)


def _check_tools(tools: Sequence[Tool]) -> None:
    for tool in tools:
        if not isinstance(tool, Tool):
            raise InvalidRequestError(
                f"a tool is of type {type(tool).__name__}; expected offset_runtime.tools.Tool, "
                "with name, description and parameters"
            )
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"{names.count(name)} tools have the name {name!r}; expected one of each name")


def _calls(message: Message, place: int) -> list[ToolCall]:
    """The calls of an assistant's message; arguments as JSON text are read."""
    found = message["tool_calls"]
    if isinstance(found, str | bytes) or not isinstance(found, Sequence):
        raise _no_call(found, place)
    return [_call(call, index, place) for index, call in enumerate(found)]


def _call(call: object, index: int, place: int) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _no_call(call, place)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise _no_call(call, place) from None
    if not isinstance(arguments, Mapping):
        raise _no_call(call, place)
    return ToolCall(index, function["name"], dict(arguments))


def _no_call(found: object, place: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"tool_calls of message {place} hold {ascii(found)[:80]}; expected a list of calls such as {_EXPECTED_CALL}"
    )


def _adapted(message: Message, calls: Sequence[ToolCall], *, short_ids: bool) -> Message:
    """The message with its arguments as objects, which templates write as they see fit."""
    adapted = dict(message)
    if short_ids and "tool_call_id" in message:
        adapted["tool_call_id"] = _short_id(message["tool_call_id"])
    if calls:
        adapted["tool_calls"] = [
            {**given, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for given, call in zip(message["tool_calls"], calls, strict=True)
        ]
        if short_ids:
            for call in adapted["tool_calls"]:
                call["id"] = _short_id(call.get("id"))
    elif "tool_calls" in message:
        # An empty list says the same, and templates count on a first call.
        del adapted["tool_calls"]
    return adapted


def _short_id(found: object) -> str:
    """Mistral's templates refuse ids of another form; one id always gives the same."""
    text = str(found)
    return text if _MISTRAL_ID.fullmatch(text) else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def _in_words(
    messages: Sequence[Message], calls: Mapping[int, list[ToolCall]], tools: Sequence[Tool], written: ToolFormat
) -> list[Message]:
    told: list[Message] = []
    if tools:
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        told.append({"role": "system", "content": _joined(system, written.instructions(tools), "\n\n")})
    last = None
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if tools and index == 0 and role == "system":
            continue
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if last == "tool":
                told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{content}"}
                continue
            told.append({"role": "user", "content": content})
        elif role == "user" and last == "tool":
            # Many templates refuse two turns of one role.
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n\n{content}"}
        else:
            shown = [(call.name, call.arguments) for call in calls.get(index, ())]
            told.append({"role": role, "content": _joined(content, written.written(shown) if shown else "", "\n")})
        last = role
    return told


def _joined(first: str, second: str, between: str) -> str:
    return between.join(filter(None, [first, second]))
