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
_UNDECIDED = "undecided: the goal lies within the 95 % interval of the value; measure more pairs"
# Columns whose words go below each other, so that the table fits 80 columns.
_NARROW = {"verdict": 9, "A / A": 5}


def tables(report: BenchReport) -> Group:
    """Return what was measured, and what was left out with its reason, to be printed with rich."""
    parts: list[RenderableType] = []
    if report.ratios:
        parts.append(_ratio_table(report))
    what = {case.name: case.what for case in report.cases}
    for ratio in report.ratios:
        parts.append(_line(ratio.name, "; ".join(filter(None, [what[ratio.name], _sides(ratio), ratio.note]))))
        if ratio.breach:
            parts.append(_line(ratio.name, f"failed: {ratio.breach}", "red"))
    if any(ratio.noise for ratio in report.ratios):
        parts.append(Text(_NOISE, style="yellow"))
    if any(_undecided(ratio) and not ratio.noise for ratio in report.ratios):
        parts.append(Text(_UNDECIDED, style="dim"))
    for item in report.left_out:
        word, style = ("failed", "red") if item.failed else ("left out", "dim")
        parts.append(_line(item.name, f"{word}: {item.reason}", style))
    return Group(*parts)


def _line(name: str, text: str, style: str = "dim") -> Text:
    return Text.assemble((name, "bold"), ": ", (text, style))


def _ratio_table(report: BenchReport) -> Table:
    # Without vertical lines it fits a terminal of 80 columns, as the tables of an evaluation do.
    title = f"{report.model} on {report.backend}: medians of A / B in paired rounds"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("name", style="bold", overflow="fold")
    for heading in ("value", "95 %", "goal", "verdict", "A / A", "pairs"):
        narrow = _NARROW.get(heading)
        table.add_column(heading, justify="right", no_wrap=narrow is None, max_width=narrow)
    for ratio in report.ratios:
        interval = "…".join(_number(bound) for bound in ratio.interval)
        cells = (_value(ratio), interval, _goal(ratio), _verdict(ratio), _control(ratio), str(ratio.pairs))
        table.add_row(ratio.name, *cells)
    return table


def _value(ratio: Ratio) -> Text:
    return Text(_number(ratio.value), style="yellow" if ratio.noise else _style(ratio) if ratio.decided else "")


def _goal(ratio: Ratio) -> Text:
    if ratio.goal is None:
        return Text(_DASH, style="dim")
    return Text(f"{'≥' if ratio.higher_is_better else '≤'} {ratio.goal:g}")


def _verdict(ratio: Ratio) -> Text:
    if ratio.goal is None:
        return Text(_DASH, style="dim")
    word = "met" if ratio.within_goal else "missed"
    return Text(f"{word}, undecided", style="dim") if _undecided(ratio) else Text(word, style=_style(ratio))


def _undecided(ratio: Ratio) -> bool:
    return ratio.goal is not None and not ratio.decided


def _style(ratio: Ratio) -> str:
    return "green" if ratio.within_goal else "red"


def _control(ratio: Ratio) -> Text:
    mark = " noise" if ratio.noise else ""
    return Text(f"{ratio.a_a:.3f}{mark}", style="yellow" if ratio.noise else "")


def _sides(ratio: Ratio) -> str:
    a, b = quantity(ratio.a, ratio.unit), quantity(ratio.b, ratio.unit)
    number, unit = a.split()
    # A unit that both have is said once.
    return f"{number if unit == b.split()[1] else a} / {b}"


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
