"""Which factor makes rows equal tokens is found by trying, and where none does the model is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from offset_runtime.backends.embedding_rule import EmbeddingRule, Logits, find_rule

LOGITS = np.linspace(-9, 9, 20, dtype=np.float32).reshape(2, 10)
ROOT = math.sqrt(64)


def fed(right: float, tried: list[float] | None = None) -> Callable[[float], Logits]:
    """A model that reads rows right under one factor."""

    def feed(factor: float) -> Logits:
        if tried is not None:
            tried.append(factor)
        return LOGITS if factor == right else LOGITS[::-1]

    return feed


@pytest.mark.parametrize(
    ("architecture", "right", "rule"),
    [
        ("llama", 1.0, EmbeddingRule(1.0, 1.0)),
        ("granite", 1.0, EmbeddingRule(1.0, 1.0)),
        ("gemma2", 1.0, EmbeddingRule(1.0, 1 / ROOT)),
        ("minicpm3", 1.0, EmbeddingRule(1.0, 1 / 12)),
        ("gemma3", ROOT, EmbeddingRule(ROOT, 1.0)),
        ("unheard of", 3.0, EmbeddingRule(3.0, 1.0)),
    ],
)
def test_the_rule_follows_from_the_factor_and_the_architecture(
    architecture: str, right: float, rule: EmbeddingRule
) -> None:
    assert find_rule(architecture, 64, 3.0, LOGITS, fed(right)) == (rule, 0.0)


def test_no_more_is_tried_once_a_factor_fits() -> None:
    tried: list[float] = []
    find_rule("llama", 64, None, LOGITS, fed(1.0, tried))
    assert tried == [1.0]


@pytest.mark.parametrize("declared", [None, 1.0, 3.0])
def test_where_no_factor_fits_the_smallest_difference_is_told(declared: float | None) -> None:
    rule, gap = find_rule("gemma3n", 64, declared, LOGITS, lambda factor: LOGITS + np.float32(factor))
    assert rule is None
    assert gap == pytest.approx(1 / 9)


def test_logits_that_are_no_numbers_never_fit() -> None:
    rule, _ = find_rule("llama", 64, None, LOGITS, lambda factor: np.full_like(LOGITS, np.nan))
    assert rule is None
