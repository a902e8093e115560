"""The JSON object of one tool call, read character by character: its name, and how far its arguments have come."""

from __future__ import annotations

import json
from typing import Any

_CLOSING = {"{": "}", "[": "]"}
# Of what stands outside of texts in JSON: numbers, true, false, null.
_SCALAR = frozenset("+-.0123456789eEtrufalsn")
_ARGUMENTS = ("arguments", "parameters")
# With what the object of a call begins; another key says that it is none.
_KEYS = frozenset({*_ARGUMENTS, "name", "id", "type", "function"})


class CallJson:
    """One JSON object on its way. `name` given: the object is the arguments alone.

    `complete`: its last brace has been read. `broken`: no JSON can begin like this, or a key comes twice.
    """

    def __init__(self, name: str | None = None) -> None:
        self.raw = ""
        self.complete = False
        self.broken = False
        self._name = name
        self._bare = name is not None
        self._open: list[str] = []
        self._in_text = self._escaped = False
        self._text_begin = 0
        # Of the outermost object: the key whose value comes, or none; and where values begin and end.
        self._key: str | None = None
        self._begins: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    @property
    def foreign(self) -> bool:
        """Whether it has a key that no call has."""
        return not self._bare and not self._begins.keys() <= _KEYS

    @property
    def name(self) -> str | None:
        """The name of the tool, once it has been read."""
        return self._name

    @property
    def arguments(self) -> str:
        """The JSON text of the arguments, as far as it has come, where it is an object; empty before."""
        if self._bare:
            return self.raw
        key = next((key for key in self._begins if key in _ARGUMENTS), None)
        if key is None or self.raw[self._begins[key]] != "{":
            return ""
        return self.raw[self._begins[key] : self._ends.get(key)]

    def feed(self, char: str) -> None:
        """Read the next character."""
        at = len(self.raw)
        self.raw += char
        if self._in_text:
            self._feed_text(char, at)
        elif char == '"':
            self._in_text, self._text_begin = True, at
            self._begin(at)
        elif char in _CLOSING:
            self._begin(at)
            self._open.append(_CLOSING[char])
        elif char in "}]":
            self._close(char, at)
        elif char == ",":
            if len(self._open) == 1:
                self._end(at)
                self._key = None
        elif char in _SCALAR:
            self._begin(at)
        elif char != ":" and not char.isspace():
            self.broken = True

    def call(self) -> tuple[str, dict[str, Any]]:
        """The name and the arguments of a complete object; `ValueError` says in words why it is no call."""
        try:
            # Models break lines within texts, which JSON does not allow and cannot mean anything else.
            found = json.loads(self.raw, strict=False)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the call is no JSON: {error}") from error
        if self._bare:
            assert self._name is not None
            return self._name, found
        if isinstance(found.get("function"), dict):
            found = found["function"]
        name = found.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError("the call has no name")
        arguments: Any = next((found[key] for key in _ARGUMENTS if key in found), {})
        if isinstance(arguments, str):
            arguments = _decoded(arguments)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments are a {type(arguments).__name__}; expected an object")
        return name, arguments

    def _feed_text(self, char: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_text = False
            if len(self._open) == 1:
                self._text_ended(at + 1)

    def _text_ended(self, stop: int) -> None:
        if self._key is not None:
            self._end(stop)
            return
        key = self._decoded(self._text_begin, stop)
        if key is None or key in self._begins or (key in _ARGUMENTS and not self._begins.keys().isdisjoint(_ARGUMENTS)):
            self.broken = True
        else:
            self._key = key

    def _begin(self, at: int) -> None:
        if len(self._open) == 1 and self._key is not None:
            self._begins.setdefault(self._key, at)

    def _end(self, stop: int) -> None:
        if self._key is None or self._key not in self._begins or self._key in self._ends:
            return
        self._ends[self._key] = stop
        if self._key == "name" and not self._bare:
            self._name = self._decoded(self._begins["name"], stop)

    def _close(self, char: str, at: int) -> None:
        if not self._open or self._open[-1] != char:
            self.broken = True
            return
        if len(self._open) == 1:
            self._end(at)
        self._open.pop()
        if len(self._open) == 1:
            self._end(at + 1)
        self.complete = not self._open

    def _decoded(self, begin: int, stop: int) -> str | None:
        try:
            found = json.loads(self.raw[begin:stop], strict=False)
        except ValueError:
            return None
        return found if isinstance(found, str) and found else None


def _decoded(text: str) -> Any:
    try:
        return json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are a text that holds no JSON: {error}") from error
