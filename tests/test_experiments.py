"""The scripts behind the evaluation pages: they start, and the report adds up."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "docs" / "experiments"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def row(domain: str, anchor: str, seed: int, gain: float) -> dict[str, Any]:
    deep = seed == 0
    gains = {"none-0": gain, "own-64": gain / 2, "off-64": gain / 2}
    if deep:
        gains |= {"own-256": gain / 4, "off-256": gain / 4}
    others = {"speech" if domain == "news" else "news": 1.0} if deep else {}
    return {
        "domain": domain,
        "anchor": anchor,
        "positions": 8,
        "seed": seed,
        "gain": gains,
        "on_other_domains": others,
        "kl": 0.02,
    }


@pytest.mark.parametrize("script", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_each_script_says_how_it_is_used(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        loaded(script).main()
    assert end.value.code == 0
    assert f"python docs/experiments/{script}.py" in capsys.readouterr().out


def test_the_report_shows_means_over_domains_with_the_spread_of_seeds_and_leaves_out_what_is_incomplete(
    tmp_path: Path,
) -> None:
    report = loaded("anchors_report")
    rows = [row(d, a, s, 10 + 2 * s) for d in ("news", "speech") for a in ("turn", "sequence") for s in (0, 1)]
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(map(json.dumps, [*rows, row("news", "turn", 2, 99.0)])))

    complete = report.complete([json.loads(line) for line in results.read_text().splitlines()])
    lines = list(report.tables(complete))
    report.plot(complete, tmp_path / "anchors.png")

    assert len(complete) == len(rows)
    assert (
        "| 8 | turn | 2 | 11.0 [10.0, 12.0] | 5.5 [5.0, 6.0] | 5.5 [5.0, 6.0] | 2.5 | 2.5 | 0.020 [0.020, 0.020] |"
        in lines
    )
    assert (tmp_path / "anchors.png").read_bytes().startswith(b"\x89PNG")


def routed(domain: str, tokens: int, router: dict[str, float], asked: str) -> dict[str, Any]:
    ways = ("names", "names, calibrated", "words", "words, calibrated")
    answer = {name: -1.0 - (name != asked) for name in router}
    return {"domain": domain, "tokens": tokens, "router": router} | dict.fromkeys(ways, answer)


def test_the_report_of_routing_counts_who_was_given_what_and_how_clearly(tmp_path: Path) -> None:
    report = loaded("routing_report")
    rows = [
        routed("news", 32, {"news": 0.5, "speech": 0.1}, "speech"),
        routed("news", 32, {"news": 0.11, "speech": 0.1}, "speech"),
        routed("speech", 32, {"news": 0.2, "speech": 0.14}, "speech"),
        routed("speech", 32, {"news": 0.1, "speech": 0.9}, "speech"),
        routed("news", 16, {"news": 0.1, "speech": 0.9}, "news"),
    ]

    lines = list(report.tables(rows))
    report.plot(report.of_length(rows, 32), tmp_path / "routing.png")

    assert "| 32 | 4 | 75 % | 50 % | 50 % | 50 % | 50 % |" in lines
    assert "| 16 | 1 | 0 % | 100 % | 100 % | 100 % | 100 % |" in lines
    assert "| 0.02 | 100 % | 0 % | 75 % | 67 % |" in lines
    assert "| 0.1 | 100 % | 0 % | 50 % | 100 % |" in lines
    assert report.confusion(report.of_length(rows, 32), "router") == [[2, 0], [1, 1]]
    assert (tmp_path / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_of_reranking_shows_what_the_offset_adds_and_how_sure_that_is() -> None:
    report = loaded("reranking_report")
    ranks = [{"base": 2, "own": 1, "other": 4}, {"base": 1, "own": 1, "other": 1}]
    rows = [{"domain": "news", "other": "speech", "documents": 2, "ranks": each} for each in ranks * 20]

    [_, _, news, everything] = report.table(rows)

    assert news.startswith("| news | 40 | 0.750 | 0.750 | 1.000 | 0.625 | 50 % | 100 % | 50 % | +0.250 [+0.")
    assert everything == news.replace("news", "all")
    low, high = report.interval([0.0, 1.0] * 50)
    assert low == pytest.approx(0.4, abs=0.02)
    assert high == pytest.approx(0.6, abs=0.02)
