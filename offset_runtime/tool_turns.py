"""Chat messages with tool calls, as the chat template of a model can show them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offset_runtime.backends.base import Message, Tokenizer
from offset_runtime.tool_formats import ToolFormat, knows_tools
from offset_runtime.tools import Tool

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


@dataclass(frozen=True, slots=True)
class ToolTurns:
    """`messages` for the template, and the `specs` of tools where it takes them."""

    messages: Sequence[Message]
    specs: Sequence[Mapping[str, Any]] | None = None


def tool_turns(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], form: ToolFormat) -> ToolTurns:
    """Lay out tools, calls and results.

    A template that knows tools is given them as they are. For one that does not, the system prompt says what tools
    there are, calls stand as the model would write them, and results are told by a user's turn.
    """
    if not tools and not any(_is_of_tools(message) for message in messages):
        return ToolTurns(messages)
    if knows_tools(tokenizer):
        shown = [_with_mistral_ids(message) for message in messages] if form.name == "mistral" else messages
        return ToolTurns(shown, [tool.spec() for tool in tools] or None)
    turns: list[Message] = []
    if tools and messages[0].get("role") != "system":
        turns.append({"role": "system", "content": form.instructions(tools)})
    for at, message in enumerate(messages):
        turn = _plain(message, form)
        if at == 0 and tools and message.get("role") == "system":
            turn = {**turn, "content": _joined(turn["content"], form.instructions(tools))}
        if turns and turn["role"] == "user" == turns[-1]["role"]:
            turns[-1] = {**turns[-1], "content": _joined(turns[-1]["content"], turn["content"])}
        else:
            turns.append(turn)
    return ToolTurns(turns)


def _is_of_tools(message: Message) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _plain(message: Message, form: ToolFormat) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content', '')}\n</tool_response>"}
    if message.get("tool_calls"):
        calls = [(call["function"]["name"], _arguments(call["function"])) for call in message["tool_calls"]]
        return {"role": message.get("role"), "content": _joined(message.get("content"), form.written(calls), "\n")}
    return message


def _arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = function.get("arguments") or {}
    if not isinstance(found, str):
        return dict(found)
    try:
        read = json.loads(found)
    except ValueError:
        return {"text": found}
    return read if isinstance(read, dict) else {"text": found}


def _with_mistral_ids(message: Message) -> Message:
    """Mistral's templates take ids of nine letters and digits alone."""
    changed = dict(message)
    if message.get("tool_call_id"):
        changed["tool_call_id"] = _mistral_id(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _mistral_id(call.get("id"))} for call in message["tool_calls"]]
    return changed


def _mistral_id(given: object) -> str:
    text = str(given)
    return text if _MISTRAL_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def _joined(first: str | None, second: str, between: str = "\n\n") -> str:
    return between.join(part for part in (first, second) if part)
