"""An evaluation for the eye: tables for the terminal, and a figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from offset_runtime.errors import InvalidRequestError
from offset_runtime.evaluation import DomainEvaluation, Evaluation, Gain, Interval, PositionCurve
from offset_runtime.retention import KL_BUDGET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

PLOT_SUFFIXES = (".png", ".svg")

# First and last position of the reply, counted from 1, that a column of the table by position covers.
POSITION_SPANS = ((1, 1), (2, 4), (5, 16), (17, 64), (65, 1 << 30))


def tables(evaluation: Evaluation) -> Group:
    """Return all tables of an evaluation, to be printed with rich."""
    return Group(domain_table(evaluation), matrix_table(evaluation), position_table(evaluation))


def domain_table(evaluation: Evaluation) -> Table:
    """Gain and retention of each domain's own offset."""
    table = _table("Gain and retention (perplexities without → with the offset)", "domain")
    for heading in ("docs", "perplexity", "gain %", "95 %", "KL", "reply perpl."):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, domain in evaluation.domains.items():
        table.add_row(name, str(domain.documents), *_domain_cells(domain))
    return table


def matrix_table(evaluation: Evaluation) -> Table:
    """Gain in percent of every offset on every domain's documents; a domain's own is underlined."""
    table = _table("Gain % by documents (rows) and offset (columns)", "documents")
    columns = list(dict.fromkeys(column for cells in evaluation.matrix.values() for column in cells))
    for column in columns:
        table.add_column(column, justify="right")
    for row, cells in evaluation.matrix.items():
        table.add_row(row, *(_gain_text(cells[column], own=row == column) for column in columns))
    return table


def position_table(evaluation: Evaluation) -> Table:
    """Mean cross-entropy without and with the own offset, by position of the reply."""
    table = _table("Cross-entropy (nats) by position in the reply, without → with", "domain")
    last = max(domain.by_position.positions[-1] + 1 for domain in evaluation.domains.values())
    spans = [(first, min(end, last)) for first, end in POSITION_SPANS if first <= last]
    for first, end in spans:
        table.add_column(str(first) if first == end else f"{first}–{end}", justify="right")
    for name, domain in evaluation.domains.items():
        table.add_row(name, *(_span_text(domain.by_position, first, end) for first, end in spans))
    return table


def _table(title: str, first: str) -> Table:
    # Without vertical lines the widest of them fits a terminal of 80 columns.
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, style="bold")
    return table


def _domain_cells(domain: DomainEvaluation) -> list[str | Text]:
    gain, retention = domain.gain, domain.retention
    perplexities = f"{gain.perplexity_without:.2f} → {gain.perplexity_with:.2f}"
    cells: list[str | Text] = [perplexities, _gain_text(gain), _interval_text(gain.interval)]
    kl = Text(f"{retention.kl:.3f}", style="green" if retention.kl <= KL_BUDGET else "red")
    return [*cells, kl, f"{retention.reply_perplexity_without:.2f} → {retention.reply_perplexity_with:.2f}"]


def _interval_text(interval: Interval | None) -> str:
    return "–" if interval is None else f"{interval[0]:+.1f}…{interval[1]:+.1f}"


def _gain_text(gain: Gain | None, *, own: bool = False) -> Text:
    if gain is None:
        return Text("–", style="dim")
    # From red at -20 % over yellow at 0 to green at +20 %.
    share = (min(max(gain.percent, -20.0), 20.0) + 20.0) / 40.0
    red, green = int(255 * min(1.0, 2 - 2 * share)), int(220 * min(1.0, 2 * share))
    return Text(f"{gain.percent:+.1f}", style=f"rgb({red},{green},60)" + (" underline" if own else ""))


def _span_text(curve: PositionCurve, first: int, end: int) -> str:
    inside = [i for i, position in enumerate(curve.positions) if first <= position + 1 <= end]
    if not inside:
        return "–"
    weights = [curve.documents[i] for i in inside]
    without = np.average([curve.without[i] for i in inside], weights=weights)
    with_offset = np.average([curve.with_offset[i] for i in inside], weights=weights)
    return f"{without:.2f} → {with_offset:.2f}"


