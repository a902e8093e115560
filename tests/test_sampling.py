"""Each sampling parameter against a small reference computation, or statistics with a fixed seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from offset_runtime import SamplingParams
from offset_runtime.sampling import Sampler, log_softmax, top_logprobs

Logits = npt.NDArray[np.float32]
DRAWS = 4000


def softmax(logits: Logits, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())


def frequencies(logits: Logits, **params: Any) -> npt.NDArray[np.float64]:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 3} | params), ())
    counts = Counter(sampler.sample(logits) for _ in range(DRAWS))
    return np.array([counts[i] / DRAWS for i in range(logits.size)])


def kept(probabilities: npt.NDArray[np.float64], keep: list[int]) -> npt.NDArray[np.float64]:
    result = np.zeros_like(probabilities)
    result[keep] = probabilities[keep]
    return result / result.sum()


LOGITS = np.array([2.0, 0.5, 1.5, -1.0, 0.0, 1.0], np.float32)
# Four standard errors of a frequency near one half.
NEAR = 4 * 0.5 / DRAWS**0.5


def test_the_default_is_greedy() -> None:
    sampler = Sampler(SamplingParams(), ())
    assert [sampler.sample(LOGITS) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_temperature_draws_from_the_softmax(temperature: float) -> None:
    found = frequencies(LOGITS, temperature=temperature)
    np.testing.assert_allclose(found, softmax(LOGITS, temperature), atol=NEAR)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    assert frequencies(LOGITS, temperature=temperature)[0] == 1.0


@pytest.mark.parametrize(
    ("top_k", "keep"), [(1, [0]), (3, [0, 2, 5]), (6, [0, 1, 2, 3, 4, 5]), (99, [0, 1, 2, 3, 4, 5])]
)
def test_top_k_keeps_the_k_likeliest(top_k: int, keep: list[int]) -> None:
    np.testing.assert_allclose(frequencies(LOGITS, top_k=top_k), kept(softmax(LOGITS), keep), atol=NEAR)


# Probabilities are 0.42, 0.26, 0.16, 0.09, 0.06, 0.02 for tokens 0, 2, 5, 1, 4, 3.
@pytest.mark.parametrize(
    ("top_p", "keep"), [(0.01, [0]), (0.41, [0]), (0.5, [0, 2]), (0.8, [0, 2, 5]), (1.0, [0, 1, 2, 3, 4, 5])]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, keep: list[int]) -> None:
    np.testing.assert_allclose(frequencies(LOGITS, top_p=top_p), kept(softmax(LOGITS), keep), atol=NEAR)


@pytest.mark.parametrize(("min_p", "keep"), [(1.0, [0]), (0.5, [0, 2]), (0.2, [0, 1, 2, 5]), (0.0, [0, 1, 2, 3, 4, 5])])
def test_min_p_keeps_those_near_the_likeliest(min_p: float, keep: list[int]) -> None:
    np.testing.assert_allclose(frequencies(LOGITS, min_p=min_p), kept(softmax(LOGITS), keep), atol=NEAR)


def test_top_k_top_p_and_min_p_work_together() -> None:
    # top_k leaves 0, 2, 5, 1 with shares 0.45, 0.27, 0.17, 0.10; top_p cuts the last, min_p the one before it.
    found = frequencies(LOGITS, top_k=4, top_p=0.85, min_p=0.5)
    np.testing.assert_allclose(found, kept(softmax(LOGITS), [0, 2]), atol=NEAR)


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = np.array([3.0, 2.0, -1.0, 0.5], np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [0, 2])
    # Token 0 came in the prompt: 3 / 2 < 2. Then token 1 has come too: 2 / 2 < 3 / 2.
    assert [sampler.sample(logits) for _ in range(3)] == [1, 0, 0]
    assert logits.tolist() == [3.0, 2.0, -1.0, 0.5]
    negative = Sampler(SamplingParams(repetition_penalty=2.0), [0])
    assert negative.sample(np.array([-1.0, -1.5], np.float32)) == 1


def test_a_penalty_of_one_changes_nothing() -> None:
    assert Sampler(SamplingParams(repetition_penalty=1.0), [0]).sample(LOGITS) == 0


@given(st.integers(0, 2**32), st.floats(0.1, 2.0))
def test_a_seed_gives_the_same_tokens_again(seed: int, temperature: float) -> None:
    params = SamplingParams(seed=seed, temperature=temperature)
    one, other = Sampler(params, ()), Sampler(params, ())
    assert [one.sample(LOGITS) for _ in range(20)] == [other.sample(LOGITS) for _ in range(20)]


def test_without_a_seed_two_runs_differ() -> None:
    logits = np.zeros(1000, np.float32)
    one, other = (Sampler(SamplingParams(temperature=1.0), ()) for _ in range(2))
    assert [one.sample(logits) for _ in range(10)] != [other.sample(logits) for _ in range(10)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(temperature: float, bad: float) -> None:
    logits = LOGITS.copy()
    logits[3] = bad
    with pytest.raises(ValueError, match="not finite"):
        Sampler(SamplingParams(temperature=temperature, seed=0), ()).sample(logits)
    with pytest.raises(ValueError, match="not finite"):
        Sampler(SamplingParams(temperature=temperature, seed=0), ()).sample(np.full(4, -np.inf, np.float32))


def test_masked_tokens_are_never_drawn() -> None:
    logits = LOGITS.copy()
    logits[[0, 2]] = -np.inf
    found = frequencies(logits, temperature=2.0)
    assert found[0] == found[2] == 0
    np.testing.assert_allclose(found, kept(softmax(LOGITS, 2.0), [1, 3, 4, 5]), atol=NEAR)


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20))
def test_log_softmax_is_normalised(values: list[float]) -> None:
    found = log_softmax(np.array([values, values], np.float32))
    np.testing.assert_allclose(np.exp(found.astype(np.float64)).sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(found[0], np.log(np.maximum(softmax(np.array(values, np.float32)), 1e-300)), atol=1e-3)


def test_top_logprobs_are_the_likeliest_first() -> None:
    logprobs = log_softmax(LOGITS)
    assert [token for token, _ in top_logprobs(logprobs, 3)] == [0, 2, 5]
    assert top_logprobs(logprobs, 1) == [(0, float(logprobs[0]))]
    assert top_logprobs(logprobs, 0) == []
    assert len(top_logprobs(logprobs, 100)) == LOGITS.size


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"max_tokens": -1},
        {"seed": -1},
        {"logprobs": 101},
        {"stop": ("",)},
        {"stop": ["ok", ""]},
        {"top_q": 1},
    ],
)
def test_parameters_out_of_range_or_unknown_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SamplingParams(**params)


def test_stop_takes_one_text_or_many() -> None:
    assert SamplingParams(stop="###").stop == ("###",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
