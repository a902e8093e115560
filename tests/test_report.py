"""The tables say what was measured, and the figure shows it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console, RenderableType

from offset_runtime.errors import InvalidRequestError
from offset_runtime.evaluation import DomainEvaluation, Evaluation, Gain, PositionCurve
from offset_runtime.report import check_plot_path, domain_table, draw, matrix_table, plot, position_table, tables
from offset_runtime.retention import Retention


def gain(percent: float, width: float = 2.0) -> Gain:
    return Gain(40.0, 40.0 * (1 - percent / 100), (percent - width, percent + width))


def domain(percent: float, *, kl: float = 0.02, tokens: int = 64, first: int = 0) -> DomainEvaluation:
    positions = tuple(range(first, tokens))
    without = tuple(3.0 + 2.0 * np.exp(-position / 4) for position in positions)
    return DomainEvaluation(
        gain=gain(percent),
        retention=Retention(kl, 2.04, 2.11),
        by_position=PositionCurve(positions, without, tuple(0.9 * loss for loss in without), (20,) * len(positions)),
        documents=20,
        tokens=20 * tokens,
        left_out={},
    )


def evaluation(*names: str, spare: str | None = None, kl: float = 0.02) -> Evaluation:
    columns = [*names, spare] if spare else list(names)
    matrix = {row: {column: gain(15.0 if row == column else -4.0) for column in columns} for row in names}
    return Evaluation({name: domain(15.0, kl=kl) for name in names}, matrix)


def text(renderable: RenderableType, *, colour: bool = False) -> str:
    console = Console(width=120, force_terminal=colour, color_system="truecolor" if colour else None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_the_domain_table_shows_gain_interval_and_retention_together() -> None:
    shown = text(domain_table(evaluation("legal")))
    for figure in ("legal", "20", "40.00 → 34.00", "+15.0", "+13.0…+17.0", "0.020", "2.04 → 2.11"):
        assert figure in shown


def test_the_domain_table_fits_80_columns() -> None:
    names = ("computing", "code")
    found = evaluation(*names)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(domain_table(found))
    shown = capture.get()
    for figure in (*names, "40.00 → 34.00", "+13.0…+17.0", "2.04 → 2.11", "reply perpl."):
        assert figure in shown


def test_what_was_not_measured_is_a_dash() -> None:
    found = Evaluation({"legal": domain(15.0)}, {"legal": {"legal": Gain(40.0, 34.0, None), "code": None}})
    assert "–" in text(matrix_table(found))


def test_retention_beyond_the_budget_is_red() -> None:
    red, green = "\x1b[31m", "\x1b[32m"
    over = text(domain_table(evaluation("legal", kl=0.07)), colour=True)
    within = text(domain_table(evaluation("legal", kl=0.02)), colour=True)
    assert red in over
    assert green not in over
    assert green in within
    assert red not in within


def test_the_matrix_has_a_row_a_domain_and_a_column_an_offset() -> None:
    lines = text(matrix_table(evaluation("legal", "code", spare="news"))).splitlines()
    rows = [line.split() for line in lines]
    assert [row for row in rows if len(row) == 4] == [
        ["documents", "legal", "code", "news"],
        ["legal", "+15.0", "-4.0", "-4.0"],
        ["code", "-4.0", "+15.0", "-4.0"],
    ]


def test_the_matrix_is_coloured_from_red_to_green() -> None:
    shown = text(matrix_table(evaluation("legal", "code")), colour=True)
    colours = {tuple(map(int, found)) for found in re.findall(r"38;2;(\d+);(\d+);\d+m", shown)}
    (red, green), (other_red, other_green) = sorted(colours)
    assert green > red
    assert other_red > other_green


def test_the_table_by_position_covers_only_positions_that_exist() -> None:
    found = Evaluation({"legal": domain(15.0, tokens=10)}, {"legal": {"legal": gain(15.0)}})
    shown = text(position_table(found))
    assert "5–10" in shown
    assert "17" not in shown
    assert "5.00 → 4.50" in shown


def test_means_over_positions_weigh_by_documents() -> None:
    curve = PositionCurve((0, 1, 2, 3), (9.0, 1.0, 2.0, 6.0), (9.0, 1.0, 1.0, 1.0), (8, 6, 1, 1))
    one = DomainEvaluation(gain(15.0), None, curve, 8, 16, {})
    assert "1.75 → 1.00" in text(position_table(Evaluation({"x": one}, {"x": {"x": gain(15.0)}})))


def test_all_tables_are_printed_together() -> None:
    shown = text(tables(evaluation("legal", "code")))
    for title in ("Gain and retention", "Gain % by documents", "by position in the reply"):
        assert title in shown


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_the_figure_has_a_panel_a_domain_the_matrix_and_the_tradeoff(count: int) -> None:
    names = [f"domain-{i}" for i in range(count)]
    figure = draw(evaluation(*names, spare="spare"))
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes]
    assert [title.split(":")[0] for title in titles[:count]] == names
    assert len(titles) == count + 2
    shown = {label.get_text() for label in figure.axes[count].texts}
    assert "+15.0" in shown
    assert "−4.0" in shown
    assert any("budget 0.05" in label.get_text() for label in figure.axes[-1].texts)


def test_the_figure_marks_cells_that_cannot_be_measured() -> None:
    found = Evaluation({"legal": domain(15.0)}, {"legal": {"legal": gain(15.0), "code": None}})
    assert [label.get_text() for label in draw(found).axes[1].texts] == ["+15.0", "n/a"]


def test_a_figure_of_very_short_replies_is_drawn() -> None:
    found = Evaluation({"x": domain(15.0, tokens=5, first=1)}, {"x": {"x": gain(15.0)}})
    assert len(draw(found).axes[0].lines[0].get_xdata()) >= 2


def test_png_is_written_at_a_readable_size(tmp_path: Path) -> None:
    target = plot(evaluation("legal", "code"), tmp_path / "gain.png")
    height, width, _ = imread(target).shape
    assert width > 1200
    assert height > 700


def test_svg_is_written_and_the_same_twice(tmp_path: Path) -> None:
    first = plot(evaluation("legal"), tmp_path / "a.SVG").read_bytes()
    second = plot(evaluation("legal"), tmp_path / "b.svg").read_bytes()
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert first == second


@pytest.mark.parametrize("name", ["gain.pdf", "gain", "gain.png.txt"])
def test_another_suffix_is_an_error_that_names_the_two(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"found suffix '.*', expected \.png or \.svg"):
        check_plot_path(tmp_path / name)


def test_a_missing_folder_is_an_error_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="there is no folder"):
        check_plot_path(tmp_path / "nowhere" / "gain.png")


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "gain.png").mkdir()
    with pytest.raises(InvalidRequestError, match="cannot write the plot"):
        plot(evaluation("legal"), tmp_path / "gain.png")


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot(evaluation("legal"), tmp_path / "gain.png")
    assert dict(matplotlib.rcParams) == before
