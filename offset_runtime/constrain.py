"""What a reply must look like, held to while it is decoded: a grammar -> the tokens that may come next.

A reply that ends is valid by construction; what a grammar cannot hold a reply to is refused before it begins.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from offset_runtime.backends.base import Tokenizer
from offset_runtime.errors import ConstraintError, GenerationError

Logits = npt.NDArray[np.float32]
Kind = Literal["json_schema", "regex", "lark"]

_NAMES: dict[Kind, str] = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
_ADVICE: dict[Kind, str] = {
    "json_schema": (
        "Supported are type, enum, const, anyOf, allOf, oneOf of alternatives that exclude one another, $ref within "
        "the schema, properties, required, additionalProperties, patternProperties, items, prefixItems, pattern, "
        "format, and limits on numbers, lengths and counts. Take it out of the schema and check for it in the reply."
    ),
    "regex": (
        "Supported is what can be matched in one pass: classes, groups, alternatives, repetition, flags; not "
        "look-around, word boundaries or back-references. The whole reply must match."
    ),
    "lark": 'Expected rules such as \'start: "yes" | "no"\', one of them called start; terminals in capitals.',
}
# As `json.dumps` writes: one line, so that no reply runs on in white space, and what models have seen most.
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
    # One spelling for every text: no "\u0061" that is a property's name and yet not known for it.
    "json_allowed_escapes": '"\\\\bfnrt',
}
# What llguidance would read past: options of its own, and keywords of the third draft of JSON Schema.
_READ_PAST = frozenset({"x-guidance", "divisibleBy", "disallow", "extends"})
# What needs such an escape, llguidance would leave out of a constant or of a pattern (a class in it may have them).
_CONTROL = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\[av0c]|\\[xu]\{?0*(?:[01]?[0-9a-fA-F]|7[fF])(?![0-9a-fA-F])|\\p\{C"
)
_CONTROL_CHARACTER = "a control character"
_CLASS = re.compile(r"\[(?:\^|[^\]]+-)(?:\\.|[^\]\\])*\]")
# llguidance reads numbers as floats.
_LIMITS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_UNSUPPORTED_KEYS = re.compile(r'Unimplemented keys: \["([^"]+)"')
# In a schema, what lies under these is named by the user, or is data.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"enum", "const", "default", "examples"})


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole reply of a request must be. Make one by `json_schema`, `regex` or `lark`.

    `source`: the schema as JSON text, the expression, or the grammar. Raises `ConstraintError` for one that is not
    valid, or that cannot be held to while decoding; the message names the keyword or the position.
    """

    kind: Kind
    source: str

    def __post_init__(self) -> None:
        if self.kind not in _NAMES:
            raise ConstraintError(f"there is no constraint of kind {self.kind!r}; expected one of {', '.join(_NAMES)}")
        if not isinstance(self.source, str):
            raise ConstraintError(
                f"the {_NAMES[self.kind]} is of type {type(self.source).__name__}; expected a text. "
                f"{_ADVICE[self.kind]}"
            )
        try:
            failed, found = LLMatcher.validate_grammar_with_warnings(self.grammar())
        except ValueError as error:
            failed, found = True, [str(error)]
        if failed:
            raise ConstraintError(self._refusal(found[0]))

    @classmethod
    def json_schema(cls, schema: dict[str, Any]) -> Self:
        """JSON on one line, as `json.dumps` writes it, that `schema` allows; properties come in the schema's order.

        As JSON Schema has it, keywords that it does not define say nothing, and an object may have more properties
        than are named unless ``additionalProperties`` is false.
        """
        if not isinstance(schema, dict):
            raise ConstraintError(
                f"the JSON schema is of type {type(schema).__name__}; expected an object (dict), "
                'for example {"type": "object", "properties": {…}}'
            )
        try:
            source = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConstraintError(
                f"the JSON schema cannot be written as JSON: {error}; expected objects, lists, texts, numbers, "
                "true, false and None alone"
            ) from error
        return cls("json_schema", source)

    @classmethod
    def regex(cls, expression: str) -> Self:
        """A text that `expression` matches as a whole; its syntax is that of Rust's regex, much as Python's."""
        return cls("regex", expression)

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """A text that the rule ``start`` of a Lark grammar derives."""
        return cls("lark", grammar)

    def grammar(self) -> str:
        """The grammar as llguidance reads it."""
        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.source)
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(self.source)
        for key, value, place in _keywords(json.loads(self.source)):
            # A name that comes twice would count twice.
            if key in _READ_PAST or (key == "minProperties" and value not in (0, 1)):
                raise ValueError(_cannot(key, place))
            what = _changed(key, value)
            if what is not None:
                raise ValueError(_cannot(f"{key} with {what}", place))
        return LLMatcher.grammar_from_json_schema(self.source, overrides=JSON_STYLE)  # type: ignore[arg-type]

    def _refusal(self, found: str) -> str:
        keys = _UNSUPPORTED_KEYS.search(found)
        key = keys[1] if keys else "oneOf" if found.startswith("oneOf constraints") else None
        if self.kind == "json_schema" and key is not None:
            places = (place for used, _, place in _keywords(json.loads(self.source)) if used == key)
            what = key if key != "oneOf" else "oneOf of alternatives that may hold at once"
            found = _cannot(what, next(places, key))
        if self.kind == "regex":
            # What is around it is of the grammar that the expression is put in.
            found = found.split("(in regex): ")[-1].split("\n   1 |")[0]
        return f"the {_NAMES[self.kind]} cannot be used: {found.strip()}\n{_ADVICE[self.kind]}"


