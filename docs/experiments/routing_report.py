"""Tables and confusion matrices of what `routing.py` measured.

    python docs/experiments/routing_report.py routing.jsonl --plot routing.png

The matrices are those for texts of `--tokens` tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROUTER = "router"
WAYS = {
    ROUTER: "likelihood router",
    "names": "base, asked by name",
    "names, calibrated": "the same, calibrated",
    "words": "base, asked in words",
    "words, calibrated": "the same, calibrated",
}
MARGINS = (0.0, 0.02, 0.05, 0.1, 0.2)


def given_to(row: Row, way: str) -> str:
    """The domain that has the highest score."""
    return max(row[way], key=lambda name: float(row[way][name]))


def lead(row: Row) -> float:
    """By how many nats a token the router's best domain leads the next."""
    first, second = sorted(row[ROUTER].values(), reverse=True)[:2]
    return float(first - second)


def share_right(rows: Sequence[Row], way: str) -> float:
    return sum(given_to(row, way) == row["domain"] for row in rows) / len(rows)


def confusion(rows: Sequence[Row], way: str) -> list[list[int]]:
    """How many texts of each domain (rows) were given to each (columns), in the order of the results."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    return [
        [sum(row["domain"] == domain and given_to(row, way) == other for row in rows) for other in domains]
        for domain in domains
    ]


def of_length(rows: Sequence[Row], tokens: int) -> list[Row]:
    return [row for row in rows if row["tokens"] == tokens]


def tables(rows: Sequence[Row]) -> Iterator[str]:
    lengths = sorted({row["tokens"] for row in rows})
    yield "| tokens | texts | " + " | ".join(WAYS.values()) + " |"
    yield "| --- " * (2 + len(WAYS)) + "|"
    for tokens in lengths:
        ours = of_length(rows, tokens)
        cells = [f"{100 * share_right(ours, way):.0f} %" for way in WAYS]
        yield f"| {tokens} | {len(ours)} | " + " | ".join(cells) + " |"
    yield ""
    yield "| margin | " + " | ".join(f"{tokens} tokens: routed | right of those" for tokens in lengths) + " |"
    yield "| --- " * (1 + 2 * len(lengths)) + "|"
    for margin in MARGINS:
        cells = []
        for tokens in lengths:
            ours = of_length(rows, tokens)
            kept = [row for row in ours if lead(row) >= margin]
            right = f"{100 * share_right(kept, ROUTER):.0f} %" if kept else "-"
            cells.append(f"{100 * len(kept) / len(ours):.0f} % | {right}")
        yield f"| {margin} | " + " | ".join(cells) + " |"


def plot(rows: Sequence[Row], target: Path) -> None:
    import matplotlib.pyplot as plt

    domains = list(dict.fromkeys(row["domain"] for row in rows))
    figure, panels = plt.subplots(1, len(WAYS), figsize=(2.9 * len(WAYS), 3.4), layout="constrained", sharey=True)
    for axes, (way, title) in zip(panels, WAYS.items(), strict=True):
        counts = confusion(rows, way)
        most = max(map(sum, counts))
        axes.imshow(counts, cmap="Blues", vmin=0, vmax=most)
        for y, line in enumerate(counts):
            for x, count in enumerate(line):
                axes.text(x, y, count, ha="center", va="center", color="white" if count > most / 2 else "black")
        axes.set_xticks(range(len(domains)), domains, rotation=40, ha="right")
        axes.set_yticks(range(len(domains)), domains)
        axes.set_title(f"{title}\n{100 * share_right(rows, way):.0f} % right", fontsize=10)
        axes.set_xlabel("given to")
        axes.tick_params(length=0)
    panels[0].set_ylabel("text of")
    figure.savefig(target, dpi=110, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.results.read_text().splitlines()]
    print("\n".join(tables(rows)))
    if given.plot:
        plot(of_length(rows, given.tokens), given.plot)


if __name__ == "__main__":
    main()
