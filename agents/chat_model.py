"""ChatOffset: a LangChain chat model with a domain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import Field

from offset_runtime.agents.connection import CALL_FIELDS, Connection
from offset_runtime.agents.messages import template_turns
from offset_runtime.agents.reply import logprobs_metadata, usage_metadata
from offset_runtime.agents.reply_form import FORM_ARGUMENTS, ReplyForm, ToolLike, tool_spec
from offset_runtime.agents.structured import StructuredMethod, structured
from offset_runtime.agents.submission import Call, aopen_stream, astream_chunks, open_stream, stream_chunks
from offset_runtime.agents.tool_messages import ToolMessages
from offset_runtime.errors import OffsetError
from offset_runtime.offset import DomainOffset
from offset_runtime.request import Completion, Delta, Reuse
from offset_runtime.tool_formats import ToolFormatName, tool_format

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _ChatCall(Call[ChatGenerationChunk]):
    tool_messages: ToolMessages | None

    def result(self, completion: Completion) -> ChatResult:
        metadata = self.provenance.metadata(completion)
        metadata |= logprobs_metadata(self.runtime.backend.tokenizer, completion.logprobs)
        content, calls = completion.text, self.tool_messages
        if calls is not None:
            content = calls.push(completion.text)[0] + calls.finish()[0]
        message = AIMessage(
            content=content,
            response_metadata=metadata,
            usage_metadata=usage_metadata(completion),
            tool_calls=[] if calls is None else calls.tool_calls(),
            invalid_tool_calls=[] if calls is None else calls.invalid_tool_calls(),
        )
        return ChatResult(
            generations=[ChatGeneration(message=message, generation_info={"finish_reason": completion.finish_reason})]
        )

    def chunk(self, delta: Delta) -> ChatGenerationChunk | None:
        metadata = logprobs_metadata(self.runtime.backend.tokenizer, delta.logprobs)
        text, calls = (delta.text, []) if self.tool_messages is None else self.tool_messages.push(delta.text)
        if not text and not calls and not metadata:
            return None
        message = AIMessageChunk(content=text, response_metadata=metadata, tool_call_chunks=calls)
        return ChatGenerationChunk(message=message)

    def last_chunk(self, completion: Completion) -> ChatGenerationChunk:
        text, calls = ("", []) if self.tool_messages is None else self.tool_messages.finish()
        message = AIMessageChunk(
            content=text,
            response_metadata=self.provenance.metadata(completion),
            usage_metadata=usage_metadata(completion),
            tool_call_chunks=calls,
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

    `tool_format`: how tool calls are written, where it is not to be told from the model's chat template. A call also
    takes `constraint`, a `Constraint` that the whole reply must fit, and what `bind_tools` binds.

    Replies carry `usage_metadata`, and in `response_metadata` the model name, finish reason, domain,
    digest and strength of the offset, seconds per phase, and log-probabilities if wanted.
    """

    streaming: bool = False
    author_offsets: Literal["drop", "keep"] = "drop"
    tool_format: ToolFormatName | None = None
    reuse: Reuse | None = Field(default=None, exclude=True, repr=False)

    _call_fields: ClassVar[frozenset[str]] = CALL_FIELDS | {"author_offsets", "tool_format"}
    _call_arguments: ClassVar[frozenset[str]] = FORM_ARGUMENTS | {"stop"}

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
        tools: Sequence[ToolLike],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        response_format: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools that the reply may call, or must.

        `tools`: functions with type hints and a docstring, LangChain tools, Pydantic classes, or tools in the shape of
        OpenAI or Anthropic. They reach the model through its chat template, or through the system prompt where the
        template knows no tools. `tool_choice`: ``"auto"`` (None) leaves it to the model; ``"any"`` (``"required"``,
        True) or a tool's name makes the reply one call, which is held to the tool's schema while it is decoded;
        ``"none"`` leaves the tools out. `parallel_tool_calls` False: calls after the first are left out.
        `strict`: False lets objects have properties that their schema does not name, as JSON Schema does.
        `response_format`: as OpenAI's; a reply then is a call, or JSON of that schema. What a reply wrote that is no
        valid call stands in its `invalid_tool_calls`.

        Raises `InvalidRequestError` for what is no tool or names none, and `ConstraintError` for a schema that a
        reply cannot be held to and would have to be.
        """
        form = {
            "tools": [tool_spec(tool) for tool in tools],
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "strict": strict,
            "response_format": response_format,
        }
        given = {name: value for name, value in form.items() if value is not None and value != []}
        ReplyForm.of(given).check()
        return self.bind(**given, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: StructuredMethod = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose output is an object of `schema`: a Pydantic class, a `TypedDict` or a JSON schema.

        The reply is held to it while it is decoded, and told of it. `method`: ``"json_schema"``; ``"function_calling"``
        has the reply call a tool of that schema; ``"json_mode"`` leaves it to the user's prompt to tell of it.
        `strict`: False lets objects have properties that their schema does not name.
        `include_raw`: return a dict with `raw` (the message), `parsed` and `parsing_error` instead of raising.

        Raises `ConstraintError` for a schema that a reply cannot be held to, `InvalidRequestError` for what is none,
        and, when called, LangChain's `OutputParserException` for a reply that `max_tokens` or a stop
        string cut off.
        """
        return structured(self, schema, method=method, strict=strict, include_raw=include_raw, arguments=kwargs)

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
        call = self._prepare(messages, stop, kwargs)
        return call.result(open_stream(call.runtime, call.requests[0], call.max_retries).result())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # Loading the base and laying out the prompt take a while, so not on the loop. The rest is awaited.
        call = await asyncio.to_thread(self._prepare, messages, stop, kwargs)
        stream = await aopen_stream(call.runtime, call.requests[0], call.max_retries)
        return call.result(await stream.result())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        return stream_chunks(self._prepare(messages, stop, kwargs), run_manager)

    def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        return astream_chunks(partial(self._prepare, messages, stop, kwargs), run_manager)

    def _prepare(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, arguments: Mapping[str, Any]
    ) -> _ChatCall:
        form = ReplyForm.of(arguments)
        return self.configured(_settings(arguments))._call(messages, stop, form)

    def _call(self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, form: ReplyForm) -> _ChatCall:
        spoken = [i for i, message in enumerate(messages) if self.author_offsets == "keep" and _is_reply(message)]
        told = [SystemMessage(form.instructions)] if form.instructions else []
        turns, sources = template_turns([*messages, *told], spoken)
        offset = self.offset()
        runtime = self.load_runtime()
        tokenizer = runtime.backend.tokenizer
        # Told by rendering the template, which a call without tools need not wait for.
        written = tool_format(tokenizer, self.tool_format) if form.tools or self.tool_format else None
        request = runtime.chat_request(
            turns,
            domain=offset,
            strength=self.strength,
            sampling=self.sampling(stop),
            timeout_s=self.timeout,
            turn_offsets={turn: self._written_under(messages[index]) for turn, index in sources.items()},
            reuse=self.reuse,
            constraint=form.constrain(written, tokenizer),
            tools=form.tools,
            tool_format=written,
        )
        calls = None if written is None else form.calls(written, tokenizer)
        return _ChatCall(runtime, [request], self._provenance(offset), self.max_retries, calls)

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
        # The last decides over the form of the messages that are kept.
        own = {name: getattr(self, name) for name in ("author_offsets", "tool_format", "output_version")}
        return {**super()._identifying_params, **own}

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        # The key of LangChain's cache comes from here, so it must follow the arguments of the call.
        form = {name: value for name, value in kwargs.items() if name in FORM_ARGUMENTS}
        return {**super(ChatOffset, self.configured(_settings(kwargs)))._get_invocation_params(stop), **form}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self.configured(_settings(kwargs))._tracing_params("chat", stop)

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(tool_calling=True, tool_choice=True, structured_output=True)
        if self.runtime is not None:
            profile["max_input_tokens"] = self.runtime.backend.capabilities.context_tokens
        return profile

    def _batch_configs(
        self, config: RunnableConfig | Sequence[RunnableConfig] | None, length: int
    ) -> list[RunnableConfig]:
        configs = get_config_list(config, length)
        for each in configs:
            if each.get("max_concurrency") is None:
                each["max_concurrency"] = self.max_running
        return configs


def _settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that are fields of the model too."""
    return {name: value for name, value in arguments.items() if name not in FORM_ARGUMENTS}


def _is_reply(message: BaseMessage) -> bool:
    """Whether a message is a reply of a `ChatOffset`, in any domain or none, and its text all that was generated."""
    if not isinstance(message, AIMessage) or not isinstance(message.content, str):
        return False
    called = message.tool_calls or message.invalid_tool_calls
    return not called and "offset_digest" in message.response_metadata
