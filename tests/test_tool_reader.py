"""Calls are told from text in every format, however the reply is cut, and nothing a model writes is lost or raises."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offset_runtime.backends.fake import FakeTokenizer
from offset_runtime.tool_formats import ToolFormat, ToolFormatName, tool_format
from offset_runtime.tools import CallPiece, InvalidCall, ToolCall

FORMATS: tuple[ToolFormatName, ...] = get_args(ToolFormatName)
NAMES = ("search", "look_up", "é")
SEARCH = '{"name": "search", "arguments": {"query": "news"}}'
LOOK_UP = '{"name": "look_up", "arguments": {"id": 7}}'
FOUND = ToolCall(0, "search", {"query": "news"})
LOOKED_UP = ToolCall(1, "look_up", {"id": 7})

Reading = tuple[str, list[ToolCall], list[InvalidCall]]


def the_format(name: ToolFormatName, *, named: bool = False) -> ToolFormat:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = "[ARGS]" if named else "ChatML"
    return tool_format(tokenizer, name)


def read(format_name: ToolFormatName, *deltas: str) -> Reading:
    """Text, calls and invalid calls of a reply; what streamed is checked against the calls."""
    reader = the_format(format_name).reader(NAMES)
    parts = [part for delta in deltas for part in reader.push(delta)] + reader.finish()
    check_pieces([part for part in parts if isinstance(part, CallPiece)], reader.calls, reader.invalid)
    return "".join(part for part in parts if isinstance(part, str)), reader.calls, reader.invalid


def check_pieces(pieces: list[CallPiece], calls: list[ToolCall], invalid: list[InvalidCall]) -> None:
    streamed: dict[int, list[CallPiece]] = {}
    for piece in pieces:
        streamed.setdefault(piece.index, []).append(piece)
    for index, of_call in streamed.items():
        assert [piece.name for piece in of_call[1:]] == [None] * (len(of_call) - 1), index
    for call in calls:
        of_call = streamed.pop(call.index)
        assert of_call[0].name == call.name
        assert json.loads("".join(piece.arguments for piece in of_call)) == call.arguments
    for bad in invalid:
        of_call = streamed.pop(bad.index, [])
        assert bad.text.startswith("".join(piece.arguments for piece in of_call))
        assert not of_call or of_call[0].name == bad.name
    assert not streamed
    assert sorted(call.index for call in [*calls, *invalid]) == list(range(len(calls) + len(invalid)))


@pytest.mark.parametrize(
    ("format_name", "reply"),
    [
        ("hermes", f"<tool_call>\n{SEARCH}\n</tool_call>"),
        ("hermes", f"<tool_call>{SEARCH}</tool_call>\n"),
        ("hermes", f"<tool_call>[{SEARCH}]</tool_call>"),
        ("hermes", f"<tool_call>\n{SEARCH}"),
        ("hermes", f"{SEARCH}\n</tool_call>"),
        ("hermes", f"\n\n{SEARCH}"),
        ("hermes", '<tool_call>{"name":"search","arguments":{"query":"news"}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"query": "news"}, "name": "search"}</tool_call>'),
        ("hermes", '<tool_call>{"id": 3, "name": "search", "extra": [{"a": "}"}], "arguments": {"query": "news"}}'),
        ("hermes", '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"news\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "se\\u0061rch", "arguments": {"query": "news"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "news"}\n</tool_call>'),
        ("llama3", '{"name": "search", "parameters": {"query": "news"}}'),
        ("llama3", '<|python_tag|>{"name": "search", "parameters": {"query": "news"}}'),
        ("llama3", '{"type": "function", "name": "search", "parameters": {"query": "news"}}'),
        ("mistral", f"[TOOL_CALLS] [{SEARCH}]"),
        ("mistral", f"[TOOL_CALLS][{SEARCH}]"),
        ("mistral", f" [{SEARCH}]"),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "news"}'),
        ("mistral", '[TOOL_CALLS]search[CALL_ID]123456789[ARGS]{"query": "news"}'),
        ("mistral", '[TOOL_CALLS] search{"query": "news"}'),
        ("mistral", 'search{"query": "news"}'),
        ("mistral", 'search[ARGS]{"query": "news"}'),
        ("granite", f"<|tool_call|>[{SEARCH}]"),
        ("granite", f"<|tool_call|> {SEARCH}"),
        ("granite", f"<tool_call>[{SEARCH}]"),
        ("granite", f"<tool_call>\n{SEARCH}\n</tool_call>"),
        ("granite", f"[{SEARCH}]"),
        ("json", SEARCH),
        ("json", f"[{SEARCH}]"),
        ("json", f"```json\n{SEARCH}\n```"),
        ("json", f"```\n[\n  {SEARCH}\n]\n```\n"),
        ("json", '{\n  "name" :"search",\n\t"parameters": {"query": "news"}\n}'),
    ],
)
def test_one_call_is_read_in_every_form_of_a_format(format_name: ToolFormatName, reply: str) -> None:
    assert read(format_name, reply) == ("", [FOUND], [])


@pytest.mark.parametrize(
    ("format_name", "reply"),
    [
        ("hermes", f"<tool_call>\n{SEARCH}\n</tool_call>\n<tool_call>\n{LOOK_UP}\n</tool_call>"),
        ("hermes", f"<tool_call>[{SEARCH}, {LOOK_UP}]</tool_call>"),
        ("hermes", f"<tool_call>{SEARCH}\n{LOOK_UP}</tool_call>"),
        ("hermes", f"{SEARCH}\n{LOOK_UP}"),
        ("llama3", f"<|python_tag|>{SEARCH}; {LOOK_UP}"),
        ("llama3", f"{SEARCH}; {LOOK_UP}"),
        ("mistral", f"[TOOL_CALLS] [{SEARCH}, {LOOK_UP}]"),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "news"}[TOOL_CALLS]look_up[ARGS]{"id": 7}'),
        ("mistral", 'search{"query": "news"}look_up{"id": 7}'),
        ("granite", f"<|tool_call|>[{SEARCH}, {LOOK_UP}]"),
        ("json", f"[{SEARCH}, {LOOK_UP}]"),
        ("json", f"```json\n{SEARCH}\n{LOOK_UP}\n```"),
        ("json", f"```json\n{SEARCH}\n```\n\n```json\n{LOOK_UP}\n```"),
    ],
)
def test_parallel_calls_are_read_in_order_and_leave_no_text(format_name: ToolFormatName, reply: str) -> None:
    assert read(format_name, reply) == ("", [FOUND, LOOKED_UP], [])


@pytest.mark.parametrize(
    ("format_name", "reply", "text"),
    [
        ("hermes", f"Let me see.\n<tool_call>\n{SEARCH}\n</tool_call>\nWait.", "Let me see.\n\nWait."),
        ("hermes", f"See: <tool_call>{SEARCH}</tool_call>", "See: "),
        (
            "hermes",
            f"<think>a <tool_call> b\n{LOOK_UP}</think>\n{SEARCH}",
            f"<think>a <tool_call> b\n{LOOK_UP}</think>\n",
        ),
        ("hermes", f"<tool_call>{SEARCH}}}</tool_call>", "}"),
        ("llama3", f"Let me see.\n{SEARCH}", "Let me see.\n"),
        ("mistral", f"Yes. [TOOL_CALLS] [{SEARCH}] and then", "Yes.  and then"),
        ("json", f"Here:\n```json\n{SEARCH}\n```\nDone.", "Here:\n\nDone."),
        ("json", f"{SEARCH}, {{1}}", ", {1}"),
    ],
)
def test_text_around_a_call_stays(format_name: ToolFormatName, reply: str, text: str) -> None:
    assert read(format_name, reply) == (text, [FOUND], [])


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    "reply",
    [
        "",
        " \n ",
        "Plain text, {braces} and [brackets]; \"name\": 'search'.",
        f"It is written {SEARCH} in the middle of a line.",
        '{"name": "nobody", "arguments": {}}',
        '[{"name": "nobody"}]',
        '{"name": "sea',
        '{"query": "news"}',
        "```json\n{}\n```",
        "```python\nprint(1)\n```",
        "1 < 2, <tool, [TOOL, <|tool",
        "<think>never ended {",
        "search for it",
        "{\n\n\n{\n[[\n",
    ],
)
def test_what_is_no_call_of_an_offered_tool_is_text_unchanged(format_name: ToolFormatName, reply: str) -> None:
    assert read(format_name, reply) == (reply, [], [])


def test_behind_a_marker_a_tool_that_was_not_offered_is_called_all_the_same() -> None:
    for format_name, reply in [
        ("hermes", '<tool_call>{"name": "nobody"}</tool_call>'),
        ("llama3", '<|python_tag|>{"name": "nobody"}'),
        ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
        ("granite", '<|tool_call|>[{"name": "nobody"}]'),
    ]:
        assert read(format_name, reply) == ("", [ToolCall(0, "nobody", {})], [])  # type: ignore[arg-type]


def test_a_list_without_calls_calls_nothing() -> None:
    assert read("hermes", "<tool_call>[]</tool_call>") == ("", [], [])
    assert read("mistral", "[TOOL_CALLS] []Hello") == ("Hello", [], [])


@pytest.mark.parametrize("empty", ["", ', "arguments": {}', ', "arguments": null', ', "arguments": ""', ","])
def test_missing_arguments_are_none_at_all(empty: str) -> None:
    assert read("hermes", f'{{"name": "search"{empty}}}') == ("", [ToolCall(0, "search", {})], [])


@pytest.mark.parametrize(
    "value",
    [
        '}{][ "quoted" \\ </tool_call> <tool_call> [TOOL_CALLS] ```',
        "é 😀 \u2028 \x07",
        "line\nline\ttab",
        [[{"a": [{}]}], "]"],
        {"name": "look_up", "arguments": {"deep": {"er": None}}},
        [1, -2.5e-3, True, False, None],
    ],
)
@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_any_json_may_be_an_argument(value: object, ensure_ascii: bool) -> None:
    call = json.dumps({"name": "search", "arguments": {"value": value}}, ensure_ascii=ensure_ascii)
    for reply in (f"<tool_call>{call}</tool_call>", call, f"<tool_call>[{call}]</tool_call>"):
        assert read("hermes", reply) == ("", [ToolCall(0, "search", {"value": value})], [])


def test_new_lines_written_into_a_text_as_they_are_are_read_and_stream_as_json() -> None:
    assert read("hermes", '{"name": "search", "arguments": {"query": "a\nb"}}') == (
        "",
        [ToolCall(0, "search", {"query": "a\nb"})],
        [],
    )


@pytest.mark.parametrize(
    ("reply", "name", "text", "error"),
    [
        ("<tool_call>search(news)</tool_call>", None, "search(news)", "no call follows"),
        ("<tool_call>", None, "", "ends where a call begins"),
        ("<tool_call>\n</tool_call>", None, "", "no call follows"),
        ("<tool_call>news", None, "news", "ends within"),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', None, '{"a": 1}', "no name"),
        ("<tool_call>{}</tool_call>", None, "{}", "no name"),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', None, "{}", "name is 7"),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None, "{}", "expected a text"),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', None, '{"name": "\\ud800"}', "expected a text"),
        ('{"name": "search", "arguments": [1]}', "search", "[1]", "expected an object"),
        ('{"name": "search", "arguments": 12}', "search", "12", "expected an object"),
        ('{"name": "search", "arguments": "news"}', "search", '"news"', "not valid JSON"),
        ('{"name": "search", "arguments": {"a": 1,}}', "search", '{"a": 1,}', "not valid JSON"),
        ('{"name": "search", "arguments": {"a": True}}', "search", '{"a": True}', "not valid JSON"),
        ('{"name": "search", "arguments": {"a": NaN}}', "search", '{"a": NaN}', "NaN"),
        ('{"name": "search", "arguments": {"a": 1e999}}', "search", '{"a": 1e999}', "not valid JSON"),
        ('{"name": "search", "arguments": {"a": "\\ud800"}}', "search", '{"a": "\\ud800"}', "surrogate"),
        ('{"name": "search", "arguments": {"a": "\\d+"}}', "search", None, "not valid JSON"),
        ('{"name": "search", "arguments": {\'a\': 1}}', "search", None, "not valid JSON"),
        ('{"name": "search" "arguments": {}}', "search", '{"name": "search" "arguments": {}}', "expected a comma"),
        ('{"name": "search", "argu', "search", '{"name": "search", "argu', "the reply ends within the call"),
        ('{"name": "search"', "search", '{"name": "search"', "the reply ends within the call"),
        ('{"name": "search", "arguments": {"a": "b', "search", '{"a": "b', "the reply ends within the call"),
        ('<tool_call>{"name": "search", "arguments": {"a": 1</tool_call>', "search", '{"a": 1', "not valid JSON"),
        ('{"name": "search", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}", "search", None, "too deeply"),
        ('{"name": "search", "arguments": {"a": ' + "1" * 5000 + "}}", "search", None, "not valid JSON"),
    ],
)
def test_a_malformed_call_is_kept_as_it_was_written(reply: str, name: str | None, text: str | None, error: str) -> None:
    said, calls, (invalid,) = read("hermes", reply)
    assert (said, calls) == ("", [])
    assert invalid.name == name
    assert error in invalid.error
    assert text is None or invalid.text == text


def test_calls_behind_a_malformed_one_are_read() -> None:
    broken = '{"name": "search", "arguments": {query: 1}}'
    for reply in (
        f"<tool_call>{broken}</tool_call><tool_call>{LOOK_UP}</tool_call>",
        f"<tool_call>nothing<tool_call>{LOOK_UP}</tool_call>",
        f"<tool_call>[{broken}, {LOOK_UP}]</tool_call>",
        f'<tool_call>{{"name": "search", "arguments": {{"a": 1</tool_call>\n<tool_call>{LOOK_UP}</tool_call>',
    ):
        text, calls, invalid = read("hermes", reply)
        assert (text, calls, [bad.index for bad in invalid]) == ("", [LOOKED_UP], [0])


def test_text_and_arguments_stream_as_soon_as_they_are_certain() -> None:
    reader = the_format("hermes").reader(NAMES)
    assert reader.push("Let me <") == ["Let me "]
    assert reader.push("b> see <tool") == ["<b> see "]
    assert reader.push('_call>{"name": "sea') == []
    assert reader.push('rch", "arguments": {"que') == [CallPiece(0, "search", '{"que')]
    assert reader.push('ry": "ne') == [CallPiece(0, None, 'ry": "ne')]
    assert reader.push('ws"}') == [CallPiece(0, None, 'ws"}')]
    assert reader.push("}</tool_call>") == []
    assert (reader.finish(), reader.calls) == ([], [FOUND])


def test_arguments_before_the_name_come_when_the_call_ends() -> None:
    reader = the_format("hermes").reader(NAMES)
    assert reader.push('<tool_call>{"arguments": {"query": "news"}, "name": "search"') == []
    assert reader.push("}") == [CallPiece(0, "search", '{"query": "news"}')]


ATOMS = (
    "<tool_call>", "</tool_call>", "<|tool_call|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "search",
    SEARCH, LOOK_UP, SEARCH[:-1], SEARCH[:20], '{"name": "', '"arguments": {', "```json\n", "```", "<think>",
    "</think>", "\n", " ", "; ", ",", "{", "}", "[", "]", '"', "\\", "é", "\\u00e9", "text",
)  # fmt: skip
replies = st.lists(st.sampled_from(ATOMS) | st.text(max_size=3), max_size=12).map("".join)


def merged(parts: list[str | CallPiece]) -> list[str | CallPiece]:
    joined: list[str | CallPiece] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif isinstance(part, CallPiece) and isinstance(last, CallPiece) and last.index == part.index:
            joined[-1] = replace(last, arguments=last.arguments + part.arguments)
        else:
            joined.append(part)
    return joined


@settings(max_examples=300)
@given(st.sampled_from(FORMATS), replies, st.lists(st.integers(0, 200), max_size=6))
def test_however_a_reply_is_cut_the_same_comes_out_and_nothing_is_lost(
    format_name: ToolFormatName, reply: str, cuts: list[int]
) -> None:
    borders = [0, *sorted(min(cut, len(reply)) for cut in cuts), len(reply)]
    whole, parted = the_format(format_name).reader(NAMES), the_format(format_name).reader(NAMES)
    deltas = [reply[a:b] for a, b in pairwise(borders)]

    found = merged([*whole.push(reply), *whole.finish()])

    assert merged([part for delta in deltas for part in parted.push(delta)] + parted.finish()) == found
    assert (parted.calls, parted.invalid) == (whole.calls, whole.invalid)
    check_pieces([p for p in found if isinstance(p, CallPiece)], whole.calls, whole.invalid)
    said = "".join(part for part in found if isinstance(part, str))
    if not whole.calls and not whole.invalid and "[" not in reply and "```" not in reply:
        assert said.replace("</tool_call>", "") == reply.replace("</tool_call>", "")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=4), json_values, max_size=3)


@settings(max_examples=200)
@given(
    st.sampled_from([*[the_format(name) for name in FORMATS], the_format("mistral", named=True)]),
    st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3),
)
def test_calls_as_they_are_written_are_read_back(style: ToolFormat, written: list[tuple[str, dict[str, Any]]]) -> None:
    calls = [ToolCall(index, name, given) for index, (name, given) in enumerate(written)]
    reader = style.reader(NAMES)

    parts = [part for char in style.written(written) for part in reader.push(char)] + reader.finish()

    assert (reader.calls, reader.invalid) == (calls, [])
    assert not [part for part in parts if isinstance(part, str)]


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_description_of_a_tool_is_no_call_of_it(format_name: ToolFormatName) -> None:
    reply = '{"name": "search", "description": "Find.", "parameters": {"type": "object"}}'

    _, calls, invalid = read(format_name, reply)

    assert calls == []
    assert "describes a tool" in invalid[0].error
