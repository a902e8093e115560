"""agent_node: an agent with a domain, as a node of a LangGraph graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
    merge_message_runs,
)
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langgraph.graph import END
from langgraph.types import Command

from offset_runtime.errors import InvalidRequestError, OffsetError

# Whoever started the conversation: the author of all messages that are no agent's.
USER = "START"

Route = Callable[[str], str]


def agent_node(
    name: str,
    model: Runnable[LanguageModelInput, AIMessage],
    *,
    system_prompt: str = "",
    reads: Collection[str] | None = None,
    route: Route | None = None,
) -> Runnable[Any, Any]:
    """Make the node of one agent, for graphs whose state has `messages` (with the reducer `add_messages`).

    `name` is the author of the agent's replies, and `model` speaks for it, usually a `ChatOffset` in the
    agent's domain. The model is given `system_prompt` and the messages the agent may read: its own
    replies as its own turns, those of other agents as a user's, with the author's name on a line before.
    `reads` names the authors whose messages it may read, ``"START"`` being the user (None: all; an agent
    that is to remember its own replies must then name itself). `route` maps the reply's text to the name
    of the next node (``"END"`` ends): the node then returns a `Command` that goes there. The node cannot
    know the others of its graph, and LangGraph ends a run that is sent to a node it does not have as if
    all were well, so let `route` return names of nodes only (the handoffs of a workflow file do).

    The node works with `invoke` and `ainvoke` of a graph, and its tokens stream in
    ``stream_mode="messages"`` with `agent` and `domain` in their metadata. An `OffsetError` of the model
    is raised as one of the same type whose message begins with the agent; anything else as it is.
    Raises `InvalidRequestError` when there is nothing the agent may read.
    """
    if isinstance(reads, str):
        raise InvalidRequestError(
            f"reads={reads!r} of agent {name!r} is one name; give a list, for example [{reads!r}]"
        )
    readable = None if reads is None else frozenset(reads)
    turn = _Turn(name, model, system_prompt, readable, route)
    return RunnableLambda(turn.run, turn.arun, name=name)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One agent's turn: what it reads, and what becomes of its reply."""

    name: str
    model: Runnable[LanguageModelInput, AIMessage]
    system_prompt: str
    reads: frozenset[str] | None
    route: Route | None

    def run(self, state: Any, config: RunnableConfig) -> Any:
        prompt = self._prompt(state)
        with _naming(self.name):
            reply = self.model.invoke(prompt, self._tagged(config))
        return self._outcome(reply)

    async def arun(self, state: Any, config: RunnableConfig) -> Any:
        prompt = self._prompt(state)
        with _naming(self.name):
            reply = await self.model.ainvoke(prompt, self._tagged(config))
        return self._outcome(reply)

    def _prompt(self, state: Any) -> list[BaseMessage]:
        messages = state["messages"] if isinstance(state, Mapping) else state.messages
        signed = list(_signed(convert_to_messages(messages)))
        shown = [
            shown
            for author, message in signed
            if (self.reads is None or author in self.reads) and (shown := self._shown(author, message))
        ]
        if not shown:
            found = ", ".join(sorted({author for author, _ in signed})) or "none"
            wanted = "all" if self.reads is None else ", ".join(sorted(self.reads))
            raise InvalidRequestError(
                f"agent {self.name!r} has no message to read: it reads {wanted}, and the messages are by: {found}. "
                "Run an agent it reads before it, or let it read START."
            )
        opening = [SystemMessage(self.system_prompt)] if self.system_prompt else []
        return [*opening, *_with_user_turns_merged(shown)]

    def _shown(self, author: str, message: BaseMessage) -> BaseMessage | None:
        if author in (USER, self.name):
            return message
        text = str(message.text)
        return HumanMessage(f"{author}:\n{text}") if text else None

    def _tagged(self, config: RunnableConfig) -> RunnableConfig:
        return {**config, "metadata": {**config.get("metadata", {}), "agent": self.name}}

    def _outcome(self, reply: AIMessage) -> Any:
        # The id stays: by it LangGraph knows that this message was streamed already.
        update = {"messages": [reply.model_copy(update={"name": self.name})]}
        if self.route is None:
            return update
        target = self.route(str(reply.text))
        if not isinstance(target, str) or not target:
            raise InvalidRequestError(
                f"the route of agent {self.name!r} returned {target!r}; expected the name of a node, or 'END'"
            )
        return Command(goto=END if target == "END" else target, update=update)


@contextlib.contextmanager
def _naming(agent: str) -> Iterator[None]:
    """Say in an `OffsetError` whose turn it was. Another object, as one error may be raised to several agents."""
    try:
        yield
    except OffsetError as error:
        # Not called: subclasses are made from other arguments than their message.
        kind = type(error)
        named = kind.__new__(kind, f"agent {agent!r}: {error}")
        named.__dict__.update(error.__dict__)
        raise named from error


def _signed(messages: Iterable[BaseMessage]) -> Iterable[tuple[str, BaseMessage]]:
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
