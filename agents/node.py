"""agent_node: an agent with a domain, as a node of a LangGraph graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langgraph.graph import END
from langgraph.types import Command

from offset_runtime.agents.chat_model import ChatOffset
from offset_runtime.agents.transcript import History, Transcript
from offset_runtime.errors import InvalidRequestError, OffsetError, nearest_hint
from offset_runtime.request import Reuse

Route = Callable[[str], str]

# The reader of a transcript whose state all agents share.
_ALL = "transcript"


def agent_node(
    name: str,
    model: Runnable[LanguageModelInput, AIMessage],
    *,
    system_prompt: str = "",
    reads: Collection[str] | None = None,
    route: Route | None = None,
    history: History = "separate",
    upcoming: Mapping[str, int] | None = None,
) -> Runnable[Any, Any]:
    """Make the node of one agent, for graphs whose state has `messages` (with the reducer `add_messages`).

    `name` is the author of the agent's replies, and `model` speaks for it, usually a `ChatOffset` in the
    agent's domain. `history` says how the messages the agent may read are shown to it:

    - ``separate``: `system_prompt` first, then the messages: the agent's own replies as its turns, those of others
      as a user's, with the author's name on a line before. What a model is used to, but no two agents read the same.
    - ``shared``: all agents' replies as a user's, with the author's name, and `system_prompt` at the end, after
      ``@name:``. Agents share the state of the transcript; a new turn is read again once, by whoever comes next.
    - ``verbatim``: every turn as it was written: the instructions its author had, its reply as the assistant's, and
      its author's offset where it lay (turn-anchored ones, with `ChatOffset`). Nothing is read twice, where the
      tokenizer encodes a reply as it was generated. The reply's ``additional_kwargs`` then hold the instructions.

    `upcoming`: in how many steps agents of the graph read next once this one has (1: the next), for the prefix cache,
    which then drops what nobody is about to read first (with a `ChatOffset` that is not wrapped in anything).

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
    _check_history(name, history, upcoming)
    readable = None if reads is None else frozenset(reads)
    if history == "verbatim":
        model = _keeping(name, model)
    return AgentNode(_Turn(Transcript(name, system_prompt, readable, history), model, route, upcoming))


class AgentNode(RunnableLambda[Any, Any]):
    """What `agent_node` returns: the node, and what it was made of."""

    def __init__(self, turn: _Turn) -> None:
        super().__init__(turn.run, turn.arun, name=turn.transcript.name)
        self._turn = turn

    @property
    def agent(self) -> str:
        """The author of its replies."""
        return self._turn.transcript.name

    @property
    def model(self) -> Runnable[LanguageModelInput, AIMessage]:
        """Who speaks."""
        return self._turn.model

    @property
    def settings(self) -> dict[str, Any]:
        """All else that decides what it replies to the same messages, and where that goes."""
        route = self._turn.route
        # Functions have no value to compare; a name tells apart those of different makers.
        named = None if route is None else f"{route.__module__}.{getattr(route, '__qualname__', type(route))}"
        return {"transcript": self._turn.transcript, "route": named}


@dataclass(frozen=True, slots=True)
class _Turn:
    """One agent's turn: what it reads, and what becomes of its reply."""

    transcript: Transcript
    model: Runnable[LanguageModelInput, AIMessage]
    route: Route | None
    upcoming: Mapping[str, int] | None

    def run(self, state: Any, config: RunnableConfig) -> Any:
        prompt = self._prompt(state)
        with _naming(self.transcript.name):
            reply = self._speaker(config).invoke(prompt, self._tagged(config))
        return self._outcome(reply)

    async def arun(self, state: Any, config: RunnableConfig) -> Any:
        prompt = self._prompt(state)
        with _naming(self.transcript.name):
            reply = await self._speaker(config).ainvoke(prompt, self._tagged(config))
        return self._outcome(reply)

    def _prompt(self, state: Any) -> list[BaseMessage]:
        messages = state["messages"] if isinstance(state, Mapping) else state.messages
        return self.transcript.show(convert_to_messages(messages))

    def _tagged(self, config: RunnableConfig) -> RunnableConfig:
        return {**config, "metadata": {**config.get("metadata", {}), "agent": self.transcript.name}}

    def _speaker(self, config: RunnableConfig) -> Runnable[LanguageModelInput, AIMessage]:
        """The model, which tells the prefix cache who reads now, and who reads next."""
        if self.upcoming is None or not isinstance(self.model, ChatOffset):
            return self.model
        # Not as an argument of the call: LangChain's cache of replies is keyed by those. Runs without a thread are one
        # conversation to the prefix cache: what it is told only orders what it drops.
        thread = str(config.get("configurable", {}).get("thread_id", ""))
        if self.transcript.history == "separate":
            return self.model.model_copy(update={"reuse": Reuse(thread, self.transcript.name, self.upcoming)})
        soonest = {_ALL: min(self.upcoming.values())} if self.upcoming else {}
        return self.model.model_copy(update={"reuse": Reuse(thread, _ALL, soonest)})

    def _outcome(self, reply: AIMessage) -> Any:
        update = {"messages": [self.transcript.sign(reply)]}
        if self.route is None:
            return update
        target = self.route(str(reply.text))
        if not isinstance(target, str) or not target:
            raise InvalidRequestError(
                f"the route of agent {self.transcript.name!r} returned {target!r}; expected a node's name, or 'END'"
            )
        return Command(goto=END if target == "END" else target, update=update)


def _check_history(name: str, history: object, upcoming: object) -> None:
    if history not in get_args(History):
        expected = ", ".join(map(repr, get_args(History)))
        hint = nearest_hint(str(history), get_args(History))
        raise InvalidRequestError(f"history={history!r} of agent {name!r} is unknown; expected one of {expected}{hint}")
    if upcoming is None:
        return
    if not isinstance(upcoming, Mapping) or not all(isinstance(n, int) and n > 0 for n in upcoming.values()):
        raise InvalidRequestError(
            f"upcoming={upcoming!r} of agent {name!r} does not say who reads next; expected a mapping from agents to "
            'steps (1: the next), for example {"editor": 1}'
        )


def _keeping(name: str, model: Runnable[LanguageModelInput, AIMessage]) -> Runnable[LanguageModelInput, AIMessage]:
    """The model with the offsets of earlier turns kept; an error for one that is wrapped, and would drop them."""
    if isinstance(model, ChatOffset):
        return model.configured({"author_offsets": "keep"})
    inner: Any = model
    while (inner := getattr(inner, "bound", None)) is not None:
        if isinstance(inner, ChatOffset) and inner.author_offsets != "keep":
            raise InvalidRequestError(
                f"agent {name!r} has a verbatim history, and its ChatOffset is wrapped in {type(model).__name__}; "
                'make it with ChatOffset(..., author_offsets="keep"), so that earlier turns keep their offsets'
            )
    return model


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
