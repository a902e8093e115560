"""Reads tool calls out of a reply while it streams."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from offset_runtime.call_scanner import CallScanner
from offset_runtime.tools import CallPiece, InvalidCall, ToolCall

Part = str | CallPiece

_SPACE = " \t\n\r"
_THOUGHT = ("<think>", "</think>")
_FENCE = "```"
# Longer than any beginning of a call; more is white space, or a name that is none.
_MOST_HELD = 512
_NAMED_CALL = re.compile(r"\s*(.+?)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\]\s*)?")
_NAME = re.compile(r"[^\s\[\]{}]+")

_Fit = Literal["no", "maybe", "yes"]
# What may come next, one of each step; white space may stand between two.
_Steps = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Markers:
    """What stands around the calls of a format.

    `opening`: each begins one call, a list, or several. `closing`: what ends them, where anything does. `named`: calls
    may be a name and the arguments behind it.
    """

    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    named: bool = False


class CallReader:
    """Tells the calls of one reply from its text. `names`: the tools that were offered.

    However the reply is cut into deltas, the same text and calls come out. What was not a call is text, unchanged but
    for white space before, between and after calls, and markers. After `finish`, `calls` and `invalid` are complete.
    """

    def __init__(self, names: Collection[str], markers: Markers) -> None:
        self.calls: list[ToolCall] = []
        self.invalid: list[InvalidCall] = []
        self._markers = markers
        self._names = sorted(names, key=len, reverse=True)
        self._beginnings = _beginnings(self._names)
        self._state: Callable[[str], None] = self._in_text
        self._parts: list[Part] = []
        self._todo: list[str] = []  # characters to read, the next one last
        self._held = ""  # what may still become a marker or a call
        self._gap = ""  # white space, and what parts calls, since the last call or the beginning
        self._beside_call = True  # nothing but the gap lies between here and the last call or the beginning
        self._line_begins = True
        self._marked = False  # behind an opening marker: what comes is a call
        self._in_list = False
        self._answered = False  # a call, or an empty list, has come since the marker
        self._closing: tuple[str, ...] = ()  # what would end the last call and is no text
        self._junk = ""
        self._scanner: CallScanner | None = None
        self._count = 0

    def push(self, text: str) -> list[Part]:
        """Take in the next part of the reply, and return what is certain: text, and pieces of calls."""
        for char in text:
            self._read(char)
        return self._taken()

    def finish(self) -> list[Part]:
        """The reply has ended: return what was held back."""
        while self._held:
            self._release()
            self._read("")
        if self._scanner is not None:
            self._scanner.finish()
            self._record(self._scanner)
        elif self._state == self._in_junk or (self._state == self._in_calls and not self._answered):
            self._give_up("the reply ends within the call" if self._junk else "the reply ends where a call begins")
        if not self._count:
            self._say(self._gap)
        self._gap = ""
        return self._taken()

    def _read(self, chars: str) -> None:
        self._todo += reversed(chars)
        while self._todo:
            self._state(self._todo.pop())

    def _again(self, chars: str) -> None:
        self._todo += reversed(chars)

    def _taken(self) -> list[Part]:
        """The parts so far, those that belong together joined."""
        parts, self._parts = self._parts, []
        joined: list[Part] = []
        for part in parts:
            last = joined[-1] if joined else None
            if isinstance(part, str) and isinstance(last, str):
                joined[-1] = last + part
            elif isinstance(part, CallPiece) and isinstance(last, CallPiece) and part.index == last.index:
                joined[-1] = CallPiece(last.index, last.name, last.arguments + part.arguments)
            else:
                joined.append(part)
        return joined

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(text)
            line = text.rpartition("\n")
            self._line_begins = (bool(line[1]) or self._line_begins) and not line[2].strip(" \t")

    # The states: each reads one character.

    def _in_text(self, char: str) -> None:
        if not self._held and self._beside_call and (char in _SPACE or (char in ",;" and self._count)):
            self._gap += char
            return
        self._held += char
        if not self._recognised():
            self._release()

    def _in_thought(self, char: str) -> None:
        self._held += char
        if self._held.endswith(_THOUGHT[1]):
            self._say(self._held)
            self._held, self._state = "", self._in_text
            # A call may follow at once.
            self._line_begins = True
        elif not _ends_within(self._held, _THOUGHT[1]):
            self._say(self._held)
            self._held = ""

    def _in_calls(self, char: str) -> None:
        """Behind an opening marker, or in a list of calls."""
        if char in _SPACE or (char in ",;" and self._answered):
            self._gap += char
        elif char == "{":
            self._begin_call(None)
        elif char == "[" and not self._in_list and not self._answered:
            self._in_list = True
        elif char == "]" and self._in_list:
            self._gap, self._in_list, self._answered = "", False, True
            if not (self._marked and self._closing):
                self._leave_calls()
        elif self._answered:
            self._leave_calls()
            self._again(char)
        else:
            self._state = self._in_junk
            self._again(char)

    def _in_call(self, char: str) -> None:
        assert self._scanner is not None
        scanner = self._scanner
        taken = scanner.push(char)
        self._parts += scanner.pieces
        scanner.pieces.clear()
        if scanner.done:
            self._record(scanner)
            self._again(scanner.rest + ("" if taken else char))

    def _in_junk(self, char: str) -> None:
        """Behind an opening marker, where no call follows, up to the next marker."""
        self._junk += char
        named = _NAMED_CALL.fullmatch(self._junk[:-1]) if char == "{" and self._markers.named else None
        if named and (named[1] in self._names or _NAME.fullmatch(named[1])):
            self._junk = ""
            self._begin_call(named[1])
            return
        marker = next((m for m in (*self._closing, *self._markers.opening) if self._junk.endswith(m)), None)
        if marker is not None:
            self._junk = self._junk.removesuffix(marker)
            self._give_up("no call follows the marker")
            self._again(marker)

    def _recognised(self) -> bool:
        """Act on what is held, where that is certain; False where it is text."""
        held, fresh = self._held, self._beside_call or self._line_begins
        if held in self._closing:
            self._held, self._gap, self._closing, self._beside_call = "", "", (), True
            return True
        if held in self._markers.opening:
            self._held = self._gap = ""
            self._open(marked=True, closing=self._markers.closing)
            return True
        if fresh and held == _THOUGHT[0]:
            self._say(self._gap + held)
            self._held, self._gap, self._beside_call, self._state = "", "", False, self._in_thought
            return True
        fit = self._fit_call() if fresh and len(held) < _MOST_HELD else "no"
        markers = (*self._closing, *self._markers.opening, *(_THOUGHT[:1] if fresh else ()))
        return fit != "no" or any(marker.startswith(held) for marker in markers)

    def _fit_call(self) -> _Fit:
        """Whether what is held begins a call that has no marker; act on it where it does."""
        held = self._held
        if self._markers.named and (fit := self._fit_named()) != "no":
            return fit
        if held[0] not in "{[`":
            return "no"
        fits = [_fit(held, 0, steps) for steps in self._beginnings]
        if "yes" in fits:
            at = min(held.find(bracket) for bracket in "{[" if bracket in held)
            self._held = self._gap = ""
            # A fence may hold several.
            closing = (_FENCE,) if held[0] == "`" else self._closing or self._markers.closing
            self._open(marked=False, closing=closing)
            self._again(held[at:])
            return "yes"
        return "maybe" if "maybe" in fits else "no"

    def _fit_named(self) -> _Fit:
        fits = [_fit(self._held, 0, ((name,), ("[ARGS]", ""), ("{",))) for name in self._names]
        if "yes" in fits:
            name = self._names[fits.index("yes")]
            self._held = self._gap = ""
            self._open(marked=False, closing=())
            self._begin_call(name)
            return "yes"
        return "maybe" if "maybe" in fits else "no"

    def _release(self) -> None:
        """The first character held is text; the others are read again."""
        held, self._held = self._held, ""
        self._say(self._gap + held[:1])
        self._gap, self._beside_call = "", False
        self._again(held[1:])

    def _open(self, *, marked: bool, closing: tuple[str, ...]) -> None:
        self._state, self._marked, self._closing = self._in_calls, marked, closing
        self._in_list = self._answered = False

    def _leave_calls(self) -> None:
        self._state, self._marked, self._in_list, self._beside_call = self._in_text, False, False, True

    def _begin_call(self, name: str | None) -> None:
        self._gap, self._answered, self._state = "", True, self._in_call
        self._scanner = CallScanner(self._count, (*self._closing, *self._markers.opening), name)
        self._count += 1
        self._again("{")

    def _record(self, scanner: CallScanner) -> None:
        self._parts += scanner.pieces
        scanner.pieces.clear()
        found = scanner.found
        if isinstance(found, ToolCall):
            self.calls.append(found)
        else:
            self.invalid.append(found)
        self._scanner = None
        self._state = self._in_calls
        if not (self._marked or self._in_list):
            self._leave_calls()

    def _give_up(self, error: str) -> None:
        self.invalid.append(InvalidCall(self._count, None, self._junk.strip(), f"not valid JSON: {error}"))
        self._count += 1
        self._junk = ""
        self._leave_calls()


def _beginnings(names: Sequence[str]) -> tuple[_Steps, ...]:
    """How a call without a marker begins: some models write the type of the call first."""
    spelled = sorted({json.dumps(name, ensure_ascii=plain) for name in names for plain in (True, False)})
    fences = ("```json", "```tool_call", _FENCE, "")
    named = (('"name"',), (":",), spelled)
    typed = (('"type"',), (":",), ('"function"',), (",",))
    return tuple((fences, ("[", ""), ("{",), *first, *named) for first in ((), typed))


def _fit(text: str, at: int, steps: _Steps) -> _Fit:
    """Whether `text` from `at` on is what `steps` allow, or the beginning of it."""
    while at < len(text) and text[at] in _SPACE and at > 0:
        at += 1
    if not steps:
        return "yes"
    best: _Fit = "no"
    for choice in steps[0]:
        fit: _Fit = "no"
        if text.startswith(choice, at):
            fit = _fit(text, at + len(choice), steps[1:])
        elif choice.startswith(text[at:]):
            fit = "maybe"
        if fit == "yes":
            return fit
        best = fit if best == "no" else best
    return best


def _ends_within(text: str, marker: str) -> bool:
    """Whether `text` ends with a beginning of `marker`."""
    return any(text.endswith(marker[:size]) for size in range(1, len(marker)))
