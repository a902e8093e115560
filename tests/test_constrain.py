"""Constrained replies are valid by construction, whatever the model would rather say and whoever runs beside it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offset_runtime import (
    Completion,
    Constraint,
    DomainOffset,
    EngineSettings,
    LlamaCppOptions,
    OffsetRuntime,
    Request,
    SamplingParams,
)
from offset_runtime.backends.base import Backend, Chunk, Vocabulary
from offset_runtime.backends.fake import VOCAB_SIZE, FakeBackend, FakeTokenizer
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.backends.torch_tokenizer import TorchTokenizer
from offset_runtime.constrain import Grammars
from offset_runtime.errors import (
    ConstraintError,
    EngineClosedError,
    GenerationError,
    InvalidRequestError,
    RequestCancelledError,
)
from offset_runtime.sampling import log_softmax

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["reporter", "editor", "読者"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
ENDLESS = Constraint.regex("(ab)*c")


def holds(schema: dict[str, Any], value: object) -> bool:
    """Whether `value` is what `schema` allows, for the keywords that these tests use."""
    if "anyOf" in schema:
        return any(holds(inner, value) for inner in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema["maxLength"]
        case "array":
            sized = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return sized and all(holds(schema["items"], item) for item in value)  # type: ignore[union-attr]
        case "object":
            known = schema["properties"]
            named = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(known)
            return named and all(holds(known[key], item) for key, item in value.items())  # type: ignore[union-attr]
    raise AssertionError(schema)


def pairs(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most)).map(lambda p: (min(p), max(p)))


printable = st.characters(exclude_categories=("Cc", "Cs"))
leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}]),
    pairs(-1000, 1000).map(lambda p: {"type": "integer", "minimum": p[0], "maximum": p[1]}),
    pairs(0, 5).map(lambda p: {"type": "string", "minLength": p[0], "maxLength": p[1]}),
    st.lists(st.text(printable, max_size=4) | st.integers(-(2**53), 2**53), min_size=1, max_size=3).map(
        lambda v: {"enum": v}
    ),
)


def _object(parts: tuple[dict[str, dict[str, Any]], list[bool]]) -> dict[str, Any]:
    properties, needed = parts
    required = [key for key, need in zip(properties, needed, strict=False) if need]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, pairs(0, 2)).map(
            lambda p: {"type": "array", "items": p[0], "minItems": p[1][0], "maxItems": p[1][1]}
        ),
        st.tuples(
            st.dictionaries(st.text(max_size=4), inner, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3)
        ).map(_object),
        st.lists(inner, min_size=1, max_size=2).map(lambda v: {"anyOf": v}),
    ),
    max_leaves=5,
)
expressions = st.recursive(
    st.sampled_from(["a", "bc", "é", "☃", "😀", "[x-z]", "[^a-z☃]", "0", r"\.", r"\\", "."]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, pairs(0, 3)).map(lambda p: f"(?:{p[0]}){{{p[1][0]},{p[1][1]}}}"),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def runtime() -> Iterator[OffsetRuntime]:
    with OffsetRuntime(FakeBackend()) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def tiny_runtime(tiny_backends: Callable[[str], TorchBackend], one_thread: None) -> Iterator[OffsetRuntime]:
    runtime = OffsetRuntime(tiny_backends("llama"))
    yield runtime
    runtime.engine.close()


def request(runtime: OffsetRuntime, constraint: Constraint | None, text: str = "Go on.", **sampling: object) -> Request:
    params: dict[str, Any] = {"max_tokens": 100, "temperature": 1.0, "seed": 0, **sampling}
    return runtime.text_request(text, constraint=constraint, sampling=SamplingParams(**params))


def reply(
    runtime: OffsetRuntime, constraint: Constraint | None, text: str = "Go on.", **sampling: object
) -> Completion:
    return runtime.run(request(runtime, constraint, text, **sampling))


# Valid by construction


@settings(max_examples=60)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_a_reply_is_json_that_the_schema_allows(schema: dict[str, Any], seed: int, runtime: OffsetRuntime) -> None:
    found = reply(runtime, Constraint.json_schema(schema), seed=seed, max_tokens=3000)
    assert found.finish_reason == "stop"
    assert holds(schema, json.loads(found.text)), found.text


@settings(max_examples=60)
@given(expression=expressions, seed=st.integers(0, 2**32))
def test_a_reply_is_matched_by_the_expression_as_a_whole(expression: str, seed: int, runtime: OffsetRuntime) -> None:
    found = reply(runtime, Constraint.regex(expression), seed=seed, max_tokens=3000)
    assert found.finish_reason == "stop"
    assert re.fullmatch(expression, found.text), found.text


@settings(max_examples=15)
@given(expression=expressions, seed=st.integers(0, 2**32))
def test_so_it_is_where_tokens_have_many_bytes(expression: str, seed: int, tiny_runtime: OffsetRuntime) -> None:
    found = reply(tiny_runtime, Constraint.regex(f"(?:{expression}) of the law"), seed=seed, max_tokens=90)
    if found.finish_reason == "stop":
        assert re.fullmatch(f"(?:{expression}) of the law", found.text), found.text
    else:
        assert found.usage.output_tokens == 90


def test_a_reply_is_derived_by_the_lark_grammar(runtime: OffsetRuntime) -> None:
    grammar = Constraint.lark('start: "(" start ")" | "ø" | "o" | "*"')
    found = {reply(runtime, grammar, seed=seed, max_tokens=1000).text for seed in range(8)}
    assert len(found) > 1
    assert all(re.fullmatch(r"\(*[øo*]\)*", text) and text.count("(") == text.count(")") for text in found)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 200},
        {"top_p": 0.1},
        {"min_p": 0.9},
        {"repetition_penalty": 3.0},
    ],
    ids=str,
)
def test_every_way_to_draw_keeps_to_the_constraint(sampling: dict[str, float], runtime: OffsetRuntime) -> None:
    for seed in range(5):
        found = reply(runtime, Constraint.regex("[ab]{6}(?:ü|☃)"), seed=seed, **sampling)
        assert re.fullmatch("[ab]{6}(?:ü|☃)", found.text)


def test_a_model_that_would_rather_chat_is_held_to_the_schema() -> None:
    with OffsetRuntime(FakeBackend(script=lambda prompt: "Sure! Here is your JSON: no.")) as runtime:
        messages = [{"role": "user", "content": "A person, please."}]
        asked = runtime.chat_request(messages, constraint=Constraint.json_schema(PERSON))
        assert holds(PERSON, json.loads(runtime.run(asked).text))
        assert runtime.run(replace(asked, constraint=None)).text.startswith("Sure!")


def allows(constraint: Constraint, text: str) -> bool:
    """Whether `text` can be a whole reply."""
    matcher = Grammars(FakeTokenizer()).matcher(constraint)
    assert matcher is not None
    for byte in text.encode():
        if matcher.ended or not np.isfinite(matcher.mask(np.zeros(VOCAB_SIZE, np.float32))[byte]):
            return False
        matcher.push(byte)
    return matcher.ended or bool(np.isfinite(matcher.mask(np.zeros(VOCAB_SIZE, np.float32))[257]))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # A name spelled otherwise, or twice, would pass by what is said of it.
        (
            {"type": "object", "properties": {"a/b": {"type": "integer"}}},
            ['{"a/b": 1}', '{"c": "x"}', "{}"],
            [r'{"\u0061/b": "x"}', r'{"a\/b": "x"}', '{"a/b": 1, "a/b": "x"}', '{"c": 1, "a/b": "x"}'],
        ),
        ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
        ({"type": "object", "maxProperties": 1}, ['{"a": 1}', "{}"], ['{"a": 1, "b": 2}']),
        (
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
            ['{"xa": 1}', '{"y": "s"}'],
            ['{"xa": "a"}', r'{"\u0078": "a"}'],
        ),
        ({"required": ["b"]}, ['{"b": 2, "a": 1}', "3"], ['{"a": 1}', "{}"]),
        ({"type": "string", "maxLength": 2}, ['"😀😀"', r'"\n\""'], ['"abc"', '"\n"']),
        ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
        ({"type": "string", "pattern": r"^a[^\x00-\x1f]\u0041$"}, ['"abA"'], ['"aA"', '"ab"']),
        ({"const": "é/\n\u0085"}, ['"é/\\n\u0085"'], ['"é/"', '"é/\\n"']),
        ({"properties": {"\x01": {"type": "null"}}, "required": ["\x01"]}, [r'{"\u0001": null}'], ["{}"]),
        ({"type": "integer", "multipleOf": 3, "minimum": 4}, ["6"], ["3", "7"]),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 2}, ["1.5", "2"], ["1", "1.0", "1e0", "2e1"]),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["4"], ["2", "6"]),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["1", '"a"'], ["null"]),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[1]", "[]"], ["[1, 2]"]),
        (
            {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
            ["[[], [[]]]"],
            ["[1]"],
        ),
        # White space only where `json.dumps` puts it.
        ({"type": "array"}, ["[1, 2]"], ["[1,2]", "[ 1]", "[1, \n2]"]),
    ],
    ids=str,
)
def test_a_schema_lets_through_what_it_allows_and_nothing_else(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    constraint = Constraint.json_schema(schema)
    assert [text for text in good if not allows(constraint, text)] == []
    assert [text for text in bad if allows(constraint, text)] == []


def test_a_marker_of_the_model_in_a_constant_is_spelled_and_not_spoken(runtime: OffsetRuntime) -> None:
    found = reply(runtime, Constraint.json_schema({"const": "a <|im_end|> b"}))
    assert json.loads(found.text) == "a <|im_end|> b"
    assert max(found.token_ids) < 256


def test_a_reply_ends_by_the_models_own_end_token_where_more_could_follow(runtime: OffsetRuntime) -> None:
    found = reply(runtime, Constraint.regex("a?"), temperature=0.0)
    assert found.finish_reason == "stop"
    assert found.text in ("", "a")
    assert reply(runtime, Constraint.regex("")).token_ids == (257,)
    assert reply(runtime, Constraint.regex("b")).token_ids == (98,)


# Limits


def test_a_reply_that_is_cut_by_max_tokens_says_so_and_began_well(runtime: OffsetRuntime) -> None:
    found = reply(runtime, Constraint.json_schema(PERSON), max_tokens=5)
    assert (found.finish_reason, found.text) == ("length", '{"nam')
    assert reply(runtime, Constraint.json_schema(PERSON), max_tokens=0).text == ""


def test_a_reply_that_is_complete_with_its_last_token_is_not_cut(runtime: OffsetRuntime) -> None:
    found = reply(runtime, Constraint.regex("abc"), max_tokens=3)
    assert (found.finish_reason, found.text) == ("stop", "abc")


def test_a_stop_string_ends_a_constrained_reply_too(runtime: OffsetRuntime) -> None:
    found = reply(runtime, Constraint.regex("abcdef"), stop="de")
    assert (found.finish_reason, found.text) == ("stop", "abc")


def test_text_held_back_for_a_stop_string_comes_with_the_end(runtime: OffsetRuntime) -> None:
    assert reply(runtime, Constraint.regex("abcd"), stop="de").text == "abcd"


def test_log_probabilities_are_the_models_own(runtime: OffsetRuntime) -> None:
    asked = request(runtime, Constraint.regex("x"), logprobs=1)
    (found,) = runtime.run(asked).logprobs
    backend = FakeBackend()
    (logits,) = backend.forward([Chunk(backend.allocate(), asked.prompt_ids)])
    expected = log_softmax(logits[-1])
    assert found.logprob == pytest.approx(float(expected[ord("x")]))
    assert found.top[0][0] == int(np.argmax(expected))


# Beside others


class Gated(FakeBackend):
    """A fake that waits before its first step, and counts what it runs together."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.most = 0

    def forward(self, chunks: Sequence[Chunk]) -> Any:
        assert self.gate.wait(60)
        self.most = max(self.most, len(chunks))
        return super().forward(chunks)


