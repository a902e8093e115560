"""Paired measurements: the value, the control, the order of sides, and what a goal means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from offset_runtime.bench.pairs import MeasurementError, Ratio, measure, median_interval
from offset_runtime.errors import InvalidRequestError


def ratio(**changes: object) -> Ratio:
    given = {
        "name": "x",
        "value": 1.0,
        "interval": (0.99, 1.01),
        "rounds": (0.99, 1.0, 1.01),
        "goal": 1.02,
        "higher_is_better": False,
        "a_a": 1.0,
        "pairs": 15,
        "unit": "s",
        "a": 2.0,
        "b": 2.0,
    }
    return Ratio(**(given | changes))  # type: ignore[arg-type]


def from_list(values: list[float]) -> Callable[[], float]:
    remaining: Iterator[float] = iter(values)
    return lambda: next(remaining)


def recorded(pairs: int, *, warm_up: bool = False) -> list[str]:
    """The sides in the order in which they were measured."""
    seen: list[str] = []

    def side(name: str) -> float:
        seen.append(name)
        return 1.0

    measure("x", lambda: side("a"), lambda: side("b"), pairs=pairs, warm_up=warm_up)
    return seen


def test_the_value_is_the_median_of_the_rounds_own_ratios() -> None:
    # Round by round A / B is 2, 3 and 10; the medians of the sides are 6 and 1.
    rounds = {"A": [2.0, 6.0, 10.0], "C": [2.0, 6.0, 10.0], "B": [1.0, 2.0, 1.0]}
    a = from_list([rounds["A"][0], rounds["C"][0], rounds["C"][1], rounds["A"][1], rounds["A"][2], rounds["C"][2]])
    found = measure("x", a, from_list(rounds["B"]), pairs=3, warm_up=False)
    assert found.value == 3.0
    assert found.rounds == (2.0, 3.0, 10.0)
    assert (found.a, found.b, found.pairs) == (6.0, 1.0, 3)


def test_the_control_is_side_a_against_itself_in_the_same_round() -> None:
    # In the first round A comes before its control, in the second after it.
    found = measure("x", from_list([3.0, 2.0, 2.0, 3.0]), lambda: 1.0, pairs=2, warm_up=False)
    assert found.a_a == 1.5


def test_a_machine_that_slows_down_evenly_favours_neither_side() -> None:
    clock = iter(range(1000, 2000))

    def slower() -> float:
        return float(next(clock))

    found = measure("x", slower, slower, pairs=18)
    assert found.value == pytest.approx(1.0, abs=2e-5)
    assert found.a_a == pytest.approx(1.0, abs=2e-5)


def test_each_side_is_measured_as_often_as_the_rounds_say_and_the_order_changes() -> None:
    seen = recorded(pairs=6)
    rounds = ["".join(seen[i : i + 3]) for i in range(0, 18, 3)]
    assert all(sorted(order) == ["a", "a", "b"] for order in rounds)
    assert [order.index("b") for order in rounds].count(0) == 2
    assert [order.index("b") for order in rounds].count(2) == 2
    assert all(former == later[::-1] for former, later in list(pairwise(rounds))[::2])


@pytest.mark.parametrize("pairs", range(1, 19))
def test_after_any_number_of_rounds_b_was_first_as_often_as_last_or_once_more_or_less(pairs: int) -> None:
    seen = recorded(pairs)
    rounds = ["".join(seen[i : i + 3]) for i in range(0, 3 * pairs, 3)]
    places = [order.index("b") for order in rounds]
    assert abs(places.count(0) - places.count(2)) <= 1


def test_a_warm_up_is_run_and_dropped() -> None:
    assert recorded(pairs=1, warm_up=True)[:2] == ["a", "b"]
    found = measure("x", from_list([99.0, 2.0, 2.0]), from_list([1.0, 1.0]), pairs=1)
    assert (found.value, found.a) == (2.0, 2.0)


def test_progress_counts_the_rounds_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    measure("x", lambda: 1.0, lambda: 1.0, pairs=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_quantity_without_a_ratio_is_refused(wrong: float) -> None:
    with pytest.raises(MeasurementError, match=r"benchmark 'x' measured .* for side B; expected a number"):
        measure("x", lambda: 1.0, lambda: wrong, pairs=1)


def test_no_pairs_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="pairs=0 measures nothing; expected at least 1"):
        measure("x", lambda: 1.0, lambda: 1.0, pairs=0)


@pytest.mark.parametrize(("control", "noise"), [(0.98, False), (1.02, False), (0.979, True), (1.021, True)])
def test_a_control_far_from_one_marks_noise(control: float, noise: bool) -> None:
    assert ratio(a_a=control).noise is noise
    assert ratio(a_a=control).as_json()["noise"] is noise


@pytest.mark.parametrize(
    ("value", "goal", "higher_is_better", "within"),
    [
        (1.02, 1.02, False, True),
        (1.03, 1.02, False, False),
        (0.98, 0.98, True, True),
        (0.97, 0.98, True, False),
        (7.0, None, False, None),
    ],
)
def test_a_goal_is_the_most_or_where_higher_is_better_the_least(
    value: float, goal: float | None, higher_is_better: bool, within: bool | None
) -> None:
    assert ratio(value=value, goal=goal, higher_is_better=higher_is_better).within_goal is within


@pytest.mark.parametrize(
    ("interval", "goal", "higher_is_better", "decided"),
    [
        ((0.99, 1.02), 1.02, False, True),
        ((1.021, 1.03), 1.02, False, True),
        ((0.99, 1.021), 1.02, False, False),
        ((0.98, 1.0), 0.98, True, True),
        ((0.9, 0.979), 0.98, True, True),
        ((0.979, 1.0), 0.98, True, False),
        ((0.99, 1.01), None, False, False),
    ],
)
def test_a_goal_is_decided_where_the_interval_lies_wholly_on_one_side_of_it(
    interval: tuple[float, float], goal: float | None, higher_is_better: bool, decided: bool
) -> None:
    assert ratio(interval=interval, goal=goal, higher_is_better=higher_is_better).decided is decided


def test_noise_decides_nothing() -> None:
    assert ratio(interval=(0.5, 0.6)).decided
    assert not ratio(interval=(0.5, 0.6), a_a=1.1).decided


def test_the_interval_holds_the_median_is_repeatable_and_grows_with_the_spread() -> None:
    wide = [0.9 + 0.2 * i / 14 for i in range(15)]
    narrow = [0.99 + 0.02 * i / 14 for i in range(15)]
    low, high = median_interval(wide)
    assert 0.9 < low < 1.0 < high < 1.1
    assert (low, high) == median_interval(wide)
    assert median_interval(narrow)[1] - median_interval(narrow)[0] == pytest.approx((high - low) / 10)


def test_one_round_far_off_leaves_the_interval_as_it_is() -> None:
    assert median_interval([1.0] * 14 + [9.0]) == (1.0, 1.0)


def test_json_names_the_unit_of_each_side() -> None:
    found = ratio(unit="tokens_per_s", a=20.0, b=10.0, details={"a_load_s": 0.5}, note="few pairs").as_json()
    assert found == {
        "name": "x",
        "value": 1.0,
        "interval": [0.99, 1.01],
        "goal": 1.02,
        "within_goal": True,
        "decided": True,
        "a_a": 1.0,
        "pairs": 15,
        "noise": False,
        "higher_is_better": False,
        "a_tokens_per_s": 20.0,
        "b_tokens_per_s": 10.0,
        "rounds": [0.99, 1.0, 1.01],
        "a_load_s": 0.5,
        "note": "few pairs",
    }
