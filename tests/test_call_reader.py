"""Reading tool calls from the text of a reply, however it is cut."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offset_runtime.backends.fake import FakeTokenizer
from offset_runtime.call_reader import CallReader
from offset_runtime.tool_formats import ToolFormatName, tool_format
from offset_runtime.tools import CallPiece

NAMES = ("look_up", "add")
ARGUMENTS = {"text": 'a "}" and </tool_call> [TOOL_CALLS] \\ é\n☃', "deep": {"list": [1, {"x": None}], "no": False}}
FORMATS: tuple[ToolFormatName, ...] = ("hermes", "llama3", "mistral", "granite", "json")


class Read:
    """All that a reader gives of a reply that comes in `parts`."""

    def __init__(self, form: ToolFormatName, parts: Sequence[str]) -> None:
        reader: CallReader = tool_format(FakeTokenizer(), form).reader(NAMES)
        pieces = [piece for part in parts for piece in reader.push(part)]
        self.before_end = list(pieces)
        pieces += reader.finish()
        self.text = "".join(piece for piece in pieces if isinstance(piece, str))
        self.names: dict[int, str] = {}
        self.arguments: defaultdict[int, str] = defaultdict(str)
        for piece in pieces:
            if isinstance(piece, CallPiece):
                if piece.name is not None:
                    assert piece.index not in self.names
                    self.names[piece.index] = piece.name
                self.arguments[piece.index] += piece.arguments
        self.calls = [(call.index, call.name, call.arguments) for call in reader.calls]
        self.invalid = [(call.index, call.name, call.text, call.error) for call in reader.invalid]

    @property
    def all(self) -> tuple[Any, ...]:
        return self.text, self.names, dict(self.arguments), self.calls, self.invalid


def body(arguments: object = ARGUMENTS, name: str = "look_up", key: str = "arguments", **style: Any) -> str:
    return json.dumps({"name": name, key: arguments}, **style)


VALID: list[tuple[ToolFormatName, str]] = [
    ("hermes", f"<tool_call>\n{body()}\n</tool_call>"),
    ("hermes", f"<tool_call>{body(ensure_ascii=False)}</tool_call>"),
    ("hermes", f"<tool_call>\n[{body()}]\n</tool_call>"),
    ("hermes", f"<tool_call>\n{body(json.dumps(ARGUMENTS))}\n</tool_call>"),
    ("hermes", body()),
    ("hermes", f"<tool_call>\n{body()}"),
    ("hermes", f"<tool_call>\n{body()}\n</tool_c"),
    ("llama3", body(key="parameters")),
    ("llama3", f"<|python_tag|>{body(key='parameters')}"),
    ("llama3", body(key="parameters", indent=2)),
    ("mistral", f"[TOOL_CALLS] [{body()}]"),
    ("mistral", f" [{body()}]"),
    ("mistral", f"[TOOL_CALLS]look_up[ARGS]{json.dumps(ARGUMENTS)}"),
    ("mistral", f"[TOOL_CALLS]look_up[CALL_ID]a1B2c3D4e[ARGS]{json.dumps(ARGUMENTS)}"),
    ("mistral", f"look_up{json.dumps(ARGUMENTS)}"),
    ("granite", f"<|tool_call|>[{body()}]"),
    ("granite", f"<tool_call>[{body()}]</tool_call>"),
    ("granite", f"[{body()}]"),
    ("json", body()),
    ("json", f"[{body()}]"),
    ("json", f"```json\n{body()}\n```"),
    ("json", f"```\n{body()}\n```"),
    ("json", json.dumps({"type": "function", "function": {"name": "look_up", "arguments": ARGUMENTS}})),
    ("json", json.dumps({"arguments": ARGUMENTS, "name": "look_up"})),
    ("json", json.dumps({"id": "1", "type": "function", "name": "look_up", "parameters": ARGUMENTS})),
]


@pytest.mark.parametrize(("form", "text"), VALID)
def test_a_call_is_read_and_streams_as_it_comes(form: ToolFormatName, text: str) -> None:
    whole, by_character = Read(form, [text]), Read(form, list(text))

    assert whole.calls == [(0, "look_up", ARGUMENTS)]
    assert (whole.text.strip(), whole.invalid) == ("", [])
    assert json.loads(whole.arguments[0], strict=False) == ARGUMENTS
    assert by_character.all == whole.all


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>\n{a}\n</tool_call>\n<tool_call>\n{b}\n</tool_call>"),
        ("hermes", "<tool_call>[{a}, {b}]</tool_call>"),
        ("hermes", "<tool_call>{a}\n{b}</tool_call>"),
        ("llama3", "{a}; {b}"),
        ("llama3", "<|python_tag|>{a}; {b}"),
        ("mistral", "[TOOL_CALLS] [{a}, {b}]"),
        ("granite", "<|tool_call|>[{a},{b}]"),
        ("json", "[{a}, {b}]"),
        ("json", "{a}\n{b}"),
    ],
)
def test_parallel_calls_are_read_in_order(form: ToolFormatName, text: str) -> None:
    text = text.replace("{a}", body({"x": 1})).replace("{b}", body({}, "add"))

    read = Read(form, [text])

    assert read.calls == [(0, "look_up", {"x": 1}), (1, "add", {})]
    assert (read.text.strip(), read.invalid) == ("", [])
    assert Read(form, list(text)).all == read.all


def test_text_around_calls_is_the_content() -> None:
    text = f"Wait.\n<tool_call>{body({})}</tool_call> And\n<tool_call>{body({}, 'add')}</tool_call>Done."

    read = Read("hermes", [text])

    assert read.text == "Wait.\n And\nDone."
    assert [name for _, name, _ in read.calls] == ["look_up", "add"]


def test_a_thought_may_speak_of_calls() -> None:
    thought = f"<think>I could write <tool_call>{body()}</tool_call>.</think>\n"

    read = Read("hermes", [thought + f"<tool_call>{body({})}</tool_call>"])

    assert read.text.startswith(thought)
    assert read.calls == [(0, "look_up", {})]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "It is sunny.",
        "  \n indented\n",
        '{"city": "Rome", "sunny": true}',
        '{"name": "Bob", "age": 3}',
        '{"name": 5}',
        '[1, 2, {"name": "look_up"}]',
        "[see above]",
        "{",
        "```python\nlook = {}\n```",
        "look_upward is not a tool, nor is add",
        "a < b and <tool> and [TOOL",
        "Call `look_up`: a list [x] of {things}.",
        "\u00e9\u2603 ``` {",
    ],
)
def test_what_is_no_call_stays_text(form: ToolFormatName, text: str) -> None:
    read = Read(form, [text])

    assert read.all == (text, {}, {}, [], [])
    assert Read(form, list(text)).all == read.all


@pytest.mark.parametrize(
    ("form", "text"), [("hermes", f"As JSON:\n{body()}"), ("json", f"I would write {body()} for that.")]
)
def test_json_within_a_text_is_text(form: ToolFormatName, text: str) -> None:
    assert Read(form, [text]).all == (text, {}, {}, [], [])


def test_behind_a_marker_a_name_that_was_not_offered_is_a_call() -> None:
    assert Read("hermes", [f"<tool_call>{body({}, 'other')}</tool_call>"]).calls == [(0, "other", {})]
    assert Read("json", [body({}, "other")]).calls == []


@pytest.mark.parametrize(
    ("text", "name", "written", "error"),
    [
        ("<tool_call>\n</tool_call>", None, "", "no JSON object with a name"),
        ("<tool_call>look_up(1)</tool_call>", None, "look_up(1)", "no JSON object with a name"),
        ('<tool_call>{"arguments": {}}</tool_call>', None, '{"arguments": {}}', "has no name"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, '{"name": 3, "arguments": {}}', "has no name"),
        (f"<tool_call>{body([1])}</tool_call>", "look_up", body([1]), "are a list"),
        (f"<tool_call>{body('[1')}</tool_call>", "look_up", body("[1"), "holds no JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "add", '{"a": 1,}', "is no JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": }</tool_call>', "add", '{"a": }', "is no JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": "b', "add", '{"a": "b', "cut off"),
        (
            '<tool_call>{"name": "add", "name": "b"}</tool_call>',
            "add",
            '{"name": "add", "name": "b"}',
            "no JSON object",
        ),
        ("<tool_call>", None, "", "cut off"),
    ],
)
def test_a_malformed_call_is_invalid_with_all_that_was_written(
    text: str, name: str | None, written: str, error: str
) -> None:
    read = Read("hermes", [text])

    [(index, found_name, found_text, found_error)] = read.invalid
    assert (index, found_name, read.calls, read.text) == (0, name, [], "")
    assert error in found_error
    assert found_text == written
    if name is not None:
        assert read.arguments == {0: written}
    assert Read("hermes", list(text)).all == read.all


def test_a_malformed_call_does_not_take_the_next_one_with_it() -> None:
    text = f'<tool_call>{{"name": }}</tool_call>\n<tool_call>{body({}, "add")}</tool_call>'

    read = Read("hermes", [text])

    assert read.calls == [(1, "add", {})]
    assert [index for index, *_ in read.invalid] == [0]


@pytest.mark.parametrize("form", FORMATS)
def test_text_that_can_be_no_call_streams_at_once(form: ToolFormatName) -> None:
    reader = tool_format(FakeTokenizer(), form).reader(NAMES)

    assert reader.push("It") == ["It"]
    assert reader.push(" is sunny, ") == [" is sunny, "]


def test_arguments_stream_before_the_call_has_ended() -> None:
    reader = tool_format(FakeTokenizer(), "hermes").reader(NAMES)

    assert reader.push('<tool_call>\n{"name": "look_up", ') == [CallPiece(0, "look_up", "")]
    assert reader.push('"arguments": {"text": "a') == [CallPiece(0, None, '{"text": "a')]
    assert reader.push('b"}}') == [CallPiece(0, None, 'b"}')]
    assert reader.push("</tool_call>") == []


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|tool_call|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>"),
        *("</think>", "```", "```json\n", "\n", " ", "[", "]", "{", "}", ",", ";", '"', "\\", "<", "text", "é☃"),
        *("look_up", '{"name": "look_up", ', '"arguments": ', '{"x": 1}'),
        *(body(), body({}, "add"), body([1]), body(key="parameters")),
    ]
)


@given(st.sampled_from(FORMATS), st.lists(FRAGMENTS, max_size=12), st.lists(st.integers(0, 200), max_size=12))
def test_the_same_is_read_however_the_reply_is_cut(form: ToolFormatName, fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]

    whole = Read(form, [text])

    assert Read(form, parts).all == whole.all
    assert Read(form, list(text)).all == whole.all
    # Each index is one call, valid or not, and none is left out.
    assert sorted(index for index, *_ in whole.calls + whole.invalid) == list(range(len(whole.calls + whole.invalid)))
