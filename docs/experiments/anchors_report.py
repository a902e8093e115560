"""Tables and a picture of what `anchors.py` measured.

    python docs/experiments/anchors_report.py results.jsonl --plot anchors.png

Every figure is a mean over the domains; the spread is that of the means of the seeds, where there are several.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ANCHORS = ("turn", "sequence")
HISTORIES = {
    "none-0": "none",
    "own-64": "64 own",
    "off-64": "64 other",
    "own-256": "256 own",
    "off-256": "256 other",
}


def complete(rows: list[Row]) -> list[Row]:
    """Rows of (anchor, positions, seed) that every domain has, so that means can be compared."""
    domains = {row["domain"] for row in rows}
    groups: dict[tuple[str, int, int], set[str]] = {}
    for row in rows:
        groups.setdefault((row["anchor"], row["positions"], row["seed"]), set()).add(row["domain"])
    return [row for row in rows if groups[row["anchor"], row["positions"], row["seed"]] == domains]


def by_seed(rows: list[Row], value: Callable[[Row], float | None]) -> list[float]:
    """The mean of `value` over the domains, for each seed that has it."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        values = [value(row) for row in rows if row["seed"] == seed]
        known = [number for number in values if number is not None]
        if known and len(known) == len(values):
            found.append(statistics.mean(known))
    return found


def shown(values: list[float], digits: int) -> str:
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def tables(rows: list[Row]) -> Iterator[str]:
    yield "| K | anchor | seeds | " + " | ".join(HISTORIES.values()) + " | KL |"
    yield "| --- " * (4 + len(HISTORIES)) + "|"
    for positions in sorted({row["positions"] for row in rows}):
        for anchor in ANCHORS:
            chosen = [row for row in rows if row["positions"] == positions and row["anchor"] == anchor]
            cells = [shown(by_seed(chosen, lambda row, key=key: row["gain"].get(key)), 1) for key in HISTORIES]
            seeds = len({row["seed"] for row in chosen})
            kl = shown(by_seed(chosen, lambda row: row["kl"]), 3)
            yield f"| {positions} | {anchor} | {seeds} | " + " | ".join(cells) + f" | {kl} |"
    yield ""
    yield "| offset of | anchor | own domain | other domains | KL |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        if row["on_other_domains"]:
            others = ", ".join(f"{name} {gain:.1f}" for name, gain in row["on_other_domains"].items())
            own = row["gain"]["none-0"]
            yield f"| {row['domain']} | {row['anchor']} | {own:.1f} | {others} | {row['kl']:.3f} |"


def plot(rows: list[Row], target: Path) -> None:
    import matplotlib.pyplot as plt

    colours = {"turn": "#0072B2", "sequence": "#D55E00"}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for anchor in ANCHORS:
        ours = [row for row in rows if row["anchor"] == anchor]
        counts = sorted({row["positions"] for row in ours})
        for key, style in (("none-0", "-"), ("off-64", "--")):
            means = [
                by_seed([r for r in ours if r["positions"] == k], lambda row, key=key: row["gain"].get(key))
                for k in counts
            ]
            label = f"{anchor}, {'no history' if key == 'none-0' else '64 tokens of another domain'}"
            middles = [statistics.mean(m) for m in means]
            low, high = ([abs(f(m) - x) for m, x in zip(means, middles, strict=True)] for f in (min, max))
            left.errorbar(
                counts,
                middles,
                (low, high),
                fmt=f"o{style}",
                markersize=4,
                color=colours[anchor],
                label=label,
                capsize=3,
            )
        deep = [row for row in ours if row["on_other_domains"]]
        for kind, style in (("own", "-"), ("off", "--")):
            keys = ["none-0", f"{kind}-64", f"{kind}-256"]
            values = [statistics.mean(row["gain"][key] for row in deep) for key in keys]
            label = f"{anchor}, history of {'its own' if kind == 'own' else 'another'} domain"
            middle.plot([0, 64, 256], values, f"o{style}", markersize=4, color=colours[anchor], label=label)
        right.scatter(
            [row["kl"] for row in ours],
            [row["gain"]["none-0"] for row in ours],
            [14 + 6 * row["positions"] for row in ours],
            color=colours[anchor],
            alpha=0.6,
            linewidths=0,
            label=f"{anchor} (larger: more positions)",
        )
    left.set(xscale="log", xticks=counts, xticklabels=counts, xlabel="positions K", ylabel="gain, %")
    left.set_title("More positions")
    middle.set(
        xticks=[0, 64, 256], xlabel="tokens of history", ylabel="gain, %", title="Behind a history (K = 8, one seed)"
    )
    right.set(
        xlabel="retention: KL to the base, nats", ylabel="gain without history, %", title="Gain against retention"
    )
    for axes in (left, middle, right):
        # Room for the legend above the lines.
        axes.set_ylim(0, 1.32 * axes.dataLim.ymax)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7.5, frameon=False, handlelength=3.5, loc="upper left")
    left.minorticks_off()
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    rows = complete([json.loads(line) for line in given.results.read_text().splitlines()])
    print("\n".join(tables(rows)))
    if given.plot:
        plot(rows, given.plot)


if __name__ == "__main__":
    main()
