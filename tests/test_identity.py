"""An offset is accepted on its base model and on a quantisation of it, and refused on any other model."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import ValidationError

from offset_runtime.errors import BaseModelMismatchError
from offset_runtime.identity import (
    SKETCH_COLUMNS,
    SKETCH_ROWS,
    SKETCH_TOLERANCE,
    BaseIdentity,
    canonical_architecture,
    make_identity,
    sketch_distance,
    sketch_row_ids,
)

Rows = npt.NDArray[np.float32]


def encode(text: str) -> Sequence[int]:
    return list(text.encode())


def table(seed: int = 0, scale: float = 0.1) -> Rows:
    return (np.random.default_rng(seed).normal(size=(SKETCH_ROWS, 64)) * scale).astype(np.float32)


def identity(rows: Rows, architecture: str = "llama", vocab_size: int = 1000) -> BaseIdentity:
    return make_identity(architecture, vocab_size, rows, encode)


def rounded(rows: Rows, bits: int, block: int = 32) -> Rows:
    """Rows quantised to `bits` with one scale a block, as GGUF's simplest types are."""
    blocks = rows.reshape(-1, block)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    return (np.round(blocks / scale) * scale).reshape(rows.shape).astype(np.float32)


@pytest.mark.parametrize(
    "quantise",
    [
        lambda rows: rows,
        lambda rows: rows.astype(np.float16).astype(np.float32),
        lambda rows: rounded(rows, 8),
        lambda rows: rounded(rows, 5),
        lambda rows: rounded(rows, 4),
    ],
    ids=["same", "float16", "8 bit", "5 bit", "4 bit"],
)
@pytest.mark.parametrize("scale", [0.02, 1.0, 50.0])
def test_a_quantisation_of_the_model_is_accepted(quantise: Callable[[Rows], Rows], scale: float) -> None:
    exact = identity(table(scale=scale))
    identity(quantise(table(scale=scale))).check(exact, domain="legal")
    exact.check(identity(quantise(table(scale=scale))), domain="legal")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            identity(table(1)),
            r"embedding rows at relative distance 1\.\d+ \(allowed: 0\.2, which covers quantisation\)",
        ),
        (identity(table(), "mamba"), r"architecture mamba \(this model: llama\)"),
        (identity(table(), vocab_size=999), r"vocab_size 999 \(this model: 1000\)"),
        (identity(table()[:, :32]), r"hidden_size 32 \(this model: 64\)"),
        (make_identity("llama", 1000, table(), lambda text: [1]), r"tokenizer_digest \w{12}… \(this model: \w{12}…\)"),
        (identity(-table()), "embedding rows at relative distance 2"),
        (identity(table() * 2), r"embedding rows at relative distance 1\.00"),
    ],
)
def test_another_model_is_refused_and_the_difference_named(other: BaseIdentity, message: str) -> None:
    with pytest.raises(BaseModelMismatchError, match=message) as caught:
        identity(table()).check(other, domain="legal")
    assert "the offset of domain 'legal' was made for another base model" in str(caught.value)
    assert "offset-runtime train legal" in str(caught.value)


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(BaseModelMismatchError, match=r"architecture .*; hidden_size .*; vocab_size"):
        identity(table()).check(identity(table()[:, :32], "mamba", 999), domain="x")


def test_noise_within_the_tolerance_is_accepted_and_beyond_it_is_not() -> None:
    rows = table()
    noise = table(7)
    noise *= np.linalg.norm(rows[:, :SKETCH_COLUMNS]) / np.linalg.norm(noise[:, :SKETCH_COLUMNS])
    identity(rows).check(identity(rows + 0.95 * SKETCH_TOLERANCE * noise), domain="x")
    with pytest.raises(BaseModelMismatchError):
        identity(rows).check(identity(rows + 1.05 * SKETCH_TOLERANCE * noise), domain="x")


def test_architectures_are_spelled_as_transformers_or_gguf_spell_them() -> None:
    assert {canonical_architecture(name) for name in ("gpt_neox", "gptneox", "GPTNeoX")} == {"gptneox"}
    assert {canonical_architecture(name) for name in ("gemma3_text", "gemma3")} == {"gemma3"}
    assert canonical_architecture("Qwen2") == "qwen2"


@pytest.mark.parametrize(
    ("transformers", "gguf"),
    [("mistral", "llama"), ("mixtral", "llama"), ("phi", "phi2"), ("cohere", "command-r"), ("falcon_mamba", "mamba")],
)
def test_architectures_that_gguf_files_name_otherwise_are_the_same(transformers: str, gguf: str) -> None:
    assert canonical_architecture(transformers) == canonical_architecture(gguf)


@pytest.mark.parametrize("vocab_size", [20, 258, 49152, 256_000])
def test_sketched_rows_are_different_tokens_of_the_vocabulary(vocab_size: int) -> None:
    ids = sketch_row_ids(vocab_size)
    assert len(set(ids)) == SKETCH_ROWS
    assert min(ids) > 0
    assert max(ids) < vocab_size


def test_an_identity_is_small_and_goes_through_json() -> None:
    one = identity(table())
    text = one.model_dump_json()
    assert len(text) < 2000
    assert BaseIdentity.model_validate_json(text) == one


def test_sketches_of_other_sizes_are_infinitely_far_apart() -> None:
    assert sketch_distance(identity(table()).sketch, identity(table()[:, :8]).sketch) == float("inf")
    assert sketch_distance(identity(table()).sketch, identity(table()).sketch) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"sketch": "not base64!"},
        {"sketch": ""},
        {"sketch": base64.b64encode(b"\0\0\0").decode()},
        {"sketch": base64.b64encode(np.array([1, np.nan], "<f2").tobytes()).decode()},
        {"hidden_size": 0},
        {"vocab_size": -1},
        {"colour": "red"},
    ],
)
def test_a_malformed_identity_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        BaseIdentity.model_validate(identity(table()).model_dump() | changes)
