"""Where a workflow can go: what START reaches, and cycles that never end."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

from offset_runtime.graphs.schema import END, Workflow

# For each node what follows it: of every set one target is chosen. A plain edge is a set of one.
Choices = Mapping[str, Sequence[frozenset[str]]]


def choices(workflow: Workflow) -> dict[str, list[frozenset[str]]]:
    """Return what follows each source.

    A misspelled name stands for the nearest valid one, so that one slip is not reported as many.
    """
    found: dict[str, list[frozenset[str]]] = {}
    for edge in workflow.edges:
        ends = _known(edge.ends, workflow)
        sets = [frozenset(ends)] if edge.conditional else [frozenset({name}) for name in ends]
        for source in edge.source:
            found.setdefault(source, []).extend(ends_set for ends_set in sets if ends_set)
    for name, agent in workflow.agents.items():
        if agent.handoffs:
            found.setdefault(name, []).append(frozenset({*_known(agent.handoffs, workflow), END}))
    return found


def _known(names: Iterable[str], workflow: Workflow) -> list[str]:
    valid = [*workflow.agents, END]
    return [match for name in names for match in difflib.get_close_matches(name, valid, n=1, cutoff=0.5)]


def reachable(start: str, follows: Choices, within: Collection[str] | None = None) -> set[str]:
    """Return every node that some run comes to after `start` (itself only by way of a cycle)."""
    found: set[str] = set()
    open_nodes = [start]
    while open_nodes:
        for target in frozenset().union(*follows.get(open_nodes.pop(), ())):
            if target not in found and (within is None or target in within):
                found.add(target)
                open_nodes.append(target)
    return found


def endless_cycles(follows: Choices) -> list[list[str]]:
    """Return each cycle that no run can leave: its nodes in order, the first one again at the end.

    A node can end when of every set that follows it some target can. Nodes that nothing follows end.
    """
    ending = {END}
    nodes = list(follows)
    targets = {target for sets in follows.values() for ends in sets for target in ends}
    ending |= targets - set(nodes)
    changed = True
    while changed:
        more = [n for n in nodes if n not in ending and all(ends & ending for ends in follows[n])]
        ending.update(more)
        changed = bool(more)
    endless = [node for node in nodes if node not in ending]
    cycles: list[list[str]] = []
    seen: set[str] = set()
    for node in endless:
        after = reachable(node, follows, endless)
        if node in after and node not in seen:
            component = {other for other in after if node in reachable(other, follows, endless)}
            seen |= component
            cycles.append(_round_trip(node, follows, component))
    return cycles


def _round_trip(start: str, follows: Choices, component: Collection[str]) -> list[str]:
    """Shortest way from `start` back to it within `component`."""
    paths = [[start]]
    visited: set[str] = set()
    while paths:
        path = paths.pop(0)
        for target in sorted(frozenset().union(*follows[path[-1]])):
            if target == start:
                return [*path, start]
            if target in component and target not in visited:
                visited.add(target)
                paths.append([*path, target])
    return [start]
