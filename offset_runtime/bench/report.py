"""The benchmark for the eye: a table for the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offset_runtime.bench.pairs import QUIET, Ratio, Unit
from offset_runtime.bench.runner import BenchReport

_DASH = "–"
_NOISE = (
    f"noise: A / A lies outside {QUIET[0]}…{QUIET[1]}, so the machine was too busy for the value to count; "
    "measure again"
)


def tables(report: BenchReport) -> Group:
    """Return what was measured, and what was left out with its reason, to be printed with rich."""
    parts: list[RenderableType] = []
    if report.ratios:
        parts.append(_ratio_table(report))
    what = {case.name: case.what for case in report.cases}
    for ratio in report.ratios:
        parts.append(_line(ratio.name, "; ".join(filter(None, [what[ratio.name], ratio.note]))))
    if any(ratio.noise for ratio in report.ratios):
        parts.append(Text(_NOISE, style="yellow"))
    for item in report.left_out:
        parts.append(_line(item.name, f"left out: {item.reason}"))
    return Group(*parts)


def _line(name: str, text: str) -> Text:
    return Text.assemble((name, "bold"), ": ", (text, "dim"))


def _ratio_table(report: BenchReport) -> Table:
    # Without vertical lines it fits a terminal of 80 columns, as the tables of an evaluation do.
    title = f"{report.model} on {report.backend}: medians of A / B in paired rounds"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("name", style="bold", overflow="fold")
    for heading in ("value", "goal", "A / A", "pairs", "A, B"):
        table.add_column(heading, justify="right", no_wrap=True)
    for ratio in report.ratios:
        cells = (_value(ratio), _goal(ratio), _control(ratio), str(ratio.pairs), _sides(ratio))
        table.add_row(ratio.name, *cells)
    return table


def _value(ratio: Ratio) -> Text:
    style = {True: "green", False: "red", None: ""}[ratio.within_goal]
    return Text(_number(ratio.value), style="yellow" if ratio.noise else style)


def _goal(ratio: Ratio) -> Text:
    if ratio.goal is None:
        return Text(_DASH, style="dim")
    sign = "≥" if ratio.higher_is_better else "≤"
    word = "met" if ratio.within_goal else "missed"
    style = "yellow" if ratio.noise else "green" if ratio.within_goal else "red"
    return Text(f"{sign} {ratio.goal:g} {word}", style=style)


def _control(ratio: Ratio) -> Text:
    mark = " noise" if ratio.noise else ""
    return Text(f"{ratio.a_a:.3f}{mark}", style="yellow" if ratio.noise else "")


def _sides(ratio: Ratio) -> str:
    a, b = quantity(ratio.a, ratio.unit), quantity(ratio.b, ratio.unit)
    number, unit = a.split()
    # A unit that both have is said once.
    return f"{number if unit == b.split()[1] else a}, {b}"


def _number(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.2g}"


def quantity(value: float, unit: Unit) -> str:
    """Spell a quantity with a unit that suits its size, such as ``21.4 ms``."""
    if unit == "tokens_per_s":
        return f"{value:,.0f} tok/s" if value >= 1000 else f"{value:.3g} tok/s"
    if unit == "bytes":
        return f"{value / 1e6:.1f} MB"
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:.3g} {name}"
    return f"{value / 1e-6:.3g} µs"
