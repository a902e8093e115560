"""ChatOffset: a LangChain chat model with a domain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, Literal, NoReturn, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from langchain_core.tools import BaseTool
from pydantic import Field

from offset_runtime.agents.connection import CALL_FIELDS, Connection
from offset_runtime.agents.messages import template_turns
from offset_runtime.agents.reply import logprobs_metadata, usage_metadata
from offset_runtime.agents.submission import Call, aopen_stream, astream_chunks, open_stream, stream_chunks
from offset_runtime.errors import InvalidRequestError, OffsetError
from offset_runtime.offset import DomainOffset
from offset_runtime.request import Completion, Delta, Reuse

_log = logging.getLogger(__name__)


class _NotSupportedError(InvalidRequestError, NotImplementedError):
    """What chat models may offer and this one does not; LangChain looks for `NotImplementedError`."""


class _ChatCall(Call[ChatGenerationChunk]):
    __slots__ = ()

    def result(self, completion: Completion) -> ChatResult:
        metadata = self.provenance.metadata(completion)
        metadata |= logprobs_metadata(self.runtime.backend.tokenizer, completion.logprobs)
        message = AIMessage(
            content=completion.text, response_metadata=metadata, usage_metadata=usage_metadata(completion)
        )
        return ChatResult(
            generations=[ChatGeneration(message=message, generation_info={"finish_reason": completion.finish_reason})]
        )

    def chunk(self, delta: Delta) -> ChatGenerationChunk | None:
        metadata = logprobs_metadata(self.runtime.backend.tokenizer, delta.logprobs)
        if not delta.text and not metadata:
            return None
        return ChatGenerationChunk(message=AIMessageChunk(content=delta.text, response_metadata=metadata))

    def last_chunk(self, completion: Completion) -> ChatGenerationChunk:
        message = AIMessageChunk(
            content="",
            response_metadata=self.provenance.metadata(completion),
            usage_metadata=usage_metadata(completion),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message, generation_info={"finish_reason": completion.finish_reason})


class ChatOffset(Connection, BaseChatModel):
    """A chat model on the shared base, in a domain. See `Connection` for its fields.

    The domain is a field, and for_domain() gives the same model in another one. `model.bind(domain=…)`
    works for a plain call, but whatever binds tools on the inner model drops such a binding, so give
    agents an instance that has the domain. `stop` of a call adds to the model's own. `streaming` is
    LangChain's: True makes invoke() stream inside, an explicit False keeps LangGraph from streaming
    tokens; left out, tokens stream where they are asked for. `author_offsets`: with ``"keep"`` the messages' earlier
    replies by a `ChatOffset` are read under the turn-anchored offsets they were written under, so that the state of
    those turns need not be computed anew; with ``"drop"`` as plain text. `reuse`: what the prefix cache is to know of
    the call; `agent_node` sets it.

    Tools and structured output are not supported yet: binding them raises an `InvalidRequestError` that
    is a `NotImplementedError` too. LangChain's `create_agent` works with ``tools=[]``.

    Replies carry `usage_metadata`, and in `response_metadata` the model name, finish reason, domain,
    digest and strength of the offset, seconds per phase, and log-probabilities if wanted.
    """

    streaming: bool = False
    author_offsets: Literal["drop", "keep"] = "drop"
    reuse: Reuse | None = Field(default=None, exclude=True, repr=False)

    _call_fields: ClassVar[frozenset[str]] = CALL_FIELDS | {"author_offsets"}

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Run all inputs, as many at once as the engine does where `max_concurrency` does not say otherwise."""
        configs = self._batch_configs(config, len(inputs))
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """As `batch`, on the event loop."""
        configs = self._batch_configs(config, len(inputs))
        return await super().abatch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind the arguments of a call; `InvalidRequestError` where there are tools, which are not supported yet."""
        if tools or tool_choice is not None:
            raise _NotSupportedError(
                f"{type(self).__name__} was given {len(tools)} tools, and this release does not support tools yet; "
                "leave them out. create_agent works with tools=[]."
            )
        return self.bind(**kwargs)

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> NoReturn:
        """Raise `InvalidRequestError`: structured output is not supported yet."""
        raise _NotSupportedError(
            f"{type(self).__name__} was asked for structured output, which this release does not support yet; "
            "ask for the form in the prompt, and parse the text of the reply."
        )

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        await self._read_offset(kwargs)
        return await super().agenerate(messages, stop, callbacks, **kwargs)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        await self._read_offset(kwargs)
        stream = super().astream(input, config, stop=stop, **kwargs)
        async with aclosing(cast(Any, stream)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self.configured(kwargs)._prepare(messages, stop)
        return call.result(open_stream(call.runtime, call.requests[0], call.max_retries).result())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # Loading the base and laying out the prompt take a while, so not on the loop. The rest is awaited.
        call = await asyncio.to_thread(self.configured(kwargs)._prepare, messages, stop)
        stream = await aopen_stream(call.runtime, call.requests[0], call.max_retries)
        return call.result(await stream.result())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        return stream_chunks(self.configured(kwargs)._prepare(messages, stop), run_manager)

    def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        return astream_chunks(partial(self.configured(kwargs)._prepare, messages, stop), run_manager)

    def _prepare(self, messages: Sequence[BaseMessage], stop: Sequence[str] | None) -> _ChatCall:
        spoken = [i for i, message in enumerate(messages) if self.author_offsets == "keep" and _is_reply(message)]
        turns, sources = template_turns(messages, spoken)
        offset = self.offset()
        runtime = self.load_runtime()
        request = runtime.chat_request(
            turns,
            domain=offset,
            strength=self.strength,
            sampling=self.sampling(stop),
            timeout_s=self.timeout,
            turn_offsets={turn: self._written_under(messages[index]) for turn, index in sources.items()},
            reuse=self.reuse,
        )
        return _ChatCall(runtime, [request], self._provenance(offset), self.max_retries)

    def _written_under(self, message: BaseMessage) -> DomainOffset | None:
        """The turn-anchored offset that a reply's metadata names, at its strength."""
        told = message.response_metadata
        digest, domain, strength = told.get("offset_digest"), told.get("domain"), told.get("strength", 1.0)
        if digest is None or strength == 0:
            return None
        try:
            offset = self.for_domain(domain).offset()
            scaled = None if offset is None else offset.scaled(strength)
        # Whatever the metadata hold: they may come from anywhere.
        except (OffsetError, TypeError, ValueError, OverflowError) as error:
            _log.warning("a reply written in domain %r is read without its offset: %s", domain, error)
            return None
        if offset is None or not isinstance(digest, str) or offset.digest != digest:
            _log.warning("a reply written in domain %r is read without its offset: that is another one now", domain)
            return None
        # A sequence-anchored one lay at the beginning of its author's own prompt.
        return scaled if offset.anchor == "turn" else None

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "author_offsets": self.author_offsets}

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        # The key of LangChain's cache comes from here, so it must follow the arguments of the call.
        return super(ChatOffset, self.configured(kwargs))._get_invocation_params(stop)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self.configured(kwargs)._tracing_params("chat", stop)

    def _resolve_model_profile(self) -> ModelProfile | None:
        if self.runtime is None:
            return None
        return {"max_input_tokens": self.runtime.backend.capabilities.context_tokens}

    def _batch_configs(
        self, config: RunnableConfig | Sequence[RunnableConfig] | None, length: int
    ) -> list[RunnableConfig]:
        configs = get_config_list(config, length)
        for each in configs:
            if each.get("max_concurrency") is None:
                each["max_concurrency"] = self.max_running
        return configs


def _is_reply(message: BaseMessage) -> bool:
    """Whether a message is a reply of a `ChatOffset`, in any domain or none, and its text all that was generated."""
    plain = isinstance(message, AIMessage) and isinstance(message.content, str) and not message.tool_calls
    return plain and "offset_digest" in message.response_metadata
