"""Tool calls as LangChain has them: read from the text of a reply, whole or as it comes."""

from __future__ import annotations

import uuid
from collections import defaultdict

from langchain_core.messages import InvalidToolCall, ToolCall
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.json import parse_partial_json

from offset_runtime.tool_reader import CallReader
from offset_runtime.tools import CallPiece


class ToolMessages:
    """The calls of one reply. `parallel` False: those after the first are left out."""

    def __init__(self, reader: CallReader, *, parallel: bool) -> None:
        self._reader = reader
        self._parallel = parallel
        self._ids: defaultdict[int, str] = defaultdict(lambda: f"call_{uuid.uuid4().hex}")
        self._streamed: dict[int, str] = {}

    def push(self, text: str) -> tuple[str, list[ToolCallChunk]]:
        """Add text of the reply; return what is certain of it: plain text, and parts of calls."""
        return self._told(self._reader.push(text))

    def finish(self) -> tuple[str, list[ToolCallChunk]]:
        """Return the rest, after the last of the text.

        LangChain completes the JSON of a call that was cut off, and would have it run. So the arguments of one that
        is not valid are given an end that no JSON has.
        """
        text, chunks = self._told(self._reader.finish())
        for call in self._reader.invalid:
            if not self._counts(call.index):
                continue
            known = self._streamed.get(call.index)
            rest = call.text if known is None else call.text.removeprefix(known) if call.text.startswith(known) else ""
            name = call.name if known is None else None
            chunks.append(self._chunk(call.index, name, rest + broken_end((known or "") + rest)))
        return text, chunks

    def tool_calls(self) -> list[ToolCall]:
        """The valid calls of the reply, which has ended."""
        return [
            tool_call(name=call.name, args=call.arguments, id=self._ids[call.index])
            for call in self._reader.calls
            if self._counts(call.index)
        ]

    def invalid_tool_calls(self) -> list[InvalidToolCall]:
        """The others, as they were written."""
        return [
            invalid_tool_call(name=call.name, args=call.text, id=self._ids[call.index], error=call.error)
            for call in self._reader.invalid
            if self._counts(call.index)
        ]

    def _told(self, pieces: list[str | CallPiece]) -> tuple[str, list[ToolCallChunk]]:
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, CallPiece) and self._counts(piece.index)]
        chunks = [self._chunk(piece.index, piece.name, piece.arguments) for piece in calls]
        return text, chunks

    def _chunk(self, index: int, name: str | None, arguments: str) -> ToolCallChunk:
        # On the first chunk of a call only: merging joins texts.
        first = index not in self._streamed
        self._streamed[index] = self._streamed.get(index, "") + arguments
        return tool_call_chunk(name=name, args=arguments, id=self._ids[index] if first else None, index=index)

    def _counts(self, index: int) -> bool:
        return self._parallel or index == 0


def broken_end(arguments: str) -> str:
    """What makes LangChain read `arguments` as no valid call, however they were cut; empty where it does already."""
    # A bracket that closes nothing, behind the end of the text that the cut may have fallen in.
    ends = ("", *(text + bracket for text in ("", '"', '\\"') for bracket in "]}"))
    return next(end for end in ends if not _completes(arguments + end))


def _completes(arguments: str) -> bool:
    if not arguments:
        # No arguments at all are an empty object to LangChain.
        return True
    try:
        return isinstance(parse_partial_json(arguments), dict)
    except (ValueError, RecursionError):
        return False
