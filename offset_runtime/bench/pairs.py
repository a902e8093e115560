"""Paired measurements: two ways of doing a thing, alternated in one process, with a control. No model in it.

A machine is never quiet: its clock changes, and other programs come and go. So both sides are measured in each
round, and what counts is the ratio within a round. Side A is measured twice a round; the ratio of those two is the
control. Where it is not near 1, nothing that the ratio says can be trusted either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from offset_runtime.errors import InvalidRequestError

Unit = Literal["s", "bytes", "tokens_per_s"]
Progress = Callable[[int, int], None]

MIN_PAIRS = 15

# Within these a control says that the machine was quiet enough.
QUIET = (0.98, 1.02)

# Where A, B and the control C lie in a round. Each side is as often before as after each of the others, and each
# order is followed by its reverse, so that a machine that grows slower favours neither.
_ORDERS = ("ACB", "BCA", "ABC", "CBA", "BAC", "CAB")


@dataclass(frozen=True, slots=True)
class Ratio:
    """How side A compares with side B: `value` is the median of A / B over the rounds.

    `goal`: the most that `value` may be, or the least where `higher_is_better`; None: none is set. `a_a`: the
    median ratio of side A to itself. `pairs`: rounds measured. `a`, `b`: each side's own median, in `unit`.
    `details`: further figures, units in their names. `note`: what a reader must know of how it was measured.
    """

    name: str
    value: float
    goal: float | None
    higher_is_better: bool
    a_a: float
    pairs: int
    unit: Unit
    a: float
    b: float
    details: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

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

    def as_json(self) -> dict[str, Any]:
        """The ratio as plain values; each side's median has its unit in its name, such as ``a_s``."""
        return {
            "name": self.name,
            "value": self.value,
            "goal": self.goal,
            "within_goal": self.within_goal,
            "a_a": self.a_a,
            "pairs": self.pairs,
            "noise": self.noise,
            "higher_is_better": self.higher_is_better,
            f"a_{self.unit}": self.a,
            f"b_{self.unit}": self.b,
            **self.details,
            **({"note": self.note} if self.note else {}),
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

    Raises `InvalidRequestError` for fewer than one pair, and for a side whose quantity is no positive number.
    """
    if pairs < 1:
        raise InvalidRequestError(f"pairs={pairs} measures nothing; expected at least 1")
    sides = {"A": a, "B": b, "C": a}
    if warm_up:
        a()
        b()
    rounds = []
    for at in range(pairs):
        if progress is not None:
            progress(at, pairs)
        rounds.append({side: _positive(name, side, sides[side]()) for side in _ORDERS[at % len(_ORDERS)]})
    if progress is not None:
        progress(pairs, pairs)
    return Ratio(
        name=name,
        value=median(found["A"] / found["B"] for found in rounds),
        goal=goal,
        higher_is_better=higher_is_better,
        a_a=median(found["A"] / found["C"] for found in rounds),
        pairs=pairs,
        unit=unit,
        a=median(found["A"] for found in rounds),
        b=median(found["B"] for found in rounds),
    )


def _positive(name: str, side: str, quantity: float) -> float:
    if not (math.isfinite(quantity) and quantity > 0):
        raise InvalidRequestError(
            f"benchmark {name!r} measured {quantity!r} for side {side}; expected a number greater than 0, "
            "since a ratio is taken of it"
        )
    return quantity