def test_eight_requests_of_any_constraint_and_domain_run_in_one_batch_as_they_run_alone(
    make_offset: Callable[..., DomainOffset],
) -> None:
    same = Constraint.json_schema(PERSON)
    constraints = [same, None, Constraint.regex("[a-d]{12}é"), same, Constraint.lark('start: "yes"+ | "no"'), None]
    constraints += [Constraint.regex("(?:☃|y){9}"), same]
    backend = Gated()
    with OffsetRuntime(backend) as runtime:
        domains = [make_offset(backend.identity, f"d{i}", prompt_format="raw", seed=i) for i in range(8)]
        asked = [
            replace(
                runtime.text_request("Go on.", domain=domain, constraint=constraint),
                sampling=SamplingParams(max_tokens=90, temperature=1.0, seed=i),
            )
            for i, (domain, constraint) in enumerate(zip(domains, constraints, strict=True))
        ]
        streams = [runtime.stream(one) for one in asked]
        backend.gate.set()
        together = [stream.result() for stream in streams]
        assert backend.most == 8
    with OffsetRuntime(FakeBackend(), settings=EngineSettings(cache_bytes=0)) as runtime:
        assert [found.token_ids for found in together] == [runtime.run(one).token_ids for one in asked]
    people = [found.text for found, constraint in zip(together, constraints, strict=True) if constraint is same]
    assert all(holds(PERSON, json.loads(text)) for text in people)
    assert len(set(people)) == 3


