"""What a call asks of its reply: tools it may or must call, a JSON schema, or any other constraint."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.tools import BaseTool, create_schema_from_function
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from offset_runtime.agents.tool_messages import ToolMessages
from offset_runtime.backends.base import Tokenizer
from offset_runtime.constrain import Constraint
from offset_runtime.errors import InvalidRequestError, nearest_hint
from offset_runtime.tool_formats import ToolFormat
from offset_runtime.tools import Tool

# Arguments of a call, as OpenAI names them, and `constraint`.
FORM_ARGUMENTS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "response_format", "constraint", "strict"})

_AUTO, _NONE, _ANY, _ONE = "auto", "none", "any", "one"
_CHOICES: Mapping[Any, str] = {None: _AUTO, False: _AUTO, True: _ANY, "required": _ANY} | {
    name: name for name in (_AUTO, _NONE, _ANY)
}
# Of tools given as dicts: OpenAI's, Anthropic's, and that of a JSON schema.
_OWN_TYPES = ("function", "custom", "object")
_RESPONSE_TYPES = ("text", "json_object", "json_schema")

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What a reply must be. `choice`: ``"auto"``, ``"none"``, ``"any"``, or ``"one"``: a call of the tool `only`.

    `parallel`: whether more than the first call of a reply counts. `answer`: the JSON schema of a reply that calls no
    tool, or None for any text; `told`: whether the system prompt says so. `constraint`: what the whole reply must be,
    which leaves no room for the others.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = _AUTO
    only: str | None = None
    parallel: bool = True
    answer: Mapping[str, Any] | None = None
    told: bool = False
    constraint: Constraint | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Read the arguments of a call that are in `FORM_ARGUMENTS`; those of other names are passed over.

        Raises `InvalidRequestError` for what does not fit together.
        """
        strict = arguments.get("strict")
        _check_switch("strict", strict)
        parallel = arguments.get("parallel_tool_calls")
        _check_switch("parallel_tool_calls", parallel)
        tools = _tools(arguments.get("tools") or (), strict)
        choice, only = _choice(arguments.get("tool_choice"), [tool.name for tool in tools])
        answer, told = _answer(arguments.get("response_format"), strict)
        constraint = arguments.get("constraint")
        _check_constraint(constraint, tools, answer)
        return cls(tools if choice != _NONE else (), choice, only, parallel is not False, answer, told, constraint)

    @property
    def forced(self) -> tuple[Tool, ...]:
        """The tools of which the reply must call one."""
        if self.choice == _ANY:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name == self.only)

    @property
    def instructions(self) -> str:
        """What the system prompt has to say of the answer; empty where there is nothing."""
        if not self.told:
            return ""
        return f"Answer with JSON of this schema:\n{json.dumps(self.answer, ensure_ascii=False)}"

    def constrain(self, written: ToolFormat | None, tokenizer: Tokenizer) -> Constraint | None:
        """What the reply is held to while it is decoded, on one model; None: nothing. `written`: how it writes calls.

        Raises `ConstraintError` for a schema that a reply cannot be held to.
        """
        if self.constraint is not None:
            return self.constraint
        if written is not None and self.forced:
            return written.forced(self.forced, tokenizer)
        if self.answer is None:
            return None
        if written is not None and self.tools:
            return written.forced(self.tools, tokenizer, answer=self.answer)
        return Constraint.json_schema(dict(self.answer))

    def calls(self, written: ToolFormat, tokenizer: Tokenizer) -> ToolMessages | None:
        """What finds the calls in one reply; None where it may have none."""
        if not self.tools:
            return None
        names = [tool.name for tool in self.tools]
        if self.answer is not None and written.marks(tokenizer):
            # Then JSON without a marker is the answer, even where it looks like a call.
            names = []
        return ToolMessages(written.reader(names), parallel=self.parallel)

    def check(self) -> None:
        """Raise what `constrain` would, before there is a model."""
        for tool in self.forced or (self.tools if self.answer is not None else ()):
            tool.check()
        if self.answer is not None:
            Constraint.json_schema(dict(self.answer))


def tool_spec(tool: ToolLike) -> dict[str, Any]:
    """A tool in OpenAI's shape; `InvalidRequestError` for what is none, or runs at another provider."""
    if isinstance(tool, Mapping) and tool.get("type", "object") not in _OWN_TYPES:
        raise _elsewhere(tool["type"])
    try:
        spec = convert_to_openai_tool(tool)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise InvalidRequestError(
            f"a tool of type {type(tool).__name__} cannot be used: {str(error).strip()}. Expected a function with type "
            "hints and a docstring, a LangChain tool, a Pydantic class, or an OpenAI tool (dict)"
        ) from error
    function = spec.get("function")
    named = isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])
    if spec.get("type") != "function" or not named:
        raise _elsewhere(spec.get("type"))
    own = _own_schema(tool)
    if _holds_itself(own):
        # LangChain writes references out, and of a class that holds itself leaves nothing.
        told = {key: value for key, value in own.items() if key != "description"}
        return {**spec, "function": {**spec["function"], "parameters": _untitled(told)}}
    return spec


def _elsewhere(kind: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"a tool of type {kind!r} cannot be used: such tools run at their provider, and this model runs here; expected "
        "a function with a name, or a LangChain tool that does the same"
    )


def _own_schema(tool: ToolLike) -> dict[str, Any]:
    """The JSON schema of the Pydantic class that says what a tool takes; empty where none does."""
    found: Any = tool
    if isinstance(tool, BaseTool):
        found = tool.tool_call_schema
    elif callable(tool) and not isinstance(tool, type):
        found = create_schema_from_function(tool.__name__, tool, parse_docstring=True, include_injected=False)
    return found.model_json_schema() if isinstance(found, type) and issubclass(found, BaseModel) else {}


