"""How calls are forced, told of and laid out, in each format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offset_runtime.backends.base import Tokenizer
from offset_runtime.backends.fake import VOCAB_SIZE, FakeTokenizer
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.chat import chat_prompt, chat_turns
from offset_runtime.constrain import Constraint, Grammars
from offset_runtime.errors import ConstraintError, InvalidRequestError
from offset_runtime.tool_formats import ToolFormat, ToolFormatName, knows_tools, tool_format
from offset_runtime.tools import Tool

FORMATS: tuple[ToolFormatName, ...] = ("hermes", "llama3", "mistral", "granite", "json")


class Template(FakeTokenizer):
    """A tokenizer whose chat template has the source `source`."""

    def __init__(self, source: str, *, tools: bool = True) -> None:
        super().__init__(tools=tools)
        self.chat_template = source


def tool(name: str = "look_up", **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return Tool(name, f"What {name} does.", schema)


LOOK_UP = tool(
    city={"type": "string", "maxLength": 12},
    days={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    unit={"enum": ["°C", "°F"]},
    place={
        "type": "object",
        "properties": {"x": {"type": "number", "minimum": -1, "maximum": 1}},
        "required": ["x"],
        "additionalProperties": False,
    },
)
TREE = Tool(
    "plant",
    "",
    {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/Node"}},
        "required": ["tree"],
        "additionalProperties": False,
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "leaf": {"type": "boolean"},
                    "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                },
                "required": ["leaf", "next"],
                "additionalProperties": False,
            }
        },
    },
)
NOTHING = Tool("stop", "", {"type": "object", "properties": {}, "additionalProperties": False})


def written(constraint: Constraint, seed: int) -> str:
    """A reply that random logits draw under `constraint`."""
    tokenizer = FakeTokenizer()
    matcher = Grammars(tokenizer).matcher(constraint)
    assert matcher is not None
    random = np.random.default_rng(seed)
    ids: list[int] = []
    while not matcher.ended:
        logits = random.normal(size=VOCAB_SIZE).astype(np.float32)
        # So that texts end some time.
        logits[list(b'"]}')] += 2
        token = int(np.argmax(matcher.mask(logits)))
        if token in tokenizer.eos_token_ids:
            break
        matcher.push(token)
        ids.append(token)
        assert len(ids) < 5000
    return tokenizer.decode(ids)


def the_format(name: ToolFormatName, named: bool = False) -> ToolFormat:
    return tool_format(Template("[TOOL_CALLS] [ARGS]") if named else FakeTokenizer(), name)


@pytest.mark.parametrize(("name", "named"), [*((name, False) for name in FORMATS), ("mistral", True)])
@settings(max_examples=15)
@given(st.sampled_from([[LOOK_UP], [TREE], [NOTHING], [NOTHING, LOOK_UP, TREE]]), st.integers(0, 2**32))
def test_a_forced_reply_ends_and_is_one_valid_call(
    name: ToolFormatName, named: bool, tools: list[Tool], seed: int
) -> None:
    form = the_format(name, named)

    reply = written(form.forced(tools, FakeTokenizer()), seed)

    reader = form.reader([tool.name for tool in tools])
    text = "".join(piece for piece in reader.push(reply) + reader.finish() if isinstance(piece, str))
    assert (text.strip(), reader.invalid) == ("", [])
    [call] = reader.calls
    [chosen] = [tool for tool in tools if tool.name == call.name]
    assert call.arguments.keys() == chosen.parameters["properties"].keys()
    if chosen is LOOK_UP:
        assert len(call.arguments["city"]) <= 12
        assert set(call.arguments["days"]) <= set(range(10))
        assert call.arguments["unit"] in ("°C", "°F")
        assert -1 <= call.arguments["place"]["x"] <= 1


def test_forced_replies_call_each_of_several_tools_and_answers_are_an_alternative() -> None:
    form = the_format("hermes")
    constraint = form.forced([NOTHING, LOOK_UP], FakeTokenizer(), answer={"type": "boolean"})

    replies = {written(constraint, seed) for seed in range(40)}

    assert {"true", "false"} & replies
    assert any('"stop"' in reply for reply in replies)
    assert any('"look_up"' in reply for reply in replies)


def test_a_marker_that_is_a_token_is_written_as_that_token_and_else_spelt_out() -> None:
    class WithMarker(FakeTokenizer):
        def encode(self, text: str) -> list[int]:
            return [256] if text == "<tool_call>" else super().encode(text)

    assert "<[256]>" in the_format("hermes").forced([NOTHING], WithMarker()).source
    assert '"<tool_call>"' in the_format("hermes").forced([NOTHING], FakeTokenizer()).source


def test_a_schema_that_no_reply_can_be_held_to_is_refused_by_the_tools_name() -> None:
    with pytest.raises(ConstraintError, match=r"tool 'look_up': .*dependentSchemas \(at \$.dependentSchemas\)"):
        the_format("json").forced([Tool("look_up", "", {"type": "object", "dependentSchemas": {}})], FakeTokenizer())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if tools %}... <tool_call> ... </tool_call>", "hermes"),
        ("{% if tools %} Environment: ipython <|python_tag|>", "llama3"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("{% if tools %}<|tool_call|>{% endif %} or <tool_call>", "granite"),
        ("{% if tools %}{{ tools }}{% endif %}", "json"),
    ],
)
def test_the_format_is_told_by_the_chat_template(source: str, expected: str) -> None:
    assert tool_format(Template(source)).name == expected
    assert tool_format(Template(source), "json").name == "json"


def test_the_format_of_a_template_that_knows_no_tools_is_hermes() -> None:
    assert tool_format(Template("{{ messages }}", tools=False)).name == "hermes"


def test_a_format_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidRequestError, match=r"'herms' is unknown; expected one of hermes.*did you mean 'hermes'"):
        tool_format(FakeTokenizer(), "herms")  # type: ignore[arg-type]


@pytest.mark.real_model
def test_the_real_template_knows_no_tools_and_shows_the_documented_prompt(smollm_torch: TorchBackend) -> None:
    tokenizer: Tokenizer = smollm_torch.tokenizer
    assert not knows_tools(tokenizer)

    prompt = tokenizer.decode(chat_turns(tokenizer, USER, (), [LOOK_UP])[0])

    assert tool_format(tokenizer).instructions([LOOK_UP]) in prompt


USER = [{"role": "user", "content": "Weather?"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": {"city": "Rom"}}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    *USER,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "Sunny.", "tool_call_id": "call_1"},
    {"role": "tool", "content": "Warm.", "tool_call_id": "call_1"},
    {"role": "user", "content": "And now?"},
]


def lines(tokenizer: FakeTokenizer, tools: list[Tool]) -> str:
    return tokenizer.decode(chat_turns(tokenizer, HISTORY, (), tools)[0])


def test_a_template_that_knows_no_tools_is_told_of_them_in_words() -> None:
    shown = lines(FakeTokenizer(), [LOOK_UP])

    call = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Rom"}}\n</tool_call>'
    told = tool_format(FakeTokenizer()).instructions([LOOK_UP])
    assert json.dumps(LOOK_UP.spec()["function"], ensure_ascii=False) in told
    assert shown == (
        f"system\nBe brief.\n\n{told}\nuser\nWeather?\nassistant\nI look.\n{call}\n{call}\n"
        "user\n<tool_response>\nSunny.\n</tool_response>\n<tool_response>\nWarm.\n</tool_response>\n\nAnd now?\n"
        "assistant\n"
    )


def test_calls_of_a_history_are_shown_without_tools_too() -> None:
    shown = lines(FakeTokenizer(), [])

    assert "You can call" not in shown
    assert shown.count("<tool_call>") == 2
    assert "Sunny." in shown


def test_a_template_that_knows_tools_gets_them_and_the_messages_as_they_are() -> None:
    shown = lines(FakeTokenizer(tools=True), [LOOK_UP])

    assert json.dumps(LOOK_UP.spec()) in shown
    assert "You can call" not in shown
    assert "tool\nSunny.\ntool\nWarm.\nuser\nAnd now?" in shown


def test_mistrals_templates_get_ids_of_nine_letters_and_digits() -> None:
    seen: list[Any] = []

    class Mistral(Template):
        def render_chat(self, messages: Any, **how: Any) -> str:
            seen.extend(messages)
            return super().render_chat(messages, **how)

    chat_prompt(Mistral("[TOOL_CALLS]"), HISTORY)

    ids = {call["id"] for message in seen for call in message.get("tool_calls", ())}
    answered = {message["tool_call_id"] for message in seen if "tool_call_id" in message}
    assert ids == answered
    assert all(len(each) == 9 and each.isalnum() for each in ids)


@pytest.mark.parametrize(
    "calls",
    ["x", ["x"], [{"name": "look_up"}], [{"function": {"name": 3}}], [{"function": {"name": "a", "arguments": "{"}}]],
)
def test_calls_in_another_shape_are_refused_by_the_place_of_their_message(calls: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"tool_calls of message 2 hold .*; expected a list of calls"):
        chat_prompt(FakeTokenizer(), [*USER, {"role": "assistant", "content": "", "tool_calls": calls}])


def test_arguments_of_a_history_may_be_json_text_as_openai_writes_them() -> None:
    written = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Rom"}'}}
    for tokenizer in (FakeTokenizer(), FakeTokenizer(tools=True)):
        one, other = (
            chat_prompt(tokenizer, [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
            for call in (written, {**CALL, "id": "1"})
        )
        assert one == other
