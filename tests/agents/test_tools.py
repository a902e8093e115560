"""Tools of a ChatOffset: what may be bound, what is called, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.tools import tool
from langchain_core.utils.json import parse_partial_json
from pydantic import BaseModel

from offset_runtime import Constraint
from offset_runtime.agents import ChatOffset
from offset_runtime.agents.reply_form import ReplyForm, closed
from offset_runtime.agents.tool_messages import broken_end
from offset_runtime.errors import ConstraintError, InvalidRequestError

MakeScripted = Callable[..., ChatOffset]


def weather(city: str, days: int = 1) -> str:
    """The weather in a city."""
    return "sunny"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Book(BaseModel):
    """Book a table."""

    seats: int


OPENAI = {"type": "function", "function": {"name": "openai", "parameters": {"type": "object", "properties": {}}}}
ANTHROPIC = {"name": "anthropic", "description": "x", "input_schema": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [weather, add, Book, OPENAI, ANTHROPIC]


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def merged(chunks: Iterator[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    for chunk in rest:
        first += chunk  # type: ignore[assignment]
    return first


@pytest.mark.parametrize("choice", ["any", "required", True])
def test_any_makes_the_reply_one_call_of_one_of_the_tools(law: ChatOffset, choice: Any) -> None:
    reply = law.bind_tools(TOOLS, tool_choice=choice).invoke("hello", max_tokens=400)

    assert len(reply.tool_calls) == 1
    assert (reply.content, reply.invalid_tool_calls) == ("", [])
    assert reply.response_metadata["domain"] == "law"


@pytest.mark.parametrize(
    "choice",
    [
        "add",
        {"type": "function", "function": {"name": "add"}},
        {"type": "tool", "name": "add"},
    ],
)
def test_a_name_makes_the_reply_a_call_of_that_tool(law: ChatOffset, choice: Any) -> None:
    [called] = law.bind_tools(TOOLS, tool_choice=choice).invoke("hello", max_tokens=400).tool_calls

    assert called["name"] == "add"
    assert {name: type(value) for name, value in called["args"].items()} == {"a": int, "b": int}


def test_every_kind_of_tool_can_be_called(law: ChatOffset) -> None:
    for name in ("weather", "add", "Book", "openai", "anthropic"):
        [called] = law.bind_tools(TOOLS, tool_choice=name).invoke("hello", max_tokens=400).tool_calls
        assert called["name"] == name


@pytest.mark.parametrize("choice", [None, "auto", False])
def test_auto_leaves_it_to_the_model(scripted: MakeScripted, choice: Any) -> None:
    model = scripted(lambda prompt: call("add", {"a": 1, "b": 2}) if "sum" in prompt else "No sums here.")
    bound = model.bind_tools([add], tool_choice=choice)

    assert bound.invoke("a sum").tool_calls[0]["args"] == {"a": 1, "b": 2}
    assert bound.invoke("hello").content == "No sums here."


def test_none_leaves_the_tools_out(scripted: MakeScripted) -> None:
    model = scripted(lambda prompt: "told" if "add" in prompt else call("add", {}))

    reply = model.bind_tools([add], tool_choice="none").invoke("hello")

    assert (reply.content, reply.tool_calls) == (call("add", {}), [])


def test_without_parallel_calls_those_after_the_first_are_left_out(scripted: MakeScripted) -> None:
    model = scripted(lambda prompt: call("add", {"a": 1, "b": 2}) + "\n" + call("add", {"a": 3, "b": 4}))

    assert len(model.bind_tools([add]).invoke("hello").tool_calls) == 2
    bound = model.bind_tools([add], parallel_tool_calls=False)
    assert [found["args"]["a"] for found in bound.invoke("hello").tool_calls] == [1]
    assert [found["args"]["a"] for found in merged(bound.stream("hello")).tool_calls] == [1]


@pytest.mark.parametrize(
    "reply",
    [
        call("add", {"a": 1, "b": 2}),
        "First.\n" + call("add", {"a": 1, "b": 2}) + "\n" + call("add", {"a": 3, "b": 4}),
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": ',
        '<tool_call>{"name": "add", "arguments": {"a": "x\\',
        '<tool_call>{"arguments": {"a": 1}}</tool_call> Oh.',
        '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
        "<tool_call>add(1, 2)</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 2000,
        '<tool_call>{"name": "ad',
        "<tool_call>",
        "Nothing to add.",
    ],
)
async def test_a_stream_merges_to_what_invoke_returns(scripted: MakeScripted, reply: str) -> None:
    model = scripted(lambda prompt: reply).bind_tools([add])

    whole = model.invoke("hello")
    streamed = [merged(model.stream("hello")), merged(iter([chunk async for chunk in model.astream("hello")]))]

    assert whole.tool_calls or whole.invalid_tool_calls or whole.content == reply
    for found in (*streamed, await model.ainvoke("hello")):
        assert found.content == whole.content
        assert [(c["name"], c["args"]) for c in found.tool_calls] == [(c["name"], c["args"]) for c in whole.tool_calls]
        for one, other in zip(found.invalid_tool_calls, whole.invalid_tool_calls, strict=True):
            assert one["name"] == other["name"]
            assert str(one["args"]).startswith(str(other["args"]))
        ids = [each["id"] for each in (*found.tool_calls, *found.invalid_tool_calls)]
        assert all(ids)
        assert len(set(ids)) == len(ids)


def test_a_malformed_call_says_what_is_wrong_with_it(scripted: MakeScripted) -> None:
    reply = (
        scripted(lambda prompt: '<tool_call>{"name": "add", "arguments": 3}</tool_call>').bind_tools([add]).invoke("x")
    )

    [found] = reply.invalid_tool_calls
    assert found["name"] == "add"
    assert "expected an object" in str(found["error"])


@pytest.mark.parametrize("whole", ['{"a": "x\\\\\\"y", "b": [1, {"c": null}]}', "{}", "", "add(1)"])
def test_no_beginning_of_arguments_with_a_broken_end_is_read_as_whole(whole: str) -> None:
    for cut in range(len(whole) + 1):
        arguments = whole[:cut] + broken_end(whole[:cut])
        assert arguments
        try:
            assert not isinstance(parse_partial_json(arguments), dict)
        except ValueError:
            continue


def test_the_bound_model_and_the_unbound_share_no_cached_reply(scripted: MakeScripted) -> None:
    model = scripted(lambda prompt: call("add", {"a": 1, "b": 2}) if "add" in prompt else "No tools.")
    set_llm_cache(InMemoryCache())
    try:
        assert model.invoke("hello").content == "No tools."
        assert model.bind_tools([add]).invoke("hello").tool_calls
        assert model.bind_tools([add], tool_choice="none").invoke("hello").content == "No tools."
    finally:
        set_llm_cache(None)


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        (lambda m: m.bind_tools([add], tool_choice="ad"), "tool_choice='ad' names no tool.*did you mean 'add'"),
        (lambda m: m.bind_tools([], tool_choice="any"), "no tools were given"),
        (lambda m: m.bind_tools([{"type": "web_search"}]), "run at their provider"),
        (lambda m: m.bind_tools([{"type": "web_search_20250305", "name": "web_search"}]), "run at their provider"),
        (lambda m: m.bind_tools([{"parameters": {}}]), "cannot be used"),
        (lambda m: m.bind_tools([3]), "cannot be used"),
        (lambda m: m.bind_tools([add, {**ANTHROPIC, "name": "add"}]), "two tools have the name 'add'"),
        (lambda m: m.bind_tools([add], tool_choice={"name": []}), "names no tool"),
        (lambda m: m.bind_tools([add], tool_choice={"function": {"name": None}}), "names no tool"),
        (lambda m: m.bind_tools([{**ANTHROPIC, "name": 5}]), "cannot be used"),
        (
            lambda m: m.bind_tools([{**ANTHROPIC, "input_schema": [1]}]),
            "of tool 'anthropic' are of type list",
        ),
        (lambda m: m.bind_tools([{**ANTHROPIC, "input_schema": {"default": {1}}}]), "cannot be written as JSON"),
        (lambda m: m.bind_tools([{**ANTHROPIC, "name": "a\x01"}], tool_choice="any"), "control character"),
        (lambda m: m.bind_tools([add], parallel_tool_calls="no"), "expected True, False or None"),
        (lambda m: m.bind_tools([], response_format={"type": "xml"}), "is of no known type"),
        (lambda m: m.bind_tools([], response_format={"type": "json_schema"}), "its schema is None"),
        (lambda m: m.bind_tools([add], constraint=Constraint.regex("a")).invoke("x"), "held to one of them only"),
        (lambda m: m.bind(constraint="a").invoke("x"), "expected a Constraint"),
        (
            lambda m: m.bind_tools([add], tool_chioce="any").invoke("x"),
            "unknown argument 'tool_chioce'; did you mean 'tool_choice'",
        ),
        (lambda m: m.configured({"tool_format": "herms"}), "tool_format"),
    ],
)
def test_what_does_not_fit_is_refused_and_said(
    law: ChatOffset, bind: Callable[[ChatOffset], Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        bind(law)


def test_a_schema_that_a_forced_call_cannot_be_held_to_is_refused_when_it_is_bound(law: ChatOffset) -> None:
    odd = {**ANTHROPIC, "input_schema": {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}}

    with pytest.raises(ConstraintError, match=r"tool 'anthropic'.*not"):
        law.bind_tools([odd], tool_choice="any")
    # Where the model is free it is only told of it.
    assert law.bind_tools([odd]).invoke("hello").content


def test_strict_decides_whether_objects_may_have_properties_that_are_not_named(law: ChatOffset) -> None:
    named = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    free = {**ANTHROPIC, "input_schema": named}

    for strict, expected in ((None, False), (True, False), (False, None)):
        bound: Any = law.bind_tools([free], strict=strict)
        [found] = ReplyForm.of(bound.kwargs).tools
        assert found.parameters.get("additionalProperties") is expected


def test_a_constraint_of_ones_own_holds_the_whole_reply(law: ChatOffset) -> None:
    assert law.invoke("hello", constraint=Constraint.regex("yes|no")).content in ("yes", "no")
    assert law.bind(constraint=Constraint.lark('start: "a" "b"')).invoke("hello").content == "ab"


async def test_the_first_constrained_reply_does_not_hold_the_loop(law: ChatOffset) -> None:
    assert (await law.bind_tools([add], tool_choice="any").ainvoke("hello", max_tokens=200)).tool_calls


def test_a_history_with_calls_and_results_goes_back_to_the_model(scripted: MakeScripted) -> None:
    seen: list[str] = []
    model = scripted(lambda prompt: seen.append(prompt) or "Three.").bind_tools([add])  # type: ignore[func-returns-value]
    called = AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1, "b": 2}, "id": "1"}])

    model.invoke([("user", "1 + 2?"), called, add.invoke(called.tool_calls[0])])

    assert call("add", {"a": 1, "b": 2}) in seen[0]
    assert "<tool_response>\n3\n</tool_response>" in seen[0]


def test_a_tool_may_have_the_name_of_a_choice(scripted: MakeScripted) -> None:
    def auto(city: str) -> str:
        """Drive to a city."""
        return city

    model = scripted(lambda prompt: "On foot.")

    assert model.bind_tools([auto]).invoke("x").content == "On foot."
    bound: Any = model.bind_tools([auto], tool_choice="auto")
    assert ReplyForm.of(bound.kwargs).forced[0].name == "auto"


def test_an_answer_that_looks_like_a_call_is_the_answer(scripted: MakeScripted) -> None:
    reply = '{"name": "add", "rating": 3}'
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "rating": {"type": "integer"}}}
    answer = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    found = scripted(lambda prompt: reply).bind_tools([add], response_format=answer).invoke("x")

    assert (found.content, found.tool_calls) == (reply, [])


def test_cached_replies_are_kept_apart_by_the_form_of_their_content(law: ChatOffset) -> None:
    set_llm_cache(InMemoryCache())
    try:
        assert isinstance(law.invoke("hello").content, str)
        assert isinstance(law.model_copy(update={"output_version": "v1"}).invoke("hello").content, list)
    finally:
        set_llm_cache(None)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
        {"properties": {"c": {"type": "integer"}}, "required": ["c"], "allOf": [{"$ref": "#/$defs/A"}]},
    ],
)
def test_a_schema_put_together_from_several_stays_as_it_is(schema: dict[str, Any]) -> None:
    parts = {
        name: {"type": "object", "properties": {name.lower(): {"type": "integer"}}, "required": [name.lower()]}
        for name in "AB"
    }
    whole = {**schema, "$defs": parts}

    assert closed(whole) == whole
    for kind in ("object", ["object", "null"]):
        assert closed({"type": kind, "properties": {}})["additionalProperties"] is False


class Tree(BaseModel):
    """Plant a tree."""

    leaf: bool
    below: Tree | None


def plant(tree: Tree) -> str:
    """Plant a tree."""
    return "done"


@pytest.mark.parametrize("given", [Tree, plant, tool(plant)])
def test_a_tool_whose_arguments_hold_themselves_can_be_forced(law: ChatOffset, given: Any) -> None:
    [called] = law.bind_tools([given], tool_choice="any").invoke("hello", max_tokens=900).tool_calls

    planted = called["args"] if given is Tree else called["args"]["tree"]
    assert Tree.model_validate(planted)
