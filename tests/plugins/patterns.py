"""Workflows in the patterns that agents take turns in."""

from __future__ import annotations

from offset_runtime.graphs.schema import Workflow


def workflow(edges: list[dict[str, object]], **agents: dict[str, object]) -> Workflow:
    return Workflow.model_validate(
        {"version": 1, "name": "w", "model": {"base": "fake"}, "agents": agents, "edges": edges}
    )


CHAIN: list[dict[str, object]] = [
    {"source": "START", "target": "a"},
    {"source": "a", "target": "b"},
    {"source": "b", "target": "END"},
]
FORK: list[dict[str, object]] = [
    {"source": "START", "target": ["a", "b"]},
    {"source": ["a", "b"], "target": "c"},
    {"source": "c", "target": "END"},
]
LOOP: list[dict[str, object]] = [
    {"source": "START", "target": "a"},
    {"source": "a", "target": "b"},
    {"source": "b", "path": "reply_contains", "targets": {"again": "a", "*": "END"}},
]
