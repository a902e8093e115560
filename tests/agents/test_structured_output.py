"""Structured output: valid by construction, and an error where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel, Field

from offset_runtime.agents import ChatOffset
from offset_runtime.errors import ConstraintError, InvalidRequestError

METHODS = ("json_schema", "function_calling", "json_mode")


class Verdict(BaseModel):
    """A verdict."""

    guilty: bool
    years: int = Field(ge=0, le=30, description="How long.")
    court: Literal["Rome", "Oslo"]


class VerdictDict(TypedDict):
    """A verdict."""

    guilty: bool
    court: Literal["Rome", "Oslo"]


class Node(BaseModel):
    leaf: bool
    below: Node | None


SCHEMA = {"title": "Verdict", "type": "object", "properties": {"guilty": {"type": "boolean"}}, "required": ["guilty"]}


@pytest.fixture
def model(law: ChatOffset) -> ChatOffset:
    return law.configured({"max_tokens": 600})


@pytest.mark.parametrize("method", METHODS)
async def test_each_method_gives_an_object_of_each_kind_of_schema(model: ChatOffset, method: Any) -> None:
    for schema, check in (
        (Verdict, lambda found: isinstance(found, Verdict)),
        (VerdictDict, lambda found: found.keys() == {"guilty", "court"}),
        (SCHEMA, lambda found: found.keys() == {"guilty"}),
    ):
        structured = model.with_structured_output(schema, method=method)
        assert check(structured.invoke("hello"))
        assert check(await structured.ainvoke("hello"))
        assert check(list(structured.stream("hello"))[-1])


def test_the_model_is_told_of_the_schema_but_in_json_mode(scripted: Callable[..., ChatOffset]) -> None:
    seen: list[str] = []
    model = scripted(lambda prompt: seen.append(prompt) or '{"guilty": true}')  # type: ignore[func-returns-value]

    for method in METHODS[::2]:
        model.with_structured_output(SCHEMA, method=method).invoke([("system", "Be brief."), ("user", "hello")])

    told, untold = dict.fromkeys(seen)
    assert told.startswith("system\nBe brief.\n\nAnswer with JSON of this schema:")
    assert untold == "system\nBe brief.\nuser\nhello\nassistant\n"


def test_objects_have_no_property_that_is_not_named_unless_strict_is_false(model: ChatOffset) -> None:
    empty = {"title": "Empty", "type": "object", "properties": {}}

    assert model.with_structured_output(empty).invoke("hello") == {}
    loose = model.with_structured_output(empty, strict=False)
    assert any(loose.invoke(f"hello {n}", max_tokens=900) for n in range(4))


def test_the_raw_message_is_given_beside_what_was_read(model: ChatOffset) -> None:
    found = model.with_structured_output(Verdict, include_raw=True).invoke("hello")

    assert found["parsing_error"] is None
    assert Verdict.model_validate_json(found["raw"].content) == found["parsed"]
    assert found["raw"].response_metadata["domain"] == "law"


def test_a_dict_comes_part_by_part(model: ChatOffset) -> None:
    parts = list(model.with_structured_output(VerdictDict).stream("hello"))

    assert len(parts) > 2
    assert all(set(one) <= set(other) for one, other in pairwise(parts))


@pytest.mark.parametrize("method", METHODS)
async def test_a_reply_that_was_cut_off_is_an_error_in_every_way_to_call(model: ChatOffset, method: Any) -> None:
    for schema in (Verdict, SCHEMA):
        structured = model.configured({"max_tokens": 8}).with_structured_output(schema, method=method)
        with pytest.raises(OutputParserException, match=r"cut off at max_tokens.*Raise max_tokens"):
            structured.invoke("hello")
        with pytest.raises(OutputParserException, match="cut off"):
            await structured.ainvoke("hello")
        with pytest.raises(OutputParserException, match="cut off"):
            list(structured.stream("hello"))
        with pytest.raises(OutputParserException, match="cut off"):
            [part async for part in structured.astream("hello")]
        raw = model.configured({"max_tokens": 8}).with_structured_output(schema, method=method, include_raw=True)
        found = raw.invoke("hello")
        assert found["parsed"] is None
        assert "cut off" in str(found["parsing_error"])


def test_a_class_that_holds_itself_can_be_a_schema(scripted: Callable[..., ChatOffset]) -> None:
    model = scripted(lambda prompt: '{"leaf": false, "below": {"leaf": true, "below": null}}')

    assert model.with_structured_output(Node).invoke("hello") == Node(leaf=False, below=Node(leaf=True, below=None))


@pytest.mark.parametrize("method", METHODS)
def test_what_no_reply_can_be_held_to_is_refused_at_once_with_its_place(law: ChatOffset, method: Any) -> None:
    schema = {**SCHEMA, "properties": {"guilty": {"not": {"type": "null"}}}}

    with pytest.raises(ConstraintError, match=r"not \(at \$\.properties\.guilty"):
        law.with_structured_output(schema, method=method)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda m: m.with_structured_output(SCHEMA, method="json"),
            "method='json' is unknown; expected one of json_schema",
        ),
        (lambda m: m.with_structured_output({"properties": {}}), "no JSON schema could be made of it"),
        (lambda m: m.with_structured_output(3), "no JSON schema could be made of it"),
        (lambda m: m.with_structured_output(SCHEMA, strcit=True).invoke("x"), "unknown argument 'strcit'"),
    ],
)
def test_what_is_no_schema_or_method_is_refused(
    law: ChatOffset, ask: Callable[[ChatOffset], Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ask(law)


@pytest.mark.parametrize("ask", [{"type": "json_object"}, {"type": "text"}, {"type": "json_object", "schema": SCHEMA}])
def test_a_response_format_as_servers_take_it_can_be_bound(law: ChatOffset, ask: dict[str, Any]) -> None:
    reply = law.bind(response_format=ask).invoke("hello", max_tokens=3000).content

    assert str(reply).startswith("{") is (ask["type"] == "json_object")


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_passes_no_half_of_an_answer(scripted: Callable[..., ChatOffset], method: Any) -> None:
    schema = {**SCHEMA, "properties": {"guilty": {"type": "string"}, "why": {"type": "string"}}}
    answer = '{"guilty": "not in the least", "why": "x"}'
    if method == "function_calling":
        answer = f'<tool_call>\n{{"name": "Verdict", "arguments": {answer}}}\n</tool_call>'
    model = scripted(lambda prompt: answer, stop=[" least"], max_tokens=120)

    with pytest.raises(OutputParserException, match="cut off at a stop string"):
        model.with_structured_output(schema, method=method).invoke("hello")


def test_a_json_schema_may_begin_with_a_reference(scripted: Callable[..., ChatOffset]) -> None:
    model = scripted(lambda prompt: '{"leaf": true, "below": null}')

    assert model.with_structured_output(Node.model_json_schema()).invoke("hello") == {"leaf": True, "below": None}


def test_with_the_raw_message_arguments_of_the_call_count_too(model: ChatOffset) -> None:
    found = model.with_structured_output(Verdict, include_raw=True).invoke("hello", domain="news", max_tokens=5)

    assert found["raw"].response_metadata["domain"] == "news"
    assert found["raw"].usage_metadata["output_tokens"] == 5
    assert "cut off" in str(found["parsing_error"])
