"""Structured output: a chat model whose output is an object of a schema."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, Protocol, get_args

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import (
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from offset_runtime.agents.reply_form import ToolLike
from offset_runtime.errors import InvalidRequestError, nearest_hint

# What tells a JSON schema from a tool in the shape of some provider.
_JSON_SCHEMA = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
StructuredMethod = Literal["json_schema", "function_calling", "json_mode"]


class ToolModel(Protocol):
    """A chat model that takes the arguments of `ChatOffset.bind_tools`."""

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: str | None = None,
        strict: bool | None = None,
        response_format: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]: ...


def structured(
    model: ToolModel,
    schema: Any,
    *,
    method: StructuredMethod,
    strict: bool | None,
    include_raw: bool,
    arguments: Mapping[str, Any],
) -> Runnable[LanguageModelInput, Any]:
    """See `ChatOffset.with_structured_output`; `arguments` are bound as well."""
    if method not in get_args(StructuredMethod):
        known = get_args(StructuredMethod)
        raise InvalidRequestError(
            f"method={method!r} is unknown; expected one of {', '.join(known)}{nearest_hint(str(method), known)}"
        )
    told: dict[str, Any] = {
        "ls_structured_output_format": {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    }
    parser: Runnable[Any, Any]
    if method == "function_calling":
        _check_object(schema)
        bound = model.bind_tools([schema], tool_choice="any", strict=strict, **told, **arguments)
        parser = RunnableGenerator(_whole, _awhole) | _call_parser(schema)
    else:
        response_format = _response_format(schema, method, strict)
        bound = model.bind_tools([], response_format=response_format, **told, **arguments)
        parser = RunnableGenerator(_whole, _awhole) | _text_parser(schema)
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    # Only the first of a sequence is given the arguments of a call.
    return (
        bound | RunnableMap(raw=RunnablePassthrough()) | parsed.with_fallbacks([failed], exception_key="parsing_error")
    )


def _check_object(schema: Any) -> None:
    found = _json_schema(schema)
    if found.get("type") != "object":
        what = f"is of type {found['type']!r}" if "type" in found else "does not say of what type it is"
        raise InvalidRequestError(
            f"the schema {what}, and arguments of a call are an object; give one of type 'object', or take "
            "method='json_schema'"
        )


def _response_format(schema: Any, method: StructuredMethod, strict: bool | None) -> dict[str, Any]:
    found = _json_schema(schema)
    if method == "json_mode":
        return {"type": "json_object", "schema": found, **({} if strict is None else {"strict": strict})}
    described: dict[str, Any] = {"name": str(found.get("title", "answer")), "schema": found}
    if strict is not None:
        described["strict"] = strict
    return {"type": "json_schema", "json_schema": described}


def _json_schema(schema: Any) -> dict[str, Any]:
    try:
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            # Pydantic's own, since LangChain writes references out, which one that holds itself cannot be.
            return schema.model_json_schema()
        if isinstance(schema, dict) and schema.get("type") != "function" and not _JSON_SCHEMA.isdisjoint(schema):
            return schema
        return convert_to_json_schema(schema)
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise InvalidRequestError(
            f"the schema is of type {type(schema).__name__}, and no JSON schema could be made of it: {error}. Expected "
            "a Pydantic class, a TypedDict, or a JSON schema with a title"
        ) from error


def _call_parser(schema: Any) -> Runnable[Any, Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=convert_to_json_schema(schema)["title"], first_tool_only=True)


def _text_parser(schema: Any) -> Runnable[Any, Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()


def _whole(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Pass on a reply, or its chunks, and raise `OutputParserException` at the end of one that is no whole JSON.

    LangChain's parsers complete JSON that breaks off, and would pass half an answer for a whole one.
    """
    written = ""
    for message in messages:
        written += _written(message)
        _check_end(message, written)
        yield message


async def _awhole(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    written = ""
    async for message in messages:
        written += _written(message)
        _check_end(message, written)
        yield message


def _written(message: AIMessage) -> str:
    if isinstance(message, AIMessageChunk):
        calls = [str(chunk["args"] or "") for chunk in message.tool_call_chunks]
    else:
        invalid = [str(call["args"] or "") for call in message.invalid_tool_calls]
        calls = [json.dumps(call["args"], default=str) for call in message.tool_calls[:1]] or invalid
    return str(message.text) + "".join(calls)


def _check_end(message: AIMessage, written: str) -> None:
    reason = message.response_metadata.get("finish_reason")
    # While a reply streams, only its last chunk says why it ended.
    if reason is None or _is_json(written):
        return
    cut, advice = ("a stop string", "Take `stop` out: the schema says where such a reply ends.")
    if reason == "length":
        cut, advice = ("max_tokens", "Raise max_tokens, or shorten what the schema asks for: maxLength and maxItems.")
    raise OutputParserException(
        f"the reply was cut off at {cut}, before its JSON was complete: {written[-80:]!r}. {advice}", llm_output=written
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True