def test_a_constraint_changes_nothing_of_what_the_prefix_cache_may_give() -> None:
    with OffsetRuntime(FakeBackend()) as runtime, OffsetRuntime(FakeBackend()) as fresh:
        free = reply(runtime, None, max_tokens=8)
        held = reply(runtime, Constraint.regex("[a-d]{12}"))
        assert held.usage.cached_tokens == free.usage.prompt_tokens - 1
        assert held.token_ids == reply(fresh, Constraint.regex("[a-d]{12}")).token_ids
        longer = reply(runtime, None, "Go on." + held.text + "!", max_tokens=8)
        assert longer.usage.cached_tokens > free.usage.prompt_tokens
        assert longer.token_ids == reply(fresh, None, "Go on." + held.text + "!", max_tokens=8).token_ids


def test_a_cancelled_reply_leaves_the_next_one_alone(runtime: OffsetRuntime) -> None:
    endless = Constraint.regex("(?:ab){2000}")
    stream = runtime.stream(request(runtime, endless, max_tokens=3000))
    next(iter(stream))
    stream.cancel()
    with pytest.raises(RequestCancelledError):
        stream.result()
    assert reply(runtime, endless, max_tokens=4).text == "abab"


class Dumb(FakeTokenizer):
    """Has no way to write an x."""

    def vocabulary(self) -> Vocabulary:
        found = super().vocabulary()
        return Vocabulary([b"" if word == b"x" else word for word in found.tokens], found.special_ids)


