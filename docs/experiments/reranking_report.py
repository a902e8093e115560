"""A table of what `reranking.py` measured.

    python docs/experiments/reranking_report.py reranking.jsonl

Mean reciprocal rank and the share of queries whose document came first, and how much the own offset adds to the
former, with the middle 95 % of what resampled queries give.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
UNDER = ("base", "own", "other")
_RESAMPLES = 10_000


def mean_reciprocal_rank(rows: Sequence[Row], under: str) -> float:
    return statistics.mean(1 / row["ranks"][under] for row in rows)


def first(rows: Sequence[Row], under: str) -> float:
    """The share of queries whose document came first."""
    return statistics.mean(row["ranks"][under] == 1 for row in rows)


def chance(rows: Sequence[Row]) -> float:
    """The mean reciprocal rank of documents in any order."""
    return statistics.mean(sum(1 / rank for rank in range(1, row["documents"] + 1)) / row["documents"] for row in rows)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Where the mean lies in the middle 95 % of resamples of the queries."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(differences, k=len(differences))) for _ in range(_RESAMPLES))
    return means[round(0.025 * _RESAMPLES)], means[round(0.975 * _RESAMPLES) - 1]


def line(name: str, rows: Sequence[Row]) -> str:
    ranks = " | ".join(f"{mean_reciprocal_rank(rows, under):.3f}" for under in UNDER)
    firsts = " | ".join(f"{100 * first(rows, under):.0f} %" for under in UNDER)
    gains = []
    for other in ("base", "other"):
        differences = [1 / row["ranks"]["own"] - 1 / row["ranks"][other] for row in rows]
        low, high = interval(differences)
        gains.append(f"{statistics.mean(differences):+.3f} [{low:+.3f}, {high:+.3f}]")
    return f"| {name} | {len(rows)} | {chance(rows):.3f} | {ranks} | {firsts} | {' | '.join(gains)} |"


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "| domain | queries | chance | MRR base | own | other | first base | own | other | "
        "MRR own - base [95 %] | own - other [95 %] |"
    )
    yield "| --- " * 11 + "|"
    for domain in dict.fromkeys(row["domain"] for row in rows):
        yield line(domain, [row for row in rows if row["domain"] == domain])
    yield line("all", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    print("\n".join(table([json.loads(each) for each in given.results.read_text().splitlines()])))


if __name__ == "__main__":
    main()
