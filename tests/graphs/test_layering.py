"""The layout of drawings."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from offset_runtime.graphs.layering import Arc, Layering, layer

WIDTH, GAP, BEND = 1.0, 0.5, 0.3


def lay_out(nodes: list[str], arcs: list[Arc]) -> Layering:
    return layer(nodes, arcs, widths=dict.fromkeys(nodes, WIDTH), bend_widths=dict.fromkeys(arcs, BEND), gap=GAP)


def test_a_chain_is_a_straight_line_down() -> None:
    found = lay_out(["S", "a", "E"], [("S", "a"), ("a", "E")])
    assert [found.nodes[n][1] for n in ("S", "a", "E")] == [0, 1, 2]
    assert len({round(found.nodes[n][0], 6) for n in ("S", "a", "E")}) == 1


def test_branches_lie_side_by_side_under_their_source() -> None:
    found = lay_out(["S", "a", "b", "E"], [("S", "a"), ("S", "b"), ("a", "E"), ("b", "E")])
    (xa, ya), (xb, yb) = found.nodes["a"], found.nodes["b"]
    assert ya == yb == 1
    assert abs(xa - xb) >= WIDTH + GAP - 1e-9
    assert abs(found.nodes["S"][0] - (xa + xb) / 2) < 1e-3


def test_an_edge_that_passes_a_layer_is_bent_there_beside_its_nodes() -> None:
    found = lay_out(["S", "a", "E"], [("S", "a"), ("a", "E"), ("S", "E")])
    [(x, depth)] = found.bends["S", "E"]
    assert depth == 1
    assert abs(x - found.nodes["a"][0]) >= (WIDTH + BEND) / 2 + GAP - 1e-9


def test_of_two_edges_that_close_a_cycle_the_later_leads_up() -> None:
    arcs = [("S", "a"), ("a", "b"), ("b", "E"), ("b", "a")]
    assert lay_out(["S", "a", "b", "E"], arcs).backward == {("b", "a")}


def test_the_end_lies_at_the_bottom_even_where_nothing_leads_to_it() -> None:
    found = lay_out(["S", "a", "b", "E"], [("S", "a"), ("a", "b")])
    assert found.nodes["E"][1] == 3


NODES = ["S", "a", "b", "c", "d", "e", "E"]
ARCS = st.lists(st.tuples(st.sampled_from(NODES[:-1]), st.sampled_from(NODES[1:])), max_size=14, unique=True)


@given(ARCS)
def test_nodes_of_a_layer_never_overlap_and_edges_lead_down_or_are_marked(arcs: list[Arc]) -> None:
    found = lay_out(NODES, arcs)
    for depth in {d for _, d in found.nodes.values()}:
        row = sorted(x for x, d in found.nodes.values() if d == depth)
        assert all(b - a >= WIDTH + GAP - 1e-6 for a, b in pairwise(row))
    for source, target in arcs:
        if source != target:
            down = found.nodes[target][1] > found.nodes[source][1]
            assert down == ((source, target) not in found.backward)