def test_a_text_that_the_model_cannot_spell_fails_alone_and_says_why() -> None:
    backend = FakeBackend()
    backend.tokenizer = Dumb()
    with OffsetRuntime(backend) as runtime:
        streams = [runtime.stream(request(runtime, Constraint.regex(text))) for text in ("aax", "aay")]
        with pytest.raises(GenerationError, match=r"leaves no token of this model to go on with.*Loosen it"):
            streams[0].result()
        assert streams[1].result().text == "aay"


def test_a_token_that_does_not_fit_is_an_error_that_stays() -> None:
    matcher = Grammars(FakeTokenizer()).matcher(Constraint.regex("ab"))
    assert matcher is not None
    matcher.push(ord("a"))
    with pytest.raises(GenerationError, match=r"^token 97 does not fit the reply's constraint: .*byte 'a'.*Simplify"):
        matcher.push(ord("a"))
    with pytest.raises(GenerationError, match="could not be followed further"):
        matcher.mask(np.zeros(VOCAB_SIZE, np.float32))
    assert not matcher.ended


@pytest.mark.parametrize("rows", [VOCAB_SIZE + 100, 100])
def test_a_model_with_other_rows_than_its_tokenizer_has_tokens_is_masked(rows: int) -> None:
    matcher = Grammars(FakeTokenizer()).matcher(Constraint.regex("[a-z☃]"))
    assert matcher is not None
    logits = np.ones(rows, np.float32)
    allowed = np.flatnonzero(np.isfinite(matcher.mask(logits))).tolist()
    assert allowed == [token for token in [*range(97, 123), "☃".encode()[0]] if token < rows]
    assert logits.min() == 1