class Matcher:
    """How far one reply has come in its grammar. Used from one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        """Whether the reply is complete and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self, logits: Logits) -> Logits:
        """A copy of `logits` (vocabulary,) with -inf for every token that may not come next.

        Raises `GenerationError` where none may, and where the grammar takes too much work to follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        # Rows of the model beyond the tokenizer's vocabulary stand for no text.
        allowed = np.zeros(logits.size, np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: logits.size]
        allowed[: known.size] = known
        if "NoExtension" in self._failure or not (self._failure or allowed.any()):
            raise GenerationError(
                "the reply's constraint leaves no token of this model to go on with; expected one whose texts the "
                "model's vocabulary can spell, and an end token. Loosen it; other requests are not affected."
            )
        self._check("the reply's constraint could not be followed further")
        return np.where(allowed, logits, np.float32(-np.inf))

    def push(self, token: int) -> None:
        """Take in the token that was drawn. Raises `GenerationError` for one that may not come next."""
        self._matcher.consume_token(token)
        self._check(f"token {token} does not fit the reply's constraint")

    @property
    def _failure(self) -> str:
        """What went wrong, in a line, or an empty text."""
        return _first_line(self._matcher.get_error())

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise GenerationError(f"{what}: {self._failure}. Simplify it; other requests are not affected.")


class Grammars:
    """Makes matchers for one model. Safe from any thread.

    The model's vocabulary is read at the first, which takes about a second where it is large.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._read: LLTokenizer | None = None
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint | None) -> Matcher | None:
        """A matcher at the beginning of `constraint`; None for None.

        Raises `ConstraintError` for one that does not fit this model, such as a grammar that names a special token
        which it lacks.
        """
        if constraint is None:
            return None
        found = LLMatcher(self._vocabulary(), constraint.grammar(), log_level=0)
        if found.is_error():
            raise ConstraintError(
                f"the {_NAMES[constraint.kind]} cannot be used with this model: {_first_line(found.get_error())}. "
                f"{_ADVICE[constraint.kind]}"
            )
        return Matcher(found)

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._read is None:
                words = _Words(self._tokenizer)
                self._read = LLTokenizer(TokenizerWrapper(words), eos_token=words.end_ids)
            return self._read


class _Words:
    """A vocabulary in the shape that llguidance reads."""

    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.vocabulary()
        ends = tokenizer.eos_token_ids
        # The last is a token that no model has: the end of a reply for models that never end one.
        self.tokens = [*vocabulary.tokens, b""]
        # To llguidance this byte marks special tokens; in no text does it occur.
        self.tokens = [b"" if word.startswith(b"\xff") else word for word in self.tokens]
        self.end_ids = sorted(ends) or [len(vocabulary.tokens)]
        self.eos_token_id = self.end_ids[0]
        self._special = vocabulary.special_ids | ends
        self.special_token_ids = sorted(self._special)
        self._encode = tokenizer.encode
        self._plain = {text: token for token, text in enumerate(self.tokens) if text and token not in self._special}
        self._longest = max(map(len, self._plain), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Token ids that spell `text`, none of them special: as the model would, or else the longest from the left."""
        try:
            found = self._encode(text.decode())
        except UnicodeDecodeError:
            found = []
        # Special tokens written out are read as such, and some tokenizers put a space first.
        if self._special.isdisjoint(found) and b"".join([self.tokens[token] for token in found]) == text:
            return found
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        found: list[int] = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._plain), None)
            if size is None:
                # It cannot be spelled; the mask says so in time.
                return found
            found.append(self._plain[text[:size]])
            text = text[size:]
        return found


def _first_line(error: str) -> str:
    """What llguidance says went wrong, without the state of its parser and the grammar, which follow."""
    return error.strip().partition("\n")[0].removesuffix(".")


def _changed(keyword: str, value: object) -> str | None:
    """What llguidance would change in the value of a keyword, in words."""
    if keyword in ("enum", "const"):
        # JSON has short escapes for the others, such as that of a new line.
        if re.search(r"\\u00(?:[01]|7f)", json.dumps(value)):
            return _CONTROL_CHARACTER
    elif keyword in ("pattern", "patternProperties"):
        patterns = [*value] if isinstance(value, dict) else [value]
        if any(isinstance(text, str) and _CONTROL.search(_CLASS.sub("", text)) for text in patterns):
            return _CONTROL_CHARACTER
    if (keyword in ("enum", "const") or keyword in _LIMITS) and any(abs(x) > 2**53 for x in _integers(value)):
        return "an integer beyond 2**53"
    return None


def _integers(value: object) -> Iterator[int]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _integers(inner)
    elif isinstance(value, int):
        yield value


def _cannot(keyword: str, place: str) -> str:
    return f"{keyword} (at {place}) is not among what a reply can be held to while it is decoded"


def _keywords(schema: object, path: str = "$") -> Iterator[tuple[str, object, str]]:
    """The keywords that a JSON schema uses: name, value, and where, as a path from its root ``$``."""
    if isinstance(schema, list):
        for at, item in enumerate(schema):
            yield from _keywords(item, f"{path}[{at}]")
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        place = f"{path}.{name}"
        yield name, value, place
        if name in _NAMED and isinstance(value, dict):
            for child, inner in value.items():
                yield from _keywords(inner, f"{place}.{child}")
        elif name not in _DATA:
            yield from _keywords(value, place)
