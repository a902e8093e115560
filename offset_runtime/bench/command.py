"""The command `bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from offset_runtime.bench.case import Setting
from offset_runtime.bench.cases import CASES, select
from offset_runtime.bench.pairs import MIN_PAIRS
from offset_runtime.bench.report import tables
from offset_runtime.bench.runner import BenchReport, run_cases
from offset_runtime.model_options import (
    BackendOption,
    DeviceOption,
    LlamaCppOption,
    ModelOption,
    loaded,
    model_spec,
)
from offset_runtime.models import chosen_backend
from offset_runtime.terminal import EXIT_INTERNAL, output, print_error, print_json, progress_bar

OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="NAME",
        help=f"Measure this one; may be repeated. Names: {', '.join(case.name for case in CASES)}.",
        show_default="all",
    ),
]


def bench(
    model: ModelOption,
    only: OnlyOption = None,
    pairs: Annotated[int, typer.Option(min=MIN_PAIRS, help="Paired rounds of each timed ratio.")] = MIN_PAIRS,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 if a ratio surely misses, or a case fails.")
    ] = False,
    backend: BackendOption = "auto",
    device: DeviceOption = None,
    llama_cpp: LlamaCppOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure on your own model what domains cost: ratios, their goals, and a control for each.

    All cases together take most of an hour on 2 cores; --only chooses some.

    [bold]Example[/bold]: offset-runtime bench -m smollm2-135m --only prefill --only decode_step
    """
    cases = select(only or ())
    spec = model_spec(model, backend, device, llama_cpp)
    setting = Setting(spec, chosen_backend(spec), pairs)
    report = run_cases(cases, setting, load=loaded, watch=lambda: progress_bar("measuring"))
    print_json(report.as_json()) if as_json else output().print(tables(report))
    if check and not _passes(report):
        raise typer.Exit(EXIT_INTERNAL)


def _passes(report: BenchReport) -> bool:
    """Say what is wrong with `report` on standard error, and return whether nothing is."""
    for ratio in report.missed:
        print_error(f"{ratio.name} is {ratio.value:.3g}; its goal is {ratio.goal}", kind="missed")
    for ratio in report.breached:
        print_error(f"{ratio.name}: {ratio.breach}", kind="failed")
    for item in report.failed:
        print_error(f"{item.name}: {item.reason}", kind="failed")
    if not report.ratios:
        print_error("nothing was measured, so no goal was checked; the reasons are in the report", kind="failed")
    return bool(report.ratios) and not (report.missed or report.breached or report.failed)
