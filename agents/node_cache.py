"""domain_cache_policy: LangGraph's cache of a node's results, keyed by the offset that they are written under."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBindingBase
from langgraph.types import CachePolicy
from pydantic import BaseModel

from offset_runtime.agents.chat_model import ChatOffset
from offset_runtime.agents.node import AgentNode
from offset_runtime.agents.reply_form import FORM_ARGUMENTS
from offset_runtime.errors import InvalidRequestError

# What a message's metadata say of how it was written, and a later reply may depend on.
_WRITTEN_UNDER = ("domain", "offset_digest", "strength")


def domain_cache_policy(
    speaker: Runnable[Any, Any], *, system_prompt: str = "", ttl: int | None = None
) -> CachePolicy[Callable[[Any], str]]:
    """A policy for ``add_node(..., cache_policy=...)`` under which no domain gets another's result.

    LangGraph's own key is the node's input alone. This one adds all that decides the reply: base model, domain, the
    offset's digest, strength, sampling, stop texts, bound tools, and the instructions. So a domain that was trained
    anew misses. Of messages in the input it takes what they say (type, content, author, tool calls, and the offset a
    reply was written under), and not their ids, which are new in each run.

    `speaker`: what `agent_node` returned, or, for a node function of your own, the `ChatOffset` that replies there,
    with or without bound arguments. `system_prompt`: the instructions that such a function gives; an agent's are
    known. Whatever else the function depends on is not seen. `ttl`: seconds until an entry is out of date; None is
    never. The graph needs a cache too: ``compile(cache=InMemoryCache())``.

    The base model is known by its name and settings, and by its identity where `runtime` was given. The offset is
    read here, so that no file is read when LangGraph asks for a key, which it does on the event loop; the base is not
    loaded.

    Raises `UnknownDomainError`, `OffsetFileError`, and `InvalidRequestError` for a speaker that has no `ChatOffset`,
    or a `ttl` below 1. A run raises `InvalidRequestError` for an input with something that cannot be told apart
    (that is, pickled).
    """
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int) or ttl < 1):
        raise InvalidRequestError(f"ttl={ttl!r}; expected seconds, a whole number of at least 1, or None")
    told: dict[str, Any] = {"system_prompt": system_prompt}
    model = speaker
    if isinstance(speaker, AgentNode):
        if system_prompt:
            raise InvalidRequestError(
                f"the instructions of agent {speaker.agent!r} are known; leave system_prompt to agent_node"
            )
        told, model = speaker.settings, speaker.model
    chat, arguments = _chat_model(model)
    chat.configured({name: arguments[name] for name in arguments.keys() - FORM_ARGUMENTS - {"stop"}}).offset()

    def key(input: Any) -> str:
        parts = [chat._get_invocation_params(**arguments), told, input]
        text = json.dumps(_Plain().of(parts), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    return CachePolicy(key_func=key, ttl=ttl)


def _chat_model(model: Runnable[LanguageModelInput, Any]) -> tuple[ChatOffset, dict[str, Any]]:
    """The chat model inside, and the arguments that are bound to it."""
    inner: Any = model
    arguments: dict[str, Any] = {}
    while isinstance(inner, RunnableBindingBase):
        arguments = {**inner.kwargs, **arguments}
        inner = inner.bound
    if not isinstance(inner, ChatOffset):
        raise InvalidRequestError(
            f"a {type(model).__name__} does not say in which domain it replies; expected a node that agent_node made "
            "of a ChatOffset, or the ChatOffset that a node function calls"
        )
    return inner, arguments


class _Plain:
    """Makes what JSON can hold of a node's input: alike for inputs that say the same, and else not."""

    def __init__(self) -> None:
        self._calls: dict[Any, int] = {}

    def of(self, value: Any) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case BaseMessage():
                return {"message": self._message(value)}
            case list() | tuple():
                return [self.of(item) for item in value]
            case Mapping():
                return {"mapping": _sorted([self.of(key), self.of(item)] for key, item in value.items())}
            case AbstractSet():
                return {"set": _sorted(self.of(item) for item in value)}
        if (fields := _fields(value)) is not None:
            return {"object": type(value).__qualname__, "fields": self.of(fields)}
        return {"pickled": _pickled(value)}

    def _message(self, message: BaseMessage) -> list[Any]:
        said: dict[str, Any] = {"content": message.content, "name": message.name, "more": message.additional_kwargs}
        said |= {name: message.response_metadata[name] for name in _WRITTEN_UNDER if name in message.response_metadata}
        if isinstance(message, AIMessage):
            calls = [*message.tool_calls, *message.invalid_tool_calls]
            said["calls"] = [[call["name"], call["args"], self._number(call["id"])] for call in calls]
        elif isinstance(message, ToolMessage):
            said |= {"answers": self._number(message.tool_call_id), "status": message.status}
        return [message.type, getattr(message, "role", None), self.of(said)]

    def _number(self, call: str | None) -> int:
        """Which of the input's tool calls it is. Their ids are as random as those of messages."""
        return self._calls.setdefault(call, len(self._calls))


def _fields(value: Any) -> dict[str, Any] | None:
    if isinstance(value, BaseModel):
        return {**{name: getattr(value, name) for name in type(value).model_fields}, **(value.model_extra or {})}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _sorted(items: Any) -> list[Any]:
    return sorted(items, key=json.dumps)


def _pickled(value: Any) -> str:
    try:
        return hashlib.sha256(pickle.dumps(value, protocol=5)).hexdigest()
    except Exception as error:
        raise InvalidRequestError(
            f"the node's input holds a {type(value).__name__}, which cannot be part of a cache key: {error}; leave it "
            "out of the state, or give the node no cache policy"
        ) from error
