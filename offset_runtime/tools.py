"""Tools that a reply may call, and the calls that were read from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offset_runtime.constrain import Constraint
from offset_runtime.errors import ConstraintError


@dataclass(frozen=True, slots=True)
class Tool:
    """What a model is told of a tool. `parameters`: the JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def spec(self) -> dict[str, Any]:
        """The tool as chat templates take it, which is OpenAI's shape."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @property
    def schema(self) -> dict[str, Any]:
        """What a call is held to: `parameters`, and that they are an object where they do not say so."""
        return {"type": "object", **self.parameters}

    def check(self) -> None:
        """Raise `ConstraintError` for parameters that a call cannot be held to while it is decoded."""
        kind = self.schema["type"]
        if kind != "object":
            raise ConstraintError(
                f"tool {self.name!r}: its parameters are of type {kind!r}; expected an object that names each of them, "
                'such as {"type": "object", "properties": {…}}'
            )
        try:
            Constraint.json_schema({"const": self.name})
            Constraint.json_schema(self.schema)
        except ConstraintError as error:
            raise ConstraintError(f"tool {self.name!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Part of a call on its way: `name` on the first piece of a call only, `arguments` a part of their JSON text."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A valid call; `index` is its place among the reply's."""

    index: int
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """What was meant as a call and is none. `text`: the arguments as written, or all of it where it has no name."""

    index: int
    name: str | None
    text: str
    error: str
