"""How a base model writes tool calls, and how one that was never told of tools is told of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from offset_runtime.backends.base import Tokenizer
from offset_runtime.constrain import JSON_STYLE, Constraint
from offset_runtime.errors import InvalidRequestError, PromptFormatError, nearest_hint
from offset_runtime.tool_reader import CallReader, Markers
from offset_runtime.tools import Tool

ToolFormatName = Literal["hermes", "llama3", "mistral", "granite", "json"]

# By what stands in a model's chat template. Granite's earlier templates have Hermes' marker too, so it comes first.
_TOLD_BY: tuple[tuple[str, ToolFormatName], ...] = (
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("[TOOL_CALLS]", "mistral"),
)
_MARKERS: Mapping[ToolFormatName, Markers] = {
    "hermes": Markers(("<tool_call>",), ("</tool_call>",)),
    "llama3": Markers(("<|python_tag|>",)),
    "mistral": Markers(("[TOOL_CALLS]",), named=True),
    "granite": Markers(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
    "json": Markers(),
}
# One whose text is a marker of the format is written as that token; in quotes it would be spelt out.
_Part = tuple[Literal["text", "mark", "call"], str]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls. `parts`: what a single call consists of; `arguments`: the key they stand under."""

    name: ToolFormatName
    parts: tuple[_Part, ...]
    arguments: str = "arguments"
    listed: bool = False
    # The name stands before the object, which is the arguments alone.
    named: bool = False

    def reader(self, names: Collection[str]) -> CallReader:
        """A reader of one reply; `names`: the tools that were offered."""
        return CallReader(names, _MARKERS[self.name])

    def marks(self, tokenizer: Tokenizer) -> bool:
        """Whether calls begin with a marker that a reply's text shows: special tokens are left out of it."""
        marks = [text for kind, text in self.parts if kind == "mark"]
        return bool(marks) and tokenizer.decode(tokenizer.encode(marks[0])) == marks[0]

    def forced(
        self, tools: Sequence[Tool], tokenizer: Tokenizer, *, answer: Mapping[str, Any] | None = None
    ) -> Constraint:
        """A reply that is one call of one of `tools`, its arguments of their schema, or JSON of the schema `answer`.

        Raises `ConstraintError` for a schema that a reply cannot be held to.
        """
        rules = []
        for at, tool in enumerate(tools):
            tool.check()
            rules.append(f"call{at}: {self._rule(tool, tokenizer)}")
        choices = [f"call{at}" for at in range(len(tools))]
        if answer is not None:
            rules.append(f"answer: %json {_json_rule(answer)}")
            choices.append("answer")
        return Constraint.lark("\n".join([f"start: {' | '.join(choices)}", *rules]))

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, each a name and arguments, as a reply has them."""
        if self.listed:
            bodies = ["[" + ", ".join(self._body(*call) for call in calls) + "]"]
        else:
            bodies = [self._body(*call) for call in calls]
        return "\n".join("".join(body if kind == "call" else text for kind, text in self._around()) for body in bodies)

    def instructions(self, tools: Sequence[Tool]) -> str:
        """What the system prompt says to a model whose chat template knows no tools."""
        specs = "\n".join(_dumps(tool.spec()["function"]) for tool in tools)
        example = self.written([(tools[0].name, {"<parameter>": "<value>"})])
        return (
            f"You can call these tools. Each line is one tool, its parameters as JSON schema:\n{specs}\n\n"
            "To call a tool, reply with its name and arguments in exactly this form, and nothing else:\n"
            f"{example}\n"
            "You are then given what it returned. If no tool is needed, reply in words."
        )

    def _around(self) -> list[_Part]:
        # A list has its brackets from `written`.
        return [part for part in self.parts if part[1] not in ("[", "]")]

    def _body(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self.named:
            return f"{name}[ARGS]{_dumps(arguments)}"
        return _dumps({"name": name, self.arguments: arguments})

    def _rule(self, tool: Tool, tokenizer: Tokenizer) -> str:
        return " ".join(self._symbol(kind, text, tool, tokenizer) for kind, text in self.parts)

    def _symbol(self, kind: str, text: str, tool: Tool, tokenizer: Tokenizer) -> str:
        if kind == "text":
            return json.dumps(text)
        if kind == "mark":
            return _mark(text, tokenizer)
        if self.named:
            return f"{json.dumps(tool.name)} {_mark('[ARGS]', tokenizer)} %json {_json_rule(tool.schema)}"
        # Where the schema refers to parts of its own, they lie deeper now.
        parameters = _moved(tool.schema, f"#/properties/{self.arguments}")
        schema = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, self.arguments: parameters},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }
        return f"%json {_json_rule(schema)}"


_CALL: _Part = ("call", "")
_FORMATS: Mapping[ToolFormatName, ToolFormat] = {
    "hermes": ToolFormat(
        "hermes", (("mark", "<tool_call>"), ("text", "\n"), _CALL, ("text", "\n"), ("mark", "</tool_call>"))
    ),
    "llama3": ToolFormat("llama3", (_CALL,), arguments="parameters"),
    "mistral": ToolFormat(
        "mistral", (("mark", "[TOOL_CALLS]"), ("text", " "), ("text", "["), _CALL, ("text", "]")), listed=True
    ),
    "granite": ToolFormat("granite", (("mark", "<|tool_call|>"), ("text", "["), _CALL, ("text", "]")), listed=True),
    "json": ToolFormat("json", (_CALL,)),
}
_MISTRAL_NAMED = ToolFormat("mistral", (("mark", "[TOOL_CALLS]"), _CALL), named=True)


def tool_format(tokenizer: Tokenizer, override: ToolFormatName | None = None) -> ToolFormat:
    """The format of a model, told by its chat template; Hermes' where the template knows no tools.

    Raises `InvalidRequestError` for an `override` that is no format.
    """
    template = tokenizer.chat_template or ""
    if override is not None and override not in _FORMATS:
        known = get_args(ToolFormatName)
        hint = nearest_hint(str(override), known)
        raise InvalidRequestError(f"tool_format={override!r} is unknown; expected one of {', '.join(known)}{hint}")
    found = override or next((name for mark, name in _TOLD_BY if mark in template), None)
    if found is None:
        found = "json" if knows_tools(tokenizer) else "hermes"
    return _MISTRAL_NAMED if found == "mistral" and "[ARGS]" in template else _FORMATS[found]


def knows_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template shows tools to the model."""
    if not tokenizer.has_chat_template:
        return False
    messages = [{"role": "user", "content": "a"}]
    spec = Tool("a_tool", "A tool.", {"type": "object", "properties": {}}).spec()
    try:
        return "a_tool" in tokenizer.render_chat(messages, tools=[spec])
    except PromptFormatError:
        return False


def _mark(text: str, tokenizer: Tokenizer) -> str:
    ids = tokenizer.encode(text)
    return f"<[{ids[0]}]>" if len(ids) == 1 and len(text) > 1 else json.dumps(text)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_STYLE})


def _moved(schema: Any, root: str) -> Any:
    """`schema` with its references to ``#`` pointing to `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, root)
        for key, value in schema.items()
    }


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
