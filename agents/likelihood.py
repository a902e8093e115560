"""Scoring texts as replies: what routers and re-rankers stand on. No token is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offset_runtime.agents.chat_model import ChatOffset
from offset_runtime.backends.base import Message
from offset_runtime.chat import check_text
from offset_runtime.errors import InvalidRequestError
from offset_runtime.offset import DomainOffset
from offset_runtime.request import Completion, Request
from offset_runtime.runtime import OffsetRuntime
from offset_runtime.sampling import SamplingParams


def speaker(model: ChatOffset | str, runtime: OffsetRuntime | None) -> ChatOffset:
    """The chat model that `model` is, or that its address names; `runtime`, where given, runs it."""
    if isinstance(model, str):
        return ChatOffset(model=model, runtime=runtime)
    if not isinstance(model, ChatOffset):
        raise InvalidRequestError(
            f"model is a {type(model).__name__}; expected a ChatOffset, or the name of a base model. A model that is "
            "wrapped (bind, with_retry) does not give its offsets away: give the ChatOffset inside"
        )
    return model if runtime is None else model.model_copy(update={"runtime": runtime})


def likelihood_request(
    model: ChatOffset, offset: DomainOffset | None, messages: Sequence[Message], reply: Sequence[int]
) -> Request:
    """A request that gives the log-probabilities of `reply` (token ids) to `messages` under `offset`.

    Raises what `OffsetRuntime.chat_request` raises: `PromptFormatError` for an offset of another format than chat.
    """
    asked = model.load_runtime().chat_request(
        messages,
        domain=offset,
        strength=model.strength,
        sampling=SamplingParams(max_tokens=0),
        timeout_s=model.timeout,
    )
    return replace(asked, prompt_ids=asked.prompt_ids + tuple(reply), score_from=len(asked.prompt_ids))


def total(completion: Completion) -> float:
    """Log-likelihood of the scored reply, in nats."""
    return sum(completion.prompt_logprobs)


def longest_prompt(runtime: OffsetRuntime) -> int:
    """How many tokens a request that generates none may have."""
    limits = runtime.backend.capabilities
    return min(limit for limit in (limits.context_tokens, limits.kv_capacity_tokens) if limit is not None)


def first_tokens(runtime: OffsetRuntime, text: str, count: int) -> str:
    """The first `count` tokens of `text` as text, without a character that is cut in two; a short text as it is."""
    check_text(text)
    tokenizer = runtime.backend.tokenizer
    ids = tokenizer.encode(text)
    return text if len(ids) <= count else tokenizer.decode(ids[:count]).rstrip("\ufffd")
