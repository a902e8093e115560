"""Reading the tool calls in a reply, as its text comes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from offset_runtime.call_json import CallJson
from offset_runtime.reply_text import overlap
from offset_runtime.tools import CallPiece, InvalidCall, ToolCall

_THINKING = ("<think>", "</think>")
# What may stand before the JSON of a call that has no marker: a fence, and a list's bracket.
_FENCE = re.compile(r"```(?:json|tool_code|tool_call)?\s*")
_FENCES = ("```", "```json", "```tool_code", "```tool_call")
_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAME_BEGUN = re.compile(r"\s*[\w.-]*\s*(?:\[[\w\]]*\s*\w*\s*)*\[?[\w]*")

Mode = Literal["text", "thought", "payload", "object", "between", "after", "junk"]


@dataclass(frozen=True, slots=True)
class Marks:
    """How calls stand out in a reply. `opening`: texts that begin calls, each with the one that ends them, or ``""``.

    `anywhere`: whether JSON without a marker is a call at the beginning of any line, not of the reply alone.
    `named`: whether a tool's name with its arguments right behind is a call too.
    """

    opening: tuple[tuple[str, str], ...] = ()
    anywhere: bool = False
    named: bool = False


class CallReader:
    """Reads one reply. `names`: the tools that were offered.

    Behind a marker everything is meant as a call, of whatever name. Without one, JSON is a call where it names a tool
    that was offered, since special tokens that are markers are left out of a reply's text.

    `calls` and `invalid` are complete after `finish`. The pieces of a call make up its arguments; those of an
    invalid one its `text`, where it has a name; else it has none. Nothing is lost: what is no call is text, or an
    `InvalidCall`.
    """

    def __init__(self, marks: Marks, names: Collection[str]) -> None:
        self.calls: list[ToolCall] = []
        self.invalid: list[InvalidCall] = []
        self._marks = marks
        self._names = frozenset(names)
        self._buffer = ""
        self._mode: Mode = "text"
        self._line_begins = True  # whether the buffer stands at the beginning of the reply or a line
        self._begun = False  # whether the reply has had any text
        self._closing = ""  # what ends the calls that are being read
        self._json = CallJson()
        self._lead = ""  # what stood before a call without a marker: text again where it turns out to be none
        self._sure = False  # whether what is being read is a call, and not perhaps text
        self._listed = False  # whether the calls stand in a list
        self._index = 0
        self._streamed: int | None = None  # characters of the arguments that are out; None: nor is the name
        self._out: list[str | CallPiece] = []

    def push(self, text: str) -> list[str | CallPiece]:
        """Add text of the reply; return what is certain by now."""
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[str | CallPiece]:
        """Return the rest, after the last text."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[str | CallPiece]:
        steps = {
            "text": self._read_text,
            "thought": self._read_thought,
            "payload": self._read_payload,
            "object": self._read_object,
            "between": self._read_between,
            "after": self._read_after,
            "junk": self._read_junk,
        }
        while steps[self._mode](final):
            pass
        out, self._out = self._out, []
        return out

    # Each of these reads on in its mode, and returns whether there may be more to read now.

    def _read_text(self, final: bool) -> bool:
        opening = [mark for mark, _ in self._marks.opening]
        found = [(at, mark) for mark in (*opening, _THINKING[0]) if (at := self._buffer.find(mark)) >= 0]
        at, mark = min(found, default=(len(self._buffer), ""), key=lambda item: (item[0], -len(item[1])))
        bare = self._bare_start(at)
        if bare is not None:
            return self._open_bare(bare, final)
        if mark == _THINKING[0]:
            self._say(at + len(mark))
            self._mode = "thought"
            return True
        if mark:
            self._say(at)
            self._take(len(mark))
            self._lead, self._sure, self._listed = mark, True, False
            self._closing = dict(self._marks.opening)[mark]
            self._mode = "payload"
            return True
        held = 0 if final else max((overlap(self._buffer, m) for m in (*opening, _THINKING[0])), default=0)
        self._say(len(self._buffer) - held)
        return False

    def _read_thought(self, final: bool) -> bool:
        at = self._buffer.find(_THINKING[1])
        if at < 0:
            self._say(len(self._buffer) - (0 if final else overlap(self._buffer, _THINKING[1])))
            return False
        self._say(at + len(_THINKING[1]))
        # What follows is the reply proper.
        self._line_begins, self._begun = True, False
        self._mode = "text"
        return True

    def _read_payload(self, final: bool) -> bool:
        """Behind a marker: an object, a list of objects, or a name and an object."""
        self._take(len(self._buffer) - len(self._buffer.lstrip()))
        if not self._buffer:
            return self._end_junk("it was cut off") if final else False
        if self._buffer[0] == "[":
            self._take(1)
            self._listed = True
            self._mode = "between"
            return True
        if self._buffer[0] == "{":
            return self._open_object(CallJson())
        if self._marks.named and (named := _NAME.match(self._buffer)):
            self._take(named.end())
            return self._open_object(CallJson(named[1]))
        begun = self._marks.named and _NAME_BEGUN.fullmatch(self._buffer)
        if begun and not final:
            return False
        self._json = CallJson()
        self._mode = "junk"
        return True

    def _read_object(self, final: bool) -> bool:
        for used, char in enumerate(self._buffer, start=1):
            self._json.feed(char)
            if not self._sure:
                name = self._json.name
                if self._json.foreign or self._json.broken or (name is not None and name not in self._names):
                    return self._give_back(used)
                self._sure = name is not None
            if self._json.broken:
                self._take(used)
                self._mode = "junk"
                return True
            if self._json.complete:
                self._take(used)
                return self._close_object() if self._sure or self._settle() else self._give_back(0)
        self._take(len(self._buffer))
        if self._sure and self._json.name is not None:
            self._send(self._json.name, self._json.arguments)
        if not final:
            return False
        if not self._sure:
            return self._give_back(0)
        return self._end_junk("it was cut off")

    def _read_between(self, final: bool) -> bool:
        """Within a list of calls."""
        rest = self._buffer.lstrip(" \t\r\n,")
        if not rest and not final:
            return False
        self._lead += self._take(len(self._buffer) - len(rest))
        if not rest and self._sure:
            return False
        if rest.startswith("{"):
            return self._open_object(CallJson())
        if rest.startswith("]"):
            self._lead += self._take(1)
            self._mode = "after"
            return True
        if not self._sure:
            return self._give_back(0)
        self._json = CallJson()
        self._mode = "junk"
        return True

    def _read_after(self, final: bool) -> bool:
        """Behind a call: what ends calls, another one, or text."""
        rest = self._buffer.lstrip()
        end = self._closing or ("```" if "```" in self._lead else "")
        if end and rest.startswith(end):
            self._take(len(self._buffer) - len(rest) + len(end))
            self._closing, self._lead, self._listed = "", "", False
            return True
        opening = [mark for mark, _ in self._marks.opening]
        if any(rest.startswith(mark) for mark in opening):
            self._take(len(self._buffer) - len(rest))
            self._mode = "text"
            return True
        joined = rest.lstrip("; \t\r\n") if not self._listed else rest
        if joined.startswith("{") and not self._listed:
            self._lead = self._take(len(self._buffer) - len(joined))
            # Behind a marker that has an end, or one call of several, another call is meant.
            self._sure = bool(self._closing)
            return self._open_object(CallJson())
        if not final and (not joined or any(mark.startswith(rest) for mark in (end, *opening))):
            return False
        if final and end.startswith(rest):
            # Where the reply was cut off in it.
            self._take(len(self._buffer))
        self._mode = "text"
        self._line_begins = "\n" in self._buffer[: len(self._buffer) - len(rest)]
        return not (final and not self._buffer)

    def _read_junk(self, final: bool) -> bool:
        """What is meant as a call and is none, up to what ends calls."""
        at = self._buffer.find(self._closing) if self._closing else -1
        if at >= 0:
            self._json.raw += self._take(at)
            self._take(len(self._closing))
            return self._end_junk("")
        keep = overlap(self._buffer, self._closing) if self._closing and not final else 0
        self._json.raw += self._take(len(self._buffer) - keep)
        return self._end_junk("") if final else False

    def _bare_start(self, before: int) -> int | None:
        """Where JSON without a marker begins, or may begin, ahead of `before`."""
        starts = [0] if self._line_begins and (self._marks.anywhere or not self._begun) else []
        if self._marks.anywhere:
            starts += [match.end() for match in re.finditer("\n", self._buffer[:before])]
        for start in starts:
            rest = self._buffer[start:]
            at = start + len(rest) - len(rest.lstrip())
            if at == len(self._buffer) or (at < before and self._may_be_bare(self._buffer[at:])):
                return start
        return None

    def _may_be_bare(self, text: str) -> bool:
        fence = _FENCE.match(text)
        if any(mark.startswith(text) for mark in _FENCES) or (fence and fence.end() == len(text)):
            return True
        if fence:
            text = text[fence.end() :]
        if text.startswith("["):
            inner = text[1:].lstrip()
            return not inner or inner.startswith("{")
        if text.startswith("{"):
            return True
        return self._marks.named and any(
            name.startswith(text) or re.match(re.escape(name) + r"\s*(?:[{\[]|$)", text) for name in self._names
        )

    def _open_bare(self, start: int, final: bool) -> bool:
        self._say(start)
        space = len(self._buffer) - len(self._buffer.lstrip())
        text = self._buffer[space:]
        fence = _FENCE.match(text)
        lead = space + (fence.end() if fence else 0)
        rest = self._buffer[lead:]
        named = _NAME.match(rest) if self._marks.named else None
        if re.match(r"\{|\[\s*\{", rest) or (named and named[1] in self._names):
            self._lead, self._closing, self._sure, self._listed = self._take(lead), "", False, False
            if rest[0] == "[":
                self._lead += self._take(1)
                self._listed = True
                self._mode = "between"
                return True
            if rest[0] == "{":
                return self._open_object(CallJson())
            assert named is not None
            self._lead += self._take(named.end())
            return self._open_object(CallJson(named[1]))
        if not final:
            return False
        self._say(len(self._buffer))
        return False

    def _open_object(self, call: CallJson) -> bool:
        self._json, self._streamed, self._mode = call, None, "object"
        if call.name is not None:
            self._sure = True
        return True

    def _settle(self) -> bool:
        """Whether a complete object without a marker whose name came in no usual place is a call."""
        try:
            name, _ = self._json.call()
        except ValueError:
            return False
        return name in self._names

    def _close_object(self) -> bool:
        self._sure = True
        try:
            name, arguments = self._json.call()
        except ValueError as error:
            self._fail(str(error))
            self._next_call()
            return True
        self._send(name, self._json.arguments or json.dumps(arguments, ensure_ascii=False))
        self.calls.append(ToolCall(self._index, name, arguments))
        self._next_call()
        return True

    def _send(self, name: str, written: str) -> None:
        """Send on what is new of the name and the arguments."""
        if self._streamed is None:
            self._out.append(CallPiece(self._index, name, written))
        elif len(written) > self._streamed:
            self._out.append(CallPiece(self._index, None, written[self._streamed :]))
        self._streamed = len(written)

    def _end_junk(self, error: str) -> bool:
        self._fail(error or "it is no JSON object with a name")
        self._next_call()
        self._closing, self._lead, self._listed = "", "", False
        self._mode = "after"
        return True

    def _fail(self, error: str) -> None:
        name, begun = self._json.name, self._json.arguments
        text = begun if name is not None and begun else self._json.raw
        if name is not None:
            self._send(name, text)
        self.invalid.append(InvalidCall(self._index, name, text, error))
        self._json = CallJson()

    def _next_call(self) -> None:
        self._index += 1
        self._begun = True
        self._line_begins = False
        self._mode = "between" if self._listed else "after"

    def _give_back(self, used: int) -> bool:
        """What looked like a call is text."""
        self._take(used)
        text = self._lead + self._json.raw
        self._buffer = text + self._buffer
        self._json, self._lead, self._mode = CallJson(), "", "text"
        self._say(len(text))
        return True

    def _say(self, count: int) -> None:
        text = self._take(count)
        if not text:
            return
        self._out.append(text)
        if text.strip():
            self._begun = True
        last = text.rpartition("\n")[2] if "\n" in text else text
        self._line_begins = not last.strip() and ("\n" in text or self._line_begins)

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text