def check_plot_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` if a plot can be written there; raise `InvalidRequestError` otherwise."""
    target = Path(path)
    if target.suffix.lower() not in PLOT_SUFFIXES:
        raise InvalidRequestError(
            f"cannot plot to {target}: found suffix {target.suffix!r}, expected {' or '.join(PLOT_SUFFIXES)}"
        )
    if not target.absolute().parent.is_dir():
        raise InvalidRequestError(f"cannot plot to {target}: there is no folder {target.parent}; make it first")
    return target


def plot(evaluation: Evaluation, path: str | os.PathLike[str]) -> Path:
    """Draw an evaluation and write it as PNG or SVG, by the suffix of `path`.

    Left: cross-entropy by position, one panel a domain. Right: the matrix of gains, and gain against
    retention. Raises `InvalidRequestError` for another suffix or a path that
    cannot be written.
    """
    import matplotlib

    target = check_plot_path(path)
    with matplotlib.rc_context(dict(_STYLE)):
        figure = draw(evaluation)
        try:
            figure.savefig(target, dpi=160, metadata={"Date": None} if target.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise InvalidRequestError(f"cannot write the plot {target}: {error.strerror}") from error
    return target


_INK, _FAINT, _GRID = "#222222", "#767676", "#e3e3e3"

_STYLE: Mapping[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "offset-runtime",
}

# Okabe and Ito's palette, told apart with every kind of colour vision; its yellow, too pale for a line, is brown.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C510A", "#444444")


def draw(evaluation: Evaluation) -> Figure:
    """Return the figure of an evaluation; see `plot`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    count = len(evaluation.domains)
    columns = 1 if count <= 3 else 2
    rows = -(-count // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(7.2 + 2.6 * columns, max(6.0, 2.1 * rows)), layout=layout)
    halves = figure.add_gridspec(1, 2, width_ratios=[1.15 * columns, 1.35], wspace=0.06)
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(evaluation.domains)}
    grid = halves[0, 0].subgridspec(rows, columns)
    first: Axes | None = None
    for i, (name, domain) in enumerate(evaluation.domains.items()):
        panel = figure.add_subplot(grid[i // columns, i % columns], sharex=first, sharey=first)
        _draw_curve(panel, name, domain, colours[name])
        _label_outer(panel, bottom=i + columns >= count, left=i % columns == 0)
        if first is None:
            first = panel
            _label_curves(panel)
    _draw_right(figure, halves[0, 1], evaluation, colours)
    return figure


def _draw_right(figure: Figure, where: SubplotSpec, evaluation: Evaluation, colours: Mapping[str, str]) -> None:
    points = [(n, d.retention.kl, d.gain) for n, d in evaluation.domains.items()]
    # A row of the matrix is about as high as one line of the curves' panels, within limits.
    share = min(1.5, 0.2 + 0.22 * len(evaluation.matrix))
    halves = where.subgridspec(2, 1, height_ratios=[share, 1])
    _draw_matrix(figure.add_subplot(halves[0]), evaluation)
    _draw_tradeoff(figure.add_subplot(halves[1]), points, colours)


def _draw_curve(axes: Axes, name: str, domain: DomainEvaluation, colour: str) -> None:
    where, without, with_offset = _binned(domain.by_position)
    axes.fill_between(where, with_offset, without, color=colour, alpha=0.18, linewidth=0)
    axes.plot(where, without, color=_FAINT, linewidth=1.0)
    axes.plot(where, with_offset, color=colour, linewidth=2.2)
    axes.set_xscale("log", base=2)
    ticks = [2**k for k in range(12) if where[0] <= 2**k <= domain.by_position.positions[-1] + 1]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    interval = domain.gain.interval
    spread = f"  [{_number(interval[0])}, {_number(interval[1])}]" if interval else ""
    axes.set_title(f"{name}: gain {_number(domain.gain.percent)} %{spread}", color=colour)


def _binned(curve: PositionCurve) -> tuple[list[float], list[float], list[float]]:
    """Means over spans of positions that grow by half: single positions are noisy where they matter least."""
    where, without, with_offset = [], [], []
    first, last = curve.positions[0] + 1, curve.positions[-1] + 1
    while first <= last:
        end = max(first, int(first * 1.5) - 1)
        if last - end < (end - first + 1) / 2:
            end = last
        inside = [i for i, position in enumerate(curve.positions) if first <= position + 1 <= end]
        weights = [curve.documents[i] for i in inside]
        where.append(float(np.sqrt(first * min(end, last))))
        without.append(float(np.average([curve.without[i] for i in inside], weights=weights)))
        with_offset.append(float(np.average([curve.with_offset[i] for i in inside], weights=weights)))
        first = end + 1
    return where, without, with_offset


def _label_outer(axes: Axes, *, bottom: bool, left: bool) -> None:
    axes.tick_params(labelbottom=bottom, labelleft=left)
    axes.set_xlabel("position in the reply (log scale)" if bottom else "")
    axes.set_ylabel("cross-entropy, nats" if left else "")


def _label_curves(axes: Axes) -> None:
    labels = ["base model", "with its offset"]
    axes.legend(axes.lines[:2], labels, frameon=False, fontsize=8.5, loc="best", borderaxespad=0.2)


def _draw_matrix(axes: Axes, evaluation: Evaluation) -> None:
    rows = list(evaluation.matrix)
    columns = list(dict.fromkeys(column for cells in evaluation.matrix.values() for column in cells))
    gains = [[evaluation.matrix[row].get(column) for column in columns] for row in rows]
    values = np.array([[np.nan if gain is None else gain.percent for gain in cells] for cells in gains])
    limit = max(20.0, float(np.nanmax(np.abs(values), initial=0.0)))
    axes.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    axes.set_facecolor(_GRID)
    size = 9.5 if len(columns) <= 6 else 7.5
    for (i, j), value in np.ndenumerate(values):
        text = "n/a" if np.isnan(value) else _number(value, "+.1f")
        colour = "white" if abs(value) > 0.55 * limit else _INK
        weight = "bold" if rows[i] == columns[j] else "normal"
        axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=size, fontweight=weight)
    axes.set_xticks(range(len(columns)), columns, rotation=0 if len(columns) <= 5 else 35)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("offset")
    axes.set_ylabel("documents")
    axes.set_title("Gain in perplexity, % (bold: own offset)")


def _number(value: float, form: str = ".1f") -> str:
    return format(value, form).replace("-", "−")


def _draw_tradeoff(axes: Axes, points: Sequence[tuple[str, float, Gain]], colours: Mapping[str, str]) -> None:
    widest = max(1.3 * max(kl for _, kl, _ in points), 1.3 * KL_BUDGET)
    axes.axvspan(0, KL_BUDGET, color="#009E73", alpha=0.07, linewidth=0)
    axes.axvline(KL_BUDGET, color=_FAINT, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.axhline(0, color=_FAINT, linewidth=0.8)
    for name, kl, gain in points:
        if gain.interval:
            axes.plot([kl, kl], gain.interval, color=colours[name], linewidth=1.4, alpha=0.6)
        axes.plot([kl], [gain.percent], "o", color=colours[name], markersize=7)
    axes.set_xlim(0, widest)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.12 * (top - bottom))
    for name, x, y, side in _apart(points, widest, 0.07 * (top - bottom)):
        align = "left" if side > 0 else "right"
        axes.annotate(
            name, (x, y), (7 * side, 0), textcoords="offset points", ha=align, va="center", color=colours[name]
        )
    budget = axes.get_xaxis_transform()
    axes.text(KL_BUDGET, 0.98, f" budget {KL_BUDGET:g}", transform=budget, va="top", fontsize=8.5, color=_FAINT)
    axes.set_xlabel("retention: KL to the base, nats")
    axes.set_ylabel("gain, %")
    axes.set_title("Gain against retention (bars: 95 % interval)")


def _apart(
    points: Sequence[tuple[str, float, Gain]], widest: float, height: float
) -> list[tuple[str, float, float, int]]:
    """Where each point's name goes: (name, x, y, 1 for right of the point or -1 for left).

    A name must not cross the line of the budget, and moves down where it would lie on another name.
    """
    reach = 0.13 * widest
    placed: list[tuple[str, float, float, int]] = []
    for name, kl, gain in sorted(points, key=lambda point: -point[2].percent):
        side = -1 if 0.7 * KL_BUDGET < kl <= KL_BUDGET else 1
        near = [y for _, x, y, other in placed if abs(x + other * reach - kl - side * reach) < 2 * reach]
        placed.append((name, kl, min([gain.percent, *(y - height for y in near)]), side))
    return placed
