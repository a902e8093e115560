"""Reads one tool call, character by character: an object with a name and arguments, or the arguments alone.

Nothing is ever raised for what a model wrote: a call that is no valid JSON ends where its brackets close.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from offset_runtime.tools import CallPiece, InvalidCall, ToolCall

_SPACE = frozenset(" \t\n\r")
_PAIRS = {"}": "{", "]": "["}
_ESCAPABLE = frozenset('"\\/bfnrtu')
# What may stand outside texts and brackets: numbers, true, false, null.
_BARE = frozenset("+-.,:") | _SPACE
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_CUT_OFF = "the reply ends within the call"

_Step = Literal["more", "end", "after", "bad"]


class _Value:
    """One JSON value, from its first character on; only its brackets and texts are looked at."""

    def __init__(self) -> None:
        self.text = ""
        self.in_text = False
        self._open: list[str] = []
        self._escaped = False

    @property
    def depth(self) -> int:
        return len(self._open)

    def push(self, char: str) -> _Step:
        """Take `char` in, and say whether it goes on, ends the value, comes after it, or cannot be here."""
        if self.in_text:
            return self._in_text(char)
        if self.text and not self._open and (char in _SPACE or char in ",]}"):
            return "after"
        if char in _PAIRS:
            if self._open[-1:] != [_PAIRS[char]]:
                return "bad"
            self._open.pop()
        elif char in "{[":
            self._open.append(char)
        elif char == '"':
            self.in_text = True
        elif not (char in _BARE or (char.isascii() and char.isalnum())):
            return "bad"
        self.text += char
        return "end" if char in _PAIRS and not self._open else "more"

    def _in_text(self, char: str) -> _Step:
        if self._escaped and char not in _ESCAPABLE:
            return "bad"
        # Models write new lines and tabs into texts as they are, which JSON does not allow.
        self.text += json.dumps(char)[1:-1] if char < " " else char
        if self._escaped or char == "\\":
            self._escaped = not self._escaped
        elif char == '"':
            self.in_text = False
            return "more" if self._open else "end"
        return "more"


class CallScanner:
    """One call of a reply, the `index`-th.

    Without `name` it begins with the brace of an object with a name and arguments; with it, with that of the arguments.
    `markers`: what ends a call that is no valid JSON. Once `done`: `found`, and `rest`, what was taken in of the marker
    that ended it.
    """

    def __init__(self, index: int, markers: Sequence[str], name: str | None = None) -> None:
        self.index = index
        self.done = False
        self.rest = ""
        self.pieces: list[CallPiece] = []
        self._markers = tuple(markers)
        self._name = name
        self._alone = name is not None
        self._text = ""
        self._key: str | None = "arguments" if self._alone else None
        self._value: _Value | None = None
        self._step: Callable[[str], bool] = self._before_value if self._alone else self._begin
        self._arguments = ""
        self._sent = 0
        self._parsed: dict[str, Any] | None = None
        self._error: str | None = None
        self._depth = 0
        self._in_text = False

    def push(self, char: str) -> bool:
        """Take `char` in; False where the call has ended before it."""
        taken = self._step(char)
        if taken:
            self._text += char
        return taken

    def finish(self) -> None:
        """The reply has ended."""
        if not self.done:
            self._keep_arguments()
            if not self._complete:
                self._error = self._error or _CUT_OFF
            self._end()

    @property
    def found(self) -> ToolCall | InvalidCall:
        """The call, once it is done."""
        if self._error is None and self._name is not None and self._parsed is not None:
            return ToolCall(self.index, self._name, self._parsed)
        error = self._error or "the call has no name"
        return InvalidCall(self.index, self._name, self._arguments or self._text, error)

    @property
    def _complete(self) -> bool:
        return self._error is None and self._name is not None and self._parsed is not None

    # The steps: each takes the next character, and says whether it belongs to the call.

    def _begin(self, char: str) -> bool:
        self._step = self._before_key
        return True

    def _before_key(self, char: str) -> bool:
        if char == "}":
            return self._end()
        if char == '"':
            self._value, self._key = _Value(), None
            self._value.push(char)
            self._step = self._in_key
            return True
        return char in _SPACE or self._break(char, "expected a key")

    def _in_key(self, char: str) -> bool:
        assert self._value is not None
        step = self._value.push(char)
        if step == "bad":
            return self._break(char, "a key is no JSON text")
        if step == "end":
            key = _read(self._value.text)
            self._key, self._value = key if isinstance(key, str) else None, None
            self._step = self._before_colon
        return True

    def _before_colon(self, char: str) -> bool:
        if char == ":":
            self._step = self._before_value
            return True
        return char in _SPACE or self._break(char, "expected a colon")

    def _before_value(self, char: str) -> bool:
        if char in _SPACE:
            return True
        self._value = _Value()
        self._step = self._in_value
        return self._in_value(char) if char not in ",:" else self._break(char, "expected a value")

    def _in_value(self, char: str) -> bool:
        assert self._value is not None
        step = self._value.push(char)
        if step == "bad":
            return self._break(char, "not valid JSON")
        self._stream(self._value)
        if step in ("end", "after"):
            self._member(self._value.text)
            self._value, self._step = None, self._after_value
            if self._alone:
                return self._end() if step == "end" else self._end(taken=False)
        return self._after_value(char) if step == "after" else True

    def _after_value(self, char: str) -> bool:
        if char == "}":
            return self._end()
        if char == ",":
            self._step = self._before_key
            return True
        return char in _SPACE or self._break(char, "expected a comma or a closing brace")

    def _broken(self, char: str) -> bool:
        text = self._text + char
        marker = next((marker for marker in self._markers if text.endswith(marker)), None)
        if marker is not None:
            self.rest, self._text = marker[:-1], text[: -len(marker)]
            self._arguments = self._arguments.removesuffix(self.rest)
            self.done = True
            return False
        if self._arguments:
            self._arguments += char
        if char == '"' and not self._text.endswith("\\"):
            self._in_text = not self._in_text
        elif not self._in_text:
            self._depth += (char in "{[") - (char in "}]")
        return self._end() if self._depth == 0 else True

    def _break(self, char: str, what: str) -> bool:
        """What was written is no JSON; what was read before it may be a call all the same."""
        if self._complete:
            return self._end(taken=False)
        self._error = self._error or f"not valid JSON: {what} at {char!r}"
        self._depth = 0 if self._alone else 1
        self._keep_arguments()
        if self._value is not None:
            self._depth += self._value.depth
            self._in_text = self._value.in_text
        self._value, self._step = None, self._broken
        return self._broken(char)

    def _keep_arguments(self) -> None:
        """Arguments that end too early are what there is of them."""
        if self._value is not None and self._key in _ARGUMENT_KEYS and not self._arguments:
            self._arguments = self._value.text

    def _member(self, text: str) -> None:
        """A key and its value have been read; the first of each kind counts."""
        if self._key == "name" and self._name is None:
            name = _read(text)
            if not isinstance(name, str) or not name or not _encodes(name):
                self._error = self._error or f"the name is {text[:40]}; expected a text"
            else:
                self._name = name
        elif self._key in _ARGUMENT_KEYS and not self._arguments:
            self._arguments = text
            parsed = _arguments(text)
            if isinstance(parsed, str):
                self._error = self._error or parsed
            else:
                self._parsed = parsed
        elif self._key == "description":
            # Small models repeat what they were told of a tool, whose parameters are no arguments.
            self._error = self._error or "it describes a tool; expected a name and arguments alone"

    def _stream(self, value: _Value) -> None:
        if self._key in _ARGUMENT_KEYS and self._name is not None and not self._arguments and value.text[:1] == "{":
            self._send(value.text)

    def _send(self, arguments: str) -> None:
        """Send what is new in the arguments so far."""
        assert self._name is not None
        if new := arguments[self._sent :]:
            self.pieces.append(CallPiece(self.index, None if self._sent else self._name, new))
            self._sent = len(arguments)

    def _end(self, *, taken: bool = True) -> bool:
        self.done = True
        if self._name is None and self._error is None:
            self._error = "the call has no name"
        if self._error is None and not self._arguments:
            self._parsed, self._arguments = {}, "{}"
        if self._complete and not self._sent:
            # They came as a text, or before the name.
            as_sent = self._arguments if self._arguments[:1] == "{" else json.dumps(self._parsed, ensure_ascii=False)
            self._send(as_sent)
        return taken


def _read(text: str) -> Any:
    """The JSON value of `text`; None, too, for what is no JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _arguments(text: str) -> dict[str, Any] | str:
    """The arguments that `text` gives, or what is wrong with them."""
    try:
        found = json.loads(text, parse_constant=_no_constant)
        if isinstance(found, str):
            # OpenAI's way: JSON in a text.
            found = json.loads(found, parse_constant=_no_constant, strict=False) if found.strip() else {}
        # 1e999 is read as infinity, which JSON cannot hold.
        if not _encodes(json.dumps(found, ensure_ascii=False, allow_nan=False)):
            return "the arguments hold characters that are no valid Unicode (half a surrogate pair)"
    except RecursionError:
        return "the arguments are nested too deeply"
    except ValueError as error:
        return f"the arguments are not valid JSON: {error}"
    if found is None:
        return {}
    return found if isinstance(found, dict) else f"the arguments are {text[:40]}; expected an object"


def _encodes(text: str) -> bool:
    """Whether UTF-8 can hold `text`, which half a surrogate pair from an escape it cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