def test_the_vocabulary_is_read_once_however_many_threads_ask() -> None:
    class Counting(FakeTokenizer):
        read = 0

        def vocabulary(self) -> Vocabulary:
            Counting.read += 1
            return super().vocabulary()

    grammars = Grammars(Counting())
    assert grammars.matcher(None) is None
    assert Counting.read == 0
    with ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(lambda _: grammars.matcher(ENDLESS), range(16)))
    assert Counting.read == 1
    assert len({id(matcher) for matcher in matchers}) == 16


# Refused up front


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, r"not \(at \$\.not\) is not among what a reply can be held to"),
        (
            {"properties": {"not": {"type": "array", "uniqueItems": True}}},
            r"uniqueItems \(at \$\.properties\.not\.uniqueItems\)",
        ),
        ({"anyOf": [{"type": "null"}, {"if": {}}]}, r"if \(at \$\.anyOf\[1\]\.if\)"),
        ({"enum": [{"not": 1}], "contains": {}}, r"contains \(at \$\.contains\)"),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            r"oneOf of alternatives that may hold at once \(at \$\.oneOf\)",
        ),
        ({"x-guidance": {"lenient": True}, "not": {}}, r"x-guidance \(at \$\.x-guidance\)"),
        ({"items": {"minProperties": 2}, "minProperties": 1}, r"minProperties \(at \$\.items\.minProperties\)"),
        ({"type": "integer", "divisibleBy": 2}, r"divisibleBy \(at \$\.divisibleBy\)"),
        ({"type": "string", "extends": {"minLength": 3}}, r"extends \(at \$\.extends\)"),
        # Without an escape for it, a text would lose the character.
        ({"const": ["a", {"b": "\x01"}]}, r"const with a control character \(at \$\.const\)"),
        ({"enum": ["\x7f"]}, "enum with a control character"),
        ({"const": {"a": [2**53 + 1]}}, r"const with an integer beyond 2\*\*53 \(at \$\.const\)"),
        ({"type": "integer", "maximum": -(2**60)}, "maximum with an integer beyond"),
        ({"pattern": "^a\\x01b$"}, "pattern with a control character"),
        ({"pattern": "^a\\u{1f}b$"}, "pattern with a control character"),
        ({"patternProperties": {"\x01": {}}}, "patternProperties with a control character"),
        ({"disallow": "string"}, r"disallow \(at \$\.disallow\)"),
        ({"type": "text"}, "Invalid type: text"),
        ({"type": "string", "format": "poem"}, "Unknown format: poem"),
        ({"$ref": "#/$defs/gone"}, r"'/\$defs/gone' does not exist"),
        ({"$ref": "https://example.com/x"}, "not present"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        ({"minItems": "a"}, "'minItems'"),
        ({"const": float("nan")}, "cannot be written as JSON"),
        ({"const": {1, 2}}, "cannot be written as JSON"),
        ({"const": "\ud800"}, "cannot be used"),
        ([{"type": "string"}], r"of type list; expected an object \(dict\)"),
        (True, "of type bool; expected an object"),
        ('{"type": "string"}', "of type str; expected an object"),
    ],
)
def test_a_schema_that_no_reply_can_be_held_to_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(ConstraintError, match=message) as caught:
        Constraint.json_schema(schema)
    assert re.search("upported are|xpected", str(caught.value))


