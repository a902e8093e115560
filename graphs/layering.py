"""Where the nodes of a workflow's drawing lie: layers from top to bottom, few crossings, straight ways.

The layered method of Sugiyama, Tagawa and Toda (1981): edges that would close a cycle are turned round,
every node gets the layer of its longest way from the start, long edges are bent at one point a layer,
each layer is ordered by the mean place of its neighbours, and places are fitted to those means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Arc = tuple[str, str]
Bend = tuple[str, str, int]  # the point of an arc in a layer that it passes
Name = str | Bend
Sides = Mapping[Name, tuple[Sequence[Name], Sequence[Name]]]  # the neighbours above and below each name

_ORDER_SWEEPS = 16
_FIT_SWEEPS = 60
# How much the parts of a way resist being slanted, by how many of their two ends are bends: a long line
# should run straight, even where boxes are then less well centred.
_STIFFNESS = (1.0, 2.0, 8.0)


@dataclass(frozen=True, slots=True)
class Layering:
    """Places as (x of the centre, layer), the layer of the start being 0.

    `nodes`: of each node. `bends`: of the points each arc passes, from its source to its target.
    `backward`: the arcs that lead up.
    """

    nodes: Mapping[str, tuple[float, int]]
    bends: Mapping[Arc, Sequence[tuple[float, int]]]
    backward: Collection[Arc]


def layer(
    nodes: Sequence[str],
    arcs: Sequence[Arc],
    *,
    widths: Mapping[str, float],
    bend_widths: Mapping[Arc, float],
    gap: float,
) -> Layering:
    """Lay out `nodes` joined by `arcs`; the first node is the start, the last one lies at the bottom.

    Arcs given first keep their direction where two together would close a cycle. `widths` of nodes,
    `bend_widths` that arcs need where they pass a layer, and the `gap` between neighbours are in the
    unit of the x that are returned. Arcs from a node to itself are left out.
    """
    proper = [arc for arc in arcs if arc[0] != arc[1]]
    backward = _closing_arcs(proper)
    downward = {arc: arc[::-1] if arc in backward else arc for arc in proper}
    depth = _depths(nodes, list(downward.values()))
    chains = {arc: _chain(arc, *downward[arc], depth) for arc in proper}
    layers = _layers(nodes, depth, chains)
    sides = _sides(chains)
    space = {name: widths[name] if isinstance(name, str) else bend_widths[name[:2]] for row in layers for name in row}
    _order(layers, sides)
    x = _fit(layers, sides, space, gap)
    bends = {arc: [(x[name], name[2]) for name in chain if not isinstance(name, str)] for arc, chain in chains.items()}
    return Layering(
        nodes={node: (x[node], depth[node]) for node in nodes},
        bends={arc: points[::-1] if arc in backward else points for arc, points in bends.items()},
        backward=backward,
    )


def _closing_arcs(arcs: Sequence[Arc]) -> set[Arc]:
    """The arcs that would close a cycle with those before them."""
    closing: set[Arc] = set()
    after: dict[str, set[str]] = {}
    for source, target in arcs:
        reached, found = [target], {target}
        while reached:
            fresh = after.get(reached.pop(), set()) - found
            found |= fresh
            reached.extend(fresh)
        if source in found:
            closing.add((source, target))
        else:
            after.setdefault(source, set()).add(target)
    return closing


def _depths(nodes: Sequence[str], downward: Sequence[Arc]) -> dict[str, int]:
    """The layer of each node: one below the lowest of those above it."""
    depth = {node: 0 if node == nodes[0] else 1 for node in nodes}
    for _ in nodes:
        for upper, lower in downward:
            depth[lower] = max(depth[lower], depth[upper] + 1)
    depth[nodes[-1]] = max(depth[nodes[-1]], *(depth[node] + 1 for node in nodes[:-1]))
    return depth


def _chain(arc: Arc, upper: str, lower: str, depth: Mapping[str, int]) -> list[Name]:
    return [upper, *((*arc, d) for d in range(depth[upper] + 1, depth[lower])), lower]


def _layers(nodes: Sequence[str], depth: Mapping[str, int], chains: Mapping[Arc, Sequence[Name]]) -> list[list[Name]]:
    layers: list[list[Name]] = [[] for _ in range(max(depth.values()) + 1)]
    for node in nodes:
        layers[depth[node]].append(node)
    for chain in chains.values():
        for name in chain:
            if not isinstance(name, str):
                layers[name[2]].append(name)
    return layers


def _sides(chains: Mapping[Arc, Sequence[Name]]) -> Sides:
    found: dict[Name, tuple[list[Name], list[Name]]] = {}
    for chain in chains.values():
        for upper, lower in pairwise(chain):
            found.setdefault(upper, ([], []))[1].append(lower)
            found.setdefault(lower, ([], []))[0].append(upper)
    return found


def _order(layers: list[list[Name]], sides: Sides) -> None:
    """Order each layer by the mean place of its neighbours, down and up in turn; keep the fewest crossings."""
    best, fewest = [list(row) for row in layers], _crossings(layers, sides)
    for sweep in range(_ORDER_SWEEPS):
        side = sweep % 2
        places = {name: i / len(row) for row in layers for i, name in enumerate(row)}
        for row in layers if side == 0 else reversed(layers):
            wanted = {name: _mean(sides.get(name, ((), ()))[side], places, places[name]) for name in row}
            row.sort(key=wanted.__getitem__)
            places.update((name, i / len(row)) for i, name in enumerate(row))
        crossings = _crossings(layers, sides)
        if crossings < fewest:
            best, fewest = [list(row) for row in layers], crossings
    layers[:] = best


def _crossings(layers: Sequence[Sequence[Name]], sides: Sides) -> int:
    count = 0
    for upper, lower in pairwise(layers):
        place = {name: i for i, name in enumerate(lower)}
        ends = [(i, place[to]) for i, name in enumerate(upper) for to in sides.get(name, ((), ()))[1]]
        count += sum((a - c) * (b - d) < 0 for n, (a, b) in enumerate(ends) for c, d in ends[:n])
    return count


def _fit(layers: Sequence[Sequence[Name]], sides: Sides, space: Mapping[Name, float], gap: float) -> dict[Name, float]:
    """Minimise the weighted sum of squared slants, one layer at a time with the others held."""
    x: dict[Name, float] = {}
    for row in layers:
        places = _spread([(0.0, 1.0)] * len(row), row, space, gap)
        middle = (places[0] + places[-1]) / 2 if places else 0.0
        x.update((name, place - middle) for name, place in zip(row, places, strict=True))
    for sweep in range(_FIT_SWEEPS):
        for row in layers if sweep % 2 == 0 else reversed(layers):
            x.update(zip(row, _spread([_pull(name, sides, x) for name in row], row, space, gap), strict=True))
    return x


def _pull(name: Name, sides: Sides, x: Mapping[Name, float]) -> tuple[float, float]:
    """Where the neighbours of `name` pull it, and how hard."""
    neighbours = [other for side in sides.get(name, ((), ())) for other in side]
    if not neighbours:
        return x[name], 0.01
    weights = [_STIFFNESS[isinstance(name, tuple) + isinstance(other, tuple)] for other in neighbours]
    total = sum(weights)
    return sum(weight * x[other] for weight, other in zip(weights, neighbours, strict=True)) / total, total


def _spread(
    pulls: Sequence[tuple[float, float]], row: Sequence[Name], space: Mapping[Name, float], gap: float
) -> list[float]:
    """Places nearest to the pulls (place, weight), by weighted least squares, that keep order and distances.

    With the distances taken off this is isotonic regression, solved by pooling adjacent violators.
    """
    shifts = [0.0]
    for left, right in pairwise(row):
        shifts.append(shifts[-1] + (space[left] + space[right]) / 2 + gap)
    blocks: list[tuple[float, float, int]] = []  # place, weight, members
    for (place, weight), shift in zip(pulls, shifts, strict=False):
        blocks.append((place - shift, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, weight_a, members_a), (b, weight_b, members_b) = blocks[-2:]
            mean = (a * weight_a + b * weight_b) / (weight_a + weight_b)
            blocks[-2:] = [(mean, weight_a + weight_b, members_a + members_b)]
    level = [place for place, _, members in blocks for _ in range(members)]
    return [place + shift for place, shift in zip(level, shifts, strict=False)]


def _mean(names: Sequence[Name], places: Mapping[Name, float], default: float) -> float:
    return sum(places[name] for name in names) / len(names) if names else default
