"""How the messages of a graph are shown to one of its agents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    merge_message_runs,
)

from offset_runtime.errors import InvalidRequestError

# Whoever started the conversation: the author of all messages that are no agent's.
USER = "START"

# See `agent_node`.
History = Literal["separate", "shared", "verbatim"]

# Under this key a message of a verbatim transcript holds the instructions it was written under.
INSTRUCTIONS = "offset_runtime_instructions"


@dataclass(frozen=True, slots=True)
class Transcript:
    """What the agent `name` reads of a graph's messages: those by `reads` (None: by all), as `history` says."""

    name: str
    instructions: str
    reads: frozenset[str] | None
    history: History

    def show(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """The prompt. Raises `InvalidRequestError` when there is nothing the agent may read."""
        signed = list(_signed(messages))
        readable = [(author, m) for author, m in signed if self.reads is None or author in self.reads]
        shown = [part for author, message in readable for part in self._shown(author, message)]
        if not shown:
            found = ", ".join(sorted({author for author, _ in signed})) or "none"
            wanted = "all" if self.reads is None else ", ".join(sorted(self.reads))
            raise InvalidRequestError(
                f"agent {self.name!r} has no message to read: it reads {wanted}, and the messages are by: {found}. "
                "Run an agent it reads before it, or let it read START."
            )
        if self.history == "separate":
            opening = [SystemMessage(self.instructions)] if self.instructions else []
            return [*opening, *_with_user_turns_merged(shown)]
        if self.history == "verbatim" or self.instructions:
            shown.append(_called(self.name, self.instructions))
        return _with_user_turns_merged(shown)

    def sign(self, reply: AIMessage) -> AIMessage:
        """The reply as it goes into the graph's messages."""
        # The id stays: by it LangGraph knows that this message was streamed already.
        signed = reply.model_copy(update={"name": self.name})
        if self.history == "verbatim":
            signed.additional_kwargs = {**reply.additional_kwargs, INSTRUCTIONS: self.instructions}
        return signed

    def _shown(self, author: str, message: BaseMessage) -> Iterator[BaseMessage]:
        if author == USER or (author == self.name and self.history == "separate"):
            yield message
        elif not (text := str(message.text)):
            return
        elif self.history == "verbatim" and isinstance(message, AIMessage):
            yield _called(author, str(message.additional_kwargs.get(INSTRUCTIONS, "")))
            yield message
        else:
            yield HumanMessage(f"{author}:\n{text}")


def _called(name: str, instructions: str) -> HumanMessage:
    """The message that gives an agent the word."""
    return HumanMessage(f"@{name}: {instructions}" if instructions else f"@{name}")


def _signed(messages: Iterable[BaseMessage]) -> Iterator[tuple[str, BaseMessage]]:
    """Each message with its author. A tool's answer belongs to the agent that called the tool."""
    author = USER
    for message in messages:
        if not isinstance(message, ToolMessage):
            author = message.name if isinstance(message, AIMessage) and message.name else USER
        yield author, message


def _with_user_turns_merged(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    merged: list[BaseMessage] = []
    for is_user, group in groupby(messages, key=lambda message: isinstance(message, HumanMessage)):
        run = list(group)
        merged.extend(merge_message_runs(run, chunk_separator="\n\n") if is_user else run)
    return merged
