"""A picture of a workflow: Mermaid text, or an image drawn here without any web service."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path as FilePath
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.path import Path

from offset_runtime.errors import OffsetError
from offset_runtime.graphs.layering import Arc, layer
from offset_runtime.graphs.schema import END, START, Workflow

IMAGE_SUFFIXES = (".png", ".svg", ".pdf")

# Fill and line of each domain in turn: pale enough for dark text, and apart for colour-blind readers.
_COLOURS = (
    ("#dbe9f6", "#2f6fad"),
    ("#fde4cf", "#c8641b"),
    ("#d9f0e3", "#21875a"),
    ("#f4dcec", "#a8457f"),
    ("#fbf1c4", "#9a7b0a"),
    ("#dff1f5", "#2a8aa0"),
    ("#e8e0f5", "#6a4bb0"),
    ("#f8dcdc", "#b23a3a"),
)
_PLAIN = ("#eeeeee", "#6b6b6b")
_INK = "#222222"
_ARROW = "#555555"

# Inches.
_LAYER_HEIGHT = 1.12
_BOX_HEIGHT = 0.56
_END_HEIGHT = 0.34
_GAP = 0.4
_LOOP = 0.55
_MARGIN = 0.3
_LABEL_CHARACTER = 0.065
_DPI = 180

_DASHED = (0, (4, 3))
_LEGEND_COLUMN = 1.1


def save_drawing(workflow: Workflow, path: str | os.PathLike[str]) -> None:
    """Write the picture of `workflow` to `path`: .mmd for Mermaid text, .png, .svg or .pdf for an image.

    Raises `OffsetError` for another suffix or a file that cannot be written.
    """
    target = FilePath(path)
    try:
        if target.suffix == ".mmd":
            target.write_text(mermaid(workflow), encoding="utf-8")
        elif target.suffix in IMAGE_SUFFIXES:
            draw(workflow).savefig(target, dpi=_DPI)
        else:
            raise OffsetError(
                f"cannot draw to {target}: suffix {target.suffix!r}; expected .mmd (Mermaid text), "
                f"{', '.join(IMAGE_SUFFIXES)}"
            )
    except OSError as error:
        raise OffsetError(f"cannot write {target}: {error.strerror or error}") from error


def mermaid(workflow: Workflow) -> str:
    """Mermaid flowchart of `workflow`: agents coloured by domain, conditional edges dashed."""
    # Ids of our own: in Mermaid "end" is a keyword and "--" an arrow.
    ids = {name: f"a{index}" for index, name in enumerate(workflow.agents)} | {START: START, END: END}
    lines = ["flowchart TD", f"    {START}([{START}])"]
    for name, agent in workflow.agents.items():
        detail = f"<br/><small>{_quoted(agent.domain)}</small>" if agent.domain else ""
        lines.append(f'    {ids[name]}["{name}{detail}"]')
    lines.append(f"    {END}([{END}])")
    for (source, target), labels in _arcs(workflow).items():
        arrow = f'-. "{_quoted(", ".join(labels))}" .->' if labels else "-->"
        lines.append(f"    {ids[source]} {arrow} {ids[target]}")
    for index, (domain, (fill, line)) in enumerate(_domain_colours(workflow).items()):
        members = [ids[name] for name, agent in workflow.agents.items() if agent.domain == domain]
        lines.append(f"    classDef domain{index} fill:{fill},stroke:{line},color:{_INK}")
        lines.append(f"    class {','.join(members)} domain{index}")
    return "\n".join(lines) + "\n"


def draw(workflow: Workflow) -> Figure:
    """Draw `workflow` in layers from START to END: agents coloured by domain, conditional edges dashed."""
    picture = _Picture(workflow)
    picture.add_arcs()
    picture.add_nodes()
    return picture.finished()


class _Picture:
    """A matplotlib figure whose data unit is one inch, y growing upwards."""

    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow
        self._labels = {arc: ", ".join(labels) for arc, labels in _arcs(workflow).items()}
        self._nodes = [START, *workflow.agents, END]
        self._widths = {node: _width(node, workflow) for node in self._nodes}
        loops = {source for source, target in self._labels if source == target}
        self._layering = layer(
            self._nodes,
            # Where two edges close a cycle, the one that is always taken leads down.
            sorted(self._labels, key=lambda arc: bool(self._labels[arc])),
            widths={node: width + (2 * _LOOP if node in loops else 0) for node, width in self._widths.items()},
            bend_widths={arc: _LABEL_CHARACTER * len(label) for arc, label in self._labels.items()},
            gap=_GAP,
        )
        self._ports = self._spread_ports()
        self._colours = _domain_colours(workflow)
        # A Figure of its own, not pyplot's: nothing global, no display.
        self._figure = Figure()
        self._axes: Axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set_axis_off()

    def add_nodes(self) -> None:
        for node in self._nodes:
            agent = self._workflow.agents.get(node)
            if agent is None:
                self._box(node, ("white", _ARROW), rounding=_END_HEIGHT / 2)
                self._text(*self._centre(node), node, size=9, color=_INK)
                continue
            fill, line = self._colours[agent.domain]
            self._box(node, (fill, line), rounding=0.1)
            x, y = self._centre(node)
            self._text(x, y + (0.09 if agent.domain else 0.0), node, size=10.5, color=_INK, weight="bold")
            if agent.domain:
                self._text(x, y - 0.13, agent.domain, size=8, color=line)

    def add_arcs(self) -> None:
        for arc, label in self._labels.items():
            points = self._loop(arc[0]) if arc[0] == arc[1] else self._way(arc)
            codes = [Path.MOVETO, *[Path.CURVE4] * (len(points) - 1)]
            arrow = FancyArrowPatch(
                path=Path(points, codes),
                arrowstyle="-|>",
                mutation_scale=11,
                shrinkA=0,
                shrinkB=0,
                linewidth=1.2,
                linestyle=_DASHED if label else "solid",
                color=_ARROW,
                zorder=1,
            )
            self._axes.add_patch(arrow)
            if label:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
                x, y = self._label_place(arc, points)
                self._text(x, y, label, size=7.5, color=_ARROW, style="italic", bbox=box, zorder=2)

    def finished(self) -> Figure:
        """Set the size, and write the title and the legend."""
        handles: list[Artist] = [
            Patch(facecolor=fill, edgecolor=line, label=domain or "plain base")
            for domain, (fill, line) in self._colours.items()
        ]
        if any(self._labels.values()):
            handles.append(Line2D([], [], color=_ARROW, linewidth=1.2, linestyle=_DASHED, label="conditional"))
        edges = [x + side * self._widths[node] / 2 for node, (x, _) in self._layering.nodes.items() for side in (-1, 1)]
        edges += [x for points in self._layering.bends.values() for x, _ in points]
        title = self._workflow.name
        middle = (min(edges) + max(edges)) / 2
        half = max((max(edges) - min(edges)) / 2, 2.1, 0.07 * len(title)) + _MARGIN + _LOOP / 2
        columns = min(int(2 * half / _LEGEND_COLUMN), len(handles))
        rows = -(-len(handles) // columns)
        top = _BOX_HEIGHT / 2 + 0.75
        low = self._centre(END)[1] - _END_HEIGHT / 2 - 0.3 - 0.2 * rows
        self._axes.set_xlim(middle - half, middle + half)
        self._axes.set_ylim(low, top)
        self._figure.set_size_inches(2 * half, top - low)
        self._text(middle, top - 0.26, title, size=13, color=_INK, weight="bold")
        self._text(middle, top - 0.5, f"base model: {self._workflow.model.base}", size=8.5, color=_ARROW)
        style: dict[str, Any] = {
            "loc": "lower center",
            "ncols": columns,
            "frameon": False,
            "fontsize": 8,
            "handlelength": 1.8,
        }
        self._axes.legend(handles=handles, borderaxespad=0.6, **style)
        return self._figure

    def _centre(self, node: str) -> tuple[float, float]:
        x, depth = self._layering.nodes[node]
        return x, -depth * _LAYER_HEIGHT

    def _height(self, node: str) -> float:
        return _BOX_HEIGHT if node in self._workflow.agents else _END_HEIGHT

    def _spread_ports(self) -> dict[tuple[str, str, Arc], float]:
        """Where each arc meets the side ("top" or "bottom") of a node: beside the others, in the order they come."""
        sides: dict[tuple[str, str], list[tuple[float, bool, Arc]]] = {}
        for arc, bends in self._layering.bends.items():
            source, target = arc
            up = arc in self._layering.backward
            path = [self._layering.nodes[source][0], *(x for x, _ in bends), self._layering.nodes[target][0]]
            sides.setdefault((source, "top" if up else "bottom"), []).append((path[1], up, arc))
            sides.setdefault((target, "bottom" if up else "top"), []).append((path[-2], up, arc))
        ports = {}
        for (node, side), comers in sides.items():
            step = min(0.3, 0.7 * self._widths[node] / max(len(comers) - 1, 1))
            for i, (_, _, arc) in enumerate(sorted(comers)):
                ports[node, side, arc] = self._layering.nodes[node][0] + step * (i - (len(comers) - 1) / 2)
        return ports

    def _way(self, arc: Arc) -> list[tuple[float, float]]:
        """Control points from box to box: cubics that are upright where they pass a layer."""
        sign = 1 if arc in self._layering.backward else -1
        leaves, meets = ("top", "bottom") if sign == 1 else ("bottom", "top")
        source, target = arc
        stops = [(self._ports[source, leaves, arc], self._centre(source)[1] + sign * self._height(source) / 2)]
        for x, depth in self._layering.bends[arc]:
            y = -depth * _LAYER_HEIGHT
            stops += [(x, y - sign * _BOX_HEIGHT / 2), (x, y + sign * _BOX_HEIGHT / 2)]
        stops.append((self._ports[target, meets, arc], self._centre(target)[1] - sign * self._height(target) / 2))
        points = [stops[0]]
        for (ax, ay), (bx, by) in pairwise(stops):
            points += [(ax, (ay + by) / 2), (bx, (ay + by) / 2), (bx, by)]
        return points

    def _loop(self, node: str) -> list[tuple[float, float]]:
        x, y = self._centre(node)
        edge = x + self._widths[node] / 2
        return [(edge, y - 0.12), (edge + _LOOP, y - 0.3), (edge + _LOOP, y + 0.3), (edge, y + 0.12)]

    def _label_place(self, arc: Arc, points: Sequence[tuple[float, float]]) -> tuple[float, float]:
        bends = self._layering.bends.get(arc)
        if bends:
            return bends[0][0], -bends[0][1] * _LAYER_HEIGHT
        # Labels of two opposite ways between the same boxes lie at different heights.
        return _bezier(points[:4], 0.5 if arc[0] == arc[1] else 0.4)

    def _box(self, node: str, colours: tuple[str, str], rounding: float) -> None:
        (x, y), width, height = self._centre(node), self._widths[node], self._height(node)
        style = f"round,pad=0,rounding_size={rounding}"
        corner = (x - width / 2, y - height / 2)
        fill, line = colours
        self._axes.add_patch(
            FancyBboxPatch(
                corner, width, height, boxstyle=style, facecolor=fill, edgecolor=line, linewidth=1.3, zorder=3
            )
        )

    def _text(self, x: float, y: float, text: str, **style: Any) -> None:
        self._axes.text(x, y, text, ha="center", va="center", parse_math=False, **{"zorder": 4, **style})


def _arcs(workflow: Workflow) -> dict[Arc, list[str]]:
    """The labels of each way through the workflow; none where it is always taken."""
    found: dict[Arc, list[str]] = {}
    for source, target, label in workflow.routes():
        labels = found.setdefault((source, target), [])
        if label is not None and label not in labels:
            labels.append(label)
    return found


def _domain_colours(workflow: Workflow) -> dict[str | None, tuple[str, str]]:
    domains = list(dict.fromkeys(agent.domain for agent in workflow.agents.values()))
    named = [domain for domain in domains if domain is not None]
    colours: dict[str | None, tuple[str, str]] = {d: _COLOURS[i % len(_COLOURS)] for i, d in enumerate(named)}
    if None in domains:
        colours[None] = _PLAIN
    return colours


def _width(node: str, workflow: Workflow) -> float:
    agent = workflow.agents.get(node)
    if agent is None:
        return 0.8
    return max(1.1, 0.095 * len(node) + 0.4, 0.07 * len(agent.domain or "") + 0.4)


def _bezier(points: Sequence[tuple[float, float]], at: float) -> tuple[float, float]:
    """The point of a cubic Bézier curve at parameter `at`."""
    weights = ((1 - at) ** 3, 3 * (1 - at) ** 2 * at, 3 * (1 - at) * at**2, at**3)
    x = sum(weight * point[0] for weight, point in zip(weights, points, strict=True))
    return x, sum(weight * point[1] for weight, point in zip(weights, points, strict=True))


def _quoted(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
