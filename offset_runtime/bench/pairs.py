"""Paired measurements: two ways of doing a thing, alternated in one process, with a control. No model in it.

A machine is never quiet: its clock changes, and other programs come and go. So both sides are measured in each
round, and what counts is the ratio within a round. Side A is measured twice a round; the ratio of those two is the
control. Where it is not near 1, nothing that the ratio says can be trusted either. How far the ratios of the rounds
lie apart says how sure their median is: a goal within the interval of the median is neither surely met nor missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np

from offset_runtime.errors import InvalidRequestError

Unit = Literal["s", "bytes", "tokens_per_s"]
Progress = Callable[[int, int], None]

MIN_PAIRS = 15

# Within these a control says that the machine was quiet enough.
QUIET = (0.98, 1.02)

# Where A, B and the control C lie in a round. Over six rounds each side is as often before as after each of the
# others, and each order is followed by its reverse, so that a machine that grows slower favours neither; over any
# other number, such as 15, the two counts differ by one at most.
_ORDERS = ("ACB", "BCA", "ABC", "CBA", "BAC", "CAB")


_RESAMPLES = 2000


class MeasurementError(Exception):
    """A side gave nothing that can be compared; the message says what. Reported as a failed case."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How side A compares with side B: `value` is the median of A / B over the rounds.

    `interval`: the 95 % interval of `value`, low and high. `rounds`: A / B of each round, in their order.
    `goal`: the most that `value` may be, or the least where `higher_is_better`; None: none is set. `a_a`: the
    median ratio of side A to itself. `pairs`: rounds measured. `a`, `b`: each side's own median, in `unit`.
    `details`: further figures, units in their names. `note`: what a reader must know of how it was measured.
    `breach`: what must hold whatever the times are and did not, in words; empty where nothing of the kind.
    """

    name: str
    value: float
    interval: tuple[float, float]
    rounds: tuple[float, ...]
    goal: float | None
    higher_is_better: bool
    a_a: float
    pairs: int
    unit: Unit
    a: float
    b: float
    details: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    breach: str = ""

    @property
    def noise(self) -> bool:
        """Whether the control differs so much from 1 that the value is not to be trusted."""
        return not QUIET[0] <= self.a_a <= QUIET[1]

    @property
    def within_goal(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.higher_is_better else self.value <= self.goal

    @property
    def decided(self) -> bool:
        """Whether a goal is surely met or surely missed: no noise, and the interval wholly on one side of it."""
        if self.goal is None or self.noise:
            return False
        low, high = self.interval
        if self.higher_is_better:
            return low >= self.goal or high < self.goal
        return high <= self.goal or low > self.goal

    def as_json(self) -> dict[str, Any]:
        """The ratio as plain values; each side's median has its unit in its name, such as ``a_s``."""
        return {
            "name": self.name,
            "value": self.value,
            "interval": list(self.interval),
            "goal": self.goal,
            "within_goal": self.within_goal,
            "decided": self.decided,
            "a_a": self.a_a,
            "pairs": self.pairs,
            "noise": self.noise,
            "higher_is_better": self.higher_is_better,
            f"a_{self.unit}": self.a,
            f"b_{self.unit}": self.b,
            "rounds": list(self.rounds),
            **self.details,
            **({"note": self.note} if self.note else {}),
            **({"breach": self.breach} if self.breach else {}),
        }


def measure(
    name: str,
    a: Callable[[], float],
    b: Callable[[], float],
    *,
    goal: float | None = None,
    higher_is_better: bool = False,
    unit: Unit = "s",
    pairs: int = MIN_PAIRS,
    warm_up: bool = True,
    progress: Progress | None = None,
) -> Ratio:
    """Measure both sides in `pairs` rounds, each A, B and A again as the control, in changing order.

    A side returns its quantity in `unit`, so that it decides what of its work is timed. With `warm_up` each side
    runs once before, and what it returns then is dropped. `progress` is called with (rounds done, `pairs`).

    Raises `InvalidRequestError` for fewer than one pair, and `MeasurementError` where a quantity is not positive.
    """
    if pairs < 1:
        raise InvalidRequestError(f"pairs={pairs} measures nothing; expected at least 1")
    if warm_up:
        a()
        b()
    measured = _measure_rounds(name, {"A": a, "B": b, "C": a}, pairs, progress)
    rounds = tuple(found["A"] / found["B"] for found in measured)
    return Ratio(
        name=name,
        value=median(rounds),
        interval=median_interval(rounds),
        rounds=rounds,
        goal=goal,
        higher_is_better=higher_is_better,
        a_a=median(found["A"] / found["C"] for found in measured),
        pairs=pairs,
        unit=unit,
        a=median(found["A"] for found in measured),
        b=median(found["B"] for found in measured),
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median of `values`, low and high; the same for the same values."""
    resampled = np.random.default_rng(0).choice(values, (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(resampled, axis=1), (2.5, 97.5))
    return float(low), float(high)


def _measure_rounds(
    name: str, sides: Mapping[str, Callable[[], float]], pairs: int, progress: Progress | None
) -> list[dict[str, float]]:
    """What each of the sides A, B and C gave in each round."""
    rounds = []
    for at in range(pairs):
        if progress is not None:
            progress(at, pairs)
        rounds.append({side: _positive(name, side, sides[side]()) for side in _ORDERS[at % len(_ORDERS)]})
    if progress is not None:
        progress(pairs, pairs)
    return rounds


def _positive(name: str, side: str, quantity: float) -> float:
    if not (math.isfinite(quantity) and quantity > 0):
        raise MeasurementError(
            f"benchmark {name!r} measured {quantity!r} for side {side}; expected a number greater than 0, "
            "since a ratio is taken of it"
        )
    return quantity