def test_schemas_too_deep_to_follow_are_refused() -> None:
    for depth in (300, 5000):
        schema: dict[str, Any] = {"type": "null"}
        for _ in range(depth):
            schema = {"type": "array", "items": schema}
        with pytest.raises(ConstraintError, match="recursion"):
            Constraint.json_schema(schema)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constraint.regex("a("), r"(?s)regular expression cannot be used: .*a\(.*unclosed group.*Supported is"),
        (lambda: Constraint.regex("a(?=b)"), "look-ahead"),
        (lambda: Constraint.regex(r"(a)\1"), "backreferences are not supported"),
        (lambda: Constraint.regex("\ud800"), "surrogates"),
        (lambda: Constraint.regex(3), "of type int; expected a text"),  # type: ignore[arg-type]
        (lambda: Constraint.lark('start: "a" b'), r'(?s)Lark grammar cannot be used: at 1\(8\): unknown name: "b"'),
        (lambda: Constraint.lark('begin: "a"'), "no start rule found"),
        (lambda: Constraint("json_schema", "{"), "JSON schema cannot be used"),
        (lambda: Constraint("json_schema", "3"), "JSON schema cannot be used"),
        (lambda: Constraint("bnf", "x"), "no constraint of kind 'bnf'; expected one of json_schema"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_expression_or_grammar_is_refused(make: Callable[[], Constraint], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        make()


def test_a_grammar_with_a_special_token_that_the_model_lacks_is_refused_at_submission(runtime: OffsetRuntime) -> None:
    with pytest.raises(ConstraintError, match=r"cannot be used with this model.*<\|gone\|>"):
        reply(runtime, Constraint.lark('start: "a" <|gone|>'))
    assert reply(runtime, Constraint.lark('start: "a" <|im_start|> "b"')).token_ids == (97, 256, 98)


def test_what_is_no_constraint_is_refused_at_submission(runtime: OffsetRuntime) -> None:
    with pytest.raises(InvalidRequestError, match=r"of type dict; expected a Constraint, for example"):
        runtime.run(replace(request(runtime, None), constraint=PERSON))  # type: ignore[arg-type]


def test_a_closed_engine_says_that_it_is_closed() -> None:
    runtime = OffsetRuntime(FakeBackend())
    runtime.close()
    with pytest.raises(EngineClosedError):
        reply(runtime, ENDLESS)


# Vocabularies


def texts_are_their_tokens(backend: Backend) -> None:
    tokenizer = backend.tokenizer
    found = tokenizer.vocabulary()
    assert tokenizer.eos_token_ids <= found.special_ids
    for text in ("a plain text", "  two spaces, and a  gap ", "Größe, 東京 😀", "line\n\n\tline", '{"a": [1, 2.5]}'):
        ids = tokenizer.encode(text)
        assert found.special_ids.isdisjoint(ids)
        assert b"".join(found.tokens[token] for token in ids) == text.encode()
    marker = tokenizer.encode("<|im_start|>")
    assert found.special_ids.issuperset(marker)
    assert [found.tokens[token] for token in marker] == [b"<|im_start|>"]


def test_the_bytes_of_a_vocabulary_spell_what_was_encoded(
    tiny_backends: Callable[[str], TorchBackend], tiny_gguf: Callable[[str], Path]
) -> None:
    texts_are_their_tokens(FakeBackend())
    texts_are_their_tokens(tiny_backends("llama"))
    backend = LlamaCppBackend(tiny_gguf("llama"), LlamaCppOptions(n_ctx=256, n_threads=1))
    try:
        texts_are_their_tokens(backend)
        ours, twin = backend.tokenizer.vocabulary(), tiny_backends("llama").tokenizer.vocabulary()
        known = len(twin.tokens)
        assert known > 250
        # The byte 255 occurs in no text.
        assert all(our == word for our, word in zip(ours.tokens, twin.tokens, strict=False) if our != b"\xff")
        assert {token for token in ours.special_ids if token < known} == twin.special_ids - {ours.tokens.index(b"\xff")}
        with OffsetRuntime(backend, settings=EngineSettings(cache_bytes=0)) as runtime:
            assert re.fullmatch("[ab☃]{4} law", reply(runtime, Constraint.regex("[ab☃]{4} law")).text)
    finally:
        backend.close()


def test_a_tokenizer_that_does_not_tell_its_bytes_is_refused() -> None:
    slow: Any = object()
    with pytest.raises(ConstraintError, match=r"its tokenizer is a object, which.*expected one with a tokenizer.json"):
        TorchTokenizer(slow, [0]).vocabulary()


@pytest.mark.real_model
def test_the_real_model_answers_by_the_schema(smollm: Backend, smollm_runtime: OffsetRuntime) -> None:
    texts_are_their_tokens(smollm)
    asked = smollm_runtime.chat_request(
        [{"role": "user", "content": "Ann Lee is 41 and writes for the Courier. Who is she, as JSON?"}],
        constraint=Constraint.json_schema(PERSON),
        sampling=SamplingParams(max_tokens=60),
    )
    streams = [smollm_runtime.stream(asked), smollm_runtime.stream(replace(asked, constraint=None))]
    found = streams[0].result()
    assert found.finish_reason == "stop"
    assert holds(PERSON, json.loads(found.text)), found.text
    assert streams[1].result().text != found.text