def _holds_itself(schema: Mapping[str, Any]) -> bool:
    """Whether a part of a schema refers to itself, by itself or through others."""
    uses = {f"#/$defs/{name}": set(_references(part)) for name, part in schema.get("$defs", {}).items()}
    for _ in uses:
        uses = {name: found.union(*(uses.get(other, ()) for other in found)) for name, found in uses.items()}
    return any(name in found for name, found in uses.items())


def _references(schema: Any) -> Iterator[str]:
    for key, value in schema.items() if isinstance(schema, Mapping) else enumerate(schema):
        if key == "$ref" and isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list):
            yield from _references(value)


def _tools(given: Sequence[ToolLike], strict: bool | None) -> tuple[Tool, ...]:
    tools = []
    for each in given:
        function = tool_spec(each)["function"]
        parameters = _parameters(function)
        if function.get("strict", strict) is not False:
            parameters = closed(parameters)
        tools.append(Tool(function["name"], function.get("description") or "", parameters))
    named: dict[str, Tool] = {}
    for tool in tools:
        known = named.setdefault(tool.name, tool)
        # A class and the schema that was made of it are one tool.
        if _untitled(known.parameters) != _untitled(tool.parameters):
            raise InvalidRequestError(f"two tools have the name {tool.name!r}; give each its own name")
    return tuple(named.values())


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = function.get("parameters") or {"type": "object", "properties": {}}
    problem = "" if isinstance(found, Mapping) else f"are of type {type(found).__name__}"
    try:
        json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"cannot be written as JSON ({error})"
    if problem:
        raise InvalidRequestError(
            f"the parameters of tool {function['name']!r} {problem}; expected a JSON schema of an object, for example "
            '{"type": "object", "properties": {"city": {"type": "string"}}}'
        )
    return found


def _untitled(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _untitled(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}


def _choice(value: Any, names: Sequence[str]) -> tuple[str, str | None]:
    """The choice, and the name of the only tool where it is one."""
    name = _named(value)
    if isinstance(name, str) and name in names:
        return _ONE, name
    if name not in _CHOICES:
        known = [_AUTO, _NONE, _ANY, *names]
        raise InvalidRequestError(
            f"tool_choice={value!r} names no tool; expected one of {', '.join(known)}{nearest_hint(str(name), known)}"
        )
    choice = _CHOICES[name]
    if choice == _ANY and not names:
        raise InvalidRequestError(f"tool_choice={value!r} asks for a call, but no tools were given; give at least one")
    return choice, None


def _named(value: Any) -> Any:
    """The name within OpenAI's ``{"type": "function", "function": {"name": …}}``, or Anthropic's flat form."""
    if not isinstance(value, dict):
        return value if isinstance(value, str | bool | None) else repr(value)
    function = value.get("function")
    found = function.get("name") if isinstance(function, dict) else value.get("name", value.get("type"))
    return found if isinstance(found, str) else repr(value)


def _answer(response_format: Any, strict: bool | None) -> tuple[Mapping[str, Any] | None, bool]:
    """The JSON schema of the answer, and whether the model is told of it."""
    if response_format is None:
        return None, False
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind not in _RESPONSE_TYPES:
        raise InvalidRequestError(
            f"response_format={response_format!r} is of no known type; expected one of {', '.join(_RESPONSE_TYPES)}, "
            'for example {"type": "json_schema", "json_schema": {"name": "answer", "schema": {…}}}. '
            "with_structured_output makes one of a Pydantic class."
        )
    if kind == "text":
        return None, False
    # As servers of llama.cpp have it, JSON without a word of it in the prompt may have a schema too.
    described = response_format if kind == "json_object" else response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if kind == "json_object" and schema is None:
        return {"type": "object"}, False
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(
            f"response_format is of type {kind} and its schema is {schema!r}; expected "
            '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {…}}}'
        )
    loose = described.get("strict", strict) is False
    return schema if loose else closed(schema), kind == "json_schema"


def closed(schema: Any) -> Any:
    """A JSON schema whose objects have no property that it does not name, unless it says what those may be.

    One that puts an object together from several schemas stays as it is: no one of them may close it.
    """
    return schema if _combines(schema) else _closed(schema)


def _combines(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, Mapping):
        return False
    parts = [key for key in ("properties", "allOf", "anyOf", "oneOf", "$ref") if key in schema]
    return len(parts) > 1 or parts == ["allOf"] or any(map(_combines, schema.values()))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {keyword: _closed_under(keyword, value) for keyword, value in schema.items()}
    # Of several types one may be the object's.
    if isinstance(schema.get("properties"), Mapping) and "object" in schema.get("type", "object"):
        result.setdefault("additionalProperties", False)
    return result


def _closed_under(keyword: str, value: Any) -> Any:
    # Those are data, whatever they look like.
    if keyword in ("enum", "const", "default", "examples"):
        return value
    if keyword in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
        return {name: _closed(inner) for name, inner in value.items()}
    return _closed(value)


def _check_switch(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={value!r} is of type {type(value).__name__}; expected True, False or None")


def _check_constraint(constraint: object, tools: Collection[Tool], answer: object) -> None:
    if constraint is None:
        return
    if not isinstance(constraint, Constraint):
        raise InvalidRequestError(
            f"constraint={constraint!r} is of type {type(constraint).__name__}; expected a Constraint, for example "
            'Constraint.regex("yes|no")'
        )
    if tools or answer is not None:
        what = "tools" if tools else "a response_format"
        raise InvalidRequestError(f"constraint and {what} were given; a reply can be held to one of them only")
