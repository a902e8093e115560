"""Where a workflow can go."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from patterns import CHAIN, FORK, LOOP, workflow

from offset_runtime.graphs.flow import endless_cycles, reachable, upcoming


def follows(**sets: str) -> dict[str, list[frozenset[str]]]:
    """``a="b c|END"``: from a always on to b, and to c or END. S stands for START."""
    return {node: [frozenset(choice.split("|")) for choice in ways.split()] for node, ways in sets.items()}


@pytest.mark.parametrize(
    ("ways", "cycles"),
    [
        (follows(S="a", a="END"), []),
        (follows(S="a", a="b", b="a|END"), []),
        (follows(S="a", a="b", b="a"), [["a", "b", "a"]]),
        (follows(S="a", a="b END", b="a"), [["a", "b", "a"]]),
        (follows(S="a", a="b|c", b="a", c="a"), [["a", "b", "a"]]),
        (follows(S="a", a="a"), [["a", "a"]]),
        (follows(S="a", a="a|END"), []),
        (follows(S="a c", a="b", b="a", c="d", d="c"), [["a", "b", "a"], ["c", "d", "c"]]),
        # What leads into a cycle without being in it is not at fault.
        (follows(S="a", a="b", b="c", c="b"), [["b", "c", "b"]]),
        (follows(S="a", a="b|c", b="END", c="c"), [["c", "c"]]),
    ],
)
def test_endless_cycles(ways: dict[str, list[frozenset[str]]], cycles: Sequence[Sequence[str]]) -> None:
    assert endless_cycles(ways) == cycles


def test_reachable_follows_every_choice() -> None:
    assert reachable("S", follows(S="a|b", a="c", d="e")) == {"a", "b", "c"}


def test_a_node_reaches_itself_only_by_a_cycle() -> None:
    ways = follows(a="b", b="a", c="a")
    assert "a" in reachable("a", ways)
    assert "c" not in reachable("c", ways)


def test_upcoming_counts_the_fewest_steps_to_each_agents_turn() -> None:
    assert upcoming(workflow(CHAIN, a={}, b={}), "START") == {"a": 1, "b": 2}
    assert upcoming(workflow(CHAIN, a={}, b={}), "b") == {}
    assert upcoming(workflow(LOOP, a={}, b={}), "a") == {"b": 1, "a": 2}
    assert upcoming(workflow(FORK, a={}, b={}, c={}), "START") == {"a": 1, "b": 1, "c": 2}
