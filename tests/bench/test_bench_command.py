"""The command `bench`, as users call it, and its table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from offset_runtime.bench import command
from offset_runtime.bench.cases import CASES
from offset_runtime.bench.pairs import Ratio
from offset_runtime.bench.report import quantity, tables
from offset_runtime.bench.runner import BenchReport, LeftOut
from offset_runtime.cli import app

RATIO = Ratio("prefill", 1.013, (1.011, 1.016), (), 1.02, False, 0.999, 15, "s", 0.52, 0.51)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def shown(*results: Ratio | LeftOut) -> str:
    console = Console(width=80, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(tables(BenchReport("smollm2-135m", "llama_cpp", CASES, results)))
    return capture.get()


def row(text: str) -> list[str]:
    """The cells of `prefill` in a table."""
    return next(line.split() for line in text.splitlines() if line.strip().startswith("prefill "))


def test_json_is_one_object_with_ratios_and_what_was_left_out() -> None:
    result = run("-m", "fake", "--only", "decode_step", "--only", "own_loop_1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (ratio,) = found["ratios"]
    assert (ratio["name"], ratio["goal"], ratio["pairs"]) == ("decode_step", 1.01, 15)
    assert [item["name"] for item in found["left_out"]] == ["own_loop_1"]


def test_the_table_is_printed_and_the_exit_code_is_0_whatever_the_ratios_are() -> None:
    result = run("-m", "fake", "--only", "batch_8", "--pairs", 16)
    assert result.exit_code == 0, result.output
    assert "batch_8" in result.stdout
    assert "16" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-m", "fake", "--only", "prefil"), "did you mean 'prefill'?"),
        (("-m", "fake", "--pairs", "3"), "15"),
        (("-m", "nowhere"), "no model 'nowhere'"),
        (("-m", "fake", "--backend", "onnx"), "'onnx' is not one of"),
    ],
)
def test_a_users_error_ends_with_exit_code_2_and_says_what_to_do(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([replace(RATIO, value=1.5, interval=(1.4, 1.6))], "missed: prefill is 1.5; its goal is 1.02"),
        ([RATIO, LeftOut("decode_step", "the model broke", failed=True)], "failed: decode_step: the model broke"),
        ([replace(RATIO, breach="99 tokens were prefilled")], "failed: prefill: 99 tokens were prefilled"),
        ([LeftOut("prefill", "needs a context of 256 tokens")], "failed: nothing was measured"),
    ],
)
def test_check_exits_with_1_and_says_why(
    results: list[Ratio | LeftOut], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = BenchReport("fake", "fake", CASES, tuple(results))
    monkeypatch.setattr(command, "run_cases", lambda *arguments, **options: report)
    assert run("-m", "fake").exit_code == 0
    result = run("-m", "fake", "--check")
    assert result.exit_code == 1
    assert said in result.stderr


def test_check_passes_a_miss_that_is_not_decided_and_a_case_that_does_not_apply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undecided = replace(RATIO, value=1.03, interval=(1.01, 1.05))
    report = BenchReport("fake", "fake", CASES, (undecided, LeftOut("own_loop_1", "applies to backend llama_cpp")))
    monkeypatch.setattr(command, "run_cases", lambda *arguments, **options: report)
    result = run("-m", "fake", "--check")
    assert (result.exit_code, result.stderr) == (0, "")


def test_the_table_says_value_interval_goal_verdict_control_and_pairs_and_below_it_both_sides() -> None:
    text = shown(RATIO)
    assert row(text) == ["prefill", "1.013", "1.011…1.016", "≤", "1.02", "met", "0.999", "15"]
    assert "prefill: 256 tokens with an offset / without; 520 / 510 ms" in text
    assert "undecided" not in text
    assert "noise" not in text


def test_the_table_tells_a_missed_goal_and_noise() -> None:
    missed = replace(RATIO, value=1.3, interval=(1.2, 1.4))
    assert row(shown(missed))[-3:] == ["missed", "0.999", "15"]
    text = shown(replace(missed, a_a=1.07))
    assert row(text)[-3:] == ["missed,", "1.070", "15"]
    assert " noise " in text
    assert "noise: A / A lies outside 0.98…1.02" in text


@pytest.mark.parametrize(("value", "word"), [(1.013, "met,"), (1.03, "missed,")])
def test_the_table_tells_where_the_interval_leaves_a_goal_undecided(value: float, word: str) -> None:
    text = shown(replace(RATIO, value=value, interval=(1.01, 1.05)))
    assert row(text)[-3:] == [word, "0.999", "15"]
    assert " undecided " in text
    assert "undecided: the goal lies within the 95 % interval" in text


def test_the_table_says_at_least_where_higher_is_better_and_nothing_without_a_goal() -> None:
    faster = replace(
        RATIO,
        name="batch_8",
        value=3.1,
        interval=(3.0, 3.2),
        goal=2.5,
        higher_is_better=True,
        unit="tokens_per_s",
        a=155,
        b=50,
    )
    text = shown(faster, replace(RATIO, name="cold_start_llama", goal=None))
    assert "3.000…3.200 ≥ 2.5 met" in " ".join(text.split())
    assert "155 / 50 tok/s" in text
    assert " – " in text


def test_what_was_left_out_is_listed_with_its_reason() -> None:
    assert "domain_switch: left out: needs the package peft" in shown(
        LeftOut("domain_switch", "needs the package peft")
    )


def test_what_failed_is_listed_as_such() -> None:
    assert "prefill: failed: the model broke" in shown(LeftOut("prefill", "the model broke", failed=True))


def test_the_table_tells_what_must_hold_and_did_not() -> None:
    assert "prefill: failed: 99 tokens were prefilled" in shown(replace(RATIO, breach="99 tokens were prefilled"))


def test_all_names_fit_the_table_at_80_columns() -> None:
    small = replace(RATIO, value=4.2e-05, interval=(4.1e-05, 4.3e-05), goal=0.001, a_a=1.07)
    text = shown(*(replace(small, name=case.name) for case in CASES))
    assert "4.1e-05…4.3e-05" in text
    assert all(f"\n{case.name} " in text for case in CASES)


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (2.5, "s", "2.5 s"),
        (0.0214, "s", "21.4 ms"),
        (4.2e-6, "s", "4.2 µs"),
        (3.5e8, "bytes", "350.0 MB"),
        (51.26, "tokens_per_s", "51.3 tok/s"),
    ],
)
def test_quantities_are_spelt_with_a_unit_that_suits_their_size(value: float, unit: str, said: str) -> None:
    assert quantity(value, unit) == said  # type: ignore[arg-type]
