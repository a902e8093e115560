"""Where a workflow can go: what START reaches, and cycles that never end."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from offset_runtime.graphs.schema import END, REPLY_CONTAINS, START, Workflow

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


def upcoming(workflow: Workflow, node: str) -> dict[str, int]:
    """In how many steps, at the least, each agent that may come after `node` has its turn (1: the next)."""
    follows = choices(workflow)
    steps: dict[str, int] = {}
    front, step = {node}, 1
    while front:
        reached = {end for name in front for ends in follows.get(name, ()) for end in ends}
        front = {end for end in reached if end != END and end not in steps}
        steps.update(dict.fromkeys(sorted(front), step))
        step += 1
    return steps


def joins_behind_choice(workflow: Workflow) -> Iterator[tuple[int, str]]:
    """Yield (index of an edge, choosing node) of every join that waits for agents of which only one way is taken.

    A choice is an edge with ``reply_contains``, a route or the handoffs of an agent; a `path` function may return
    several keys, so it can send both. A choice in a cycle is left out too: it may take another way next time.
    """
    for index, edge in enumerate(workflow.edges):
        if len(edge.source) < 2 or edge.conditional or set(edge.ends) == {END}:
            continue
        # What comes after the join cannot help it to begin.
        others = workflow.model_copy(update={"edges": (*workflow.edges[:index], *workflow.edges[index + 1 :])})
        follows = choices(others)
        sources = set(edge.source)
        if not sources <= reachable(START, follows):
            continue
        for node, ends in _exclusive(others):
            if node not in reachable(node, follows) and not any(
                sources <= reachable(START, _choosing(follows, node, ends, end)) for end in ends
            ):
                yield index, node
                break


def _exclusive(workflow: Workflow) -> list[tuple[str, frozenset[str]]]:
    """The nodes that go on to exactly one of several, with those."""
    choosing = [edge for edge in workflow.edges if edge.path == REPLY_CONTAINS or edge.route]
    found = [(edge.source[0], frozenset(_known(edge.ends, workflow))) for edge in choosing]
    handoffs = {name: agent.handoffs for name, agent in workflow.agents.items() if agent.handoffs}
    found += [(name, frozenset({*_known(ends, workflow), END})) for name, ends in handoffs.items()]
    return [(node, ends) for node, ends in found if len(ends) > 1]


def _choosing(follows: Choices, node: str, ends: frozenset[str], end: str) -> Choices:
    sets = [frozenset({end}) if choice == ends else choice for choice in follows[node]]
    return {**follows, node: sets}


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
