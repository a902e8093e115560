"""A whole workflow of agents over one growing transcript, in four ways, each in processes of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from offset_runtime.bench.case import Case, Setting
from offset_runtime.bench.pairs import MeasurementError, Ratio, measure, median_interval
from offset_runtime.bench.processes import gguf_path, llama_options, plain_spec, run_child
from offset_runtime.bench.switching import LORA_RANK
from offset_runtime.bench.workload import PARAGRAPH
from offset_runtime.models import converted_gguf, locate

# A round of all variants takes minutes on a small machine.
WORKFLOW_PAIRS = 3

_WHAT = {
    "ours": "cache and batch, the transcript first, turn anchors",
    "plain": "ours without cache and batch, instructions first",
    "calls": "calls one after another, instructions first",
    "adapters": "LoRA adapters, switched for each call",
}


@dataclass(frozen=True, slots=True)
class WorkflowSizes:
    """In each round every agent replies once to the transcript, which then grows by all replies of the round.

    `instruction_tokens`: each agent's own. An agent's domain is one of `domains`, in turn.
    """

    agents: int = 8
    domains: int = 4
    rounds: int = 3
    transcript_tokens: int = 200
    instruction_tokens: int = 25
    reply_tokens: int = 16


@dataclass(slots=True)
class Variant:
    """A way to run the workflow: the side of `bench.child` that does so, what it is given, and what each run found."""

    side: str
    given: Mapping[str, Any]
    found: list[Mapping[str, float]] = field(default_factory=list)

    def __call__(self) -> float:
        """Run the workflow in a fresh process; return its seconds, from the first call to the last reply."""
        figures = run_child(self.side, self.given).figures
        self.found.append(figures)
        return figures["seconds"]

    def details(self, name: str) -> dict[str, float]:
        """The medians of all figures, under names that begin with `name`."""
        return {f"{name}_{key}": median(run[key] for run in self.found) for key in self.found[0]}


def measure_workflow(sizes: WorkflowSizes, case: Case, setting: Setting) -> Ratio:
    """Seconds of the workflow with this package, and with one call of the model's usual library after another.

    The ratios to the other variants, measured in the same rounds, are in the details, as is the memory of each.

    Raises `MeasurementError` where two variants did not generate equally many tokens.
    """
    variants = find_variants(setting, sizes)
    ours, calls = variants["ours"], variants["calls"]
    beside = {name: variant for name, variant in variants.items() if variant not in (ours, calls)}

    def others_too() -> float:
        for variant in beside.values():
            variant()
        return calls()

    pairs = min(setting.pairs, WORKFLOW_PAIRS)
    ratio = measure(case.name, ours, others_too, goal=case.goal, pairs=pairs, warm_up=False, progress=setting.progress)
    tokens = {name: variant.found[0]["output_tokens"] for name, variant in variants.items()}
    if len(set(tokens.values())) > 1:
        raise MeasurementError(f"the variants generated unequal numbers of tokens: {tokens}")
    details = {key: value for name, variant in variants.items() for key, value in variant.details(name).items()}
    for name, variant in beside.items():
        details |= _beside(name, ours, variant)
    return replace(ratio, details=details, note=_note(pairs, variants, details))


def find_variants(setting: Setting, sizes: WorkflowSizes) -> dict[str, Variant]:
    """The variants that there are for a backend; that with adapters needs PEFT, and is left out without it."""
    work: dict[str, Any] = {"text": PARAGRAPH, "sizes": asdict(sizes)}
    own = {**work, "spec": plain_spec(setting.spec)}
    variants = {
        "ours": Variant("workflow_together", own),
        "plain": Variant("workflow_alone", own),
    }
    if setting.backend == "llama_cpp":
        given = {**work, "path": str(gguf_path(setting.spec)), "options": llama_options(setting)}
        return variants | {"calls": Variant("workflow_llama", given)}
    where = {"device": setting.spec.device, "dtype": setting.spec.dtype}
    given = {**work, **where, "source": _torch_source(setting)}
    variants["calls"] = Variant("workflow_transformers", given)
    if importlib.util.find_spec("peft") is not None:
        variants["adapters"] = Variant("workflow_transformers", {**given, "rank": LORA_RANK})
    return variants


def _torch_source(setting: Setting) -> str:
    source = locate(setting.spec.base)
    is_file = isinstance(source, Path) and source.is_file()
    # The same copy in float32 that the backend reads.
    return str(converted_gguf(Path(source)) if is_file else source)


def _beside(name: str, ours: Variant, other: Variant) -> dict[str, float]:
    """The ratio of ours to another variant, over rounds that hold two runs of ours and one of the other."""
    own = [run["seconds"] for run in ours.found]
    means = [(first + second) / 2 for first, second in zip(own[::2], own[1::2], strict=True)]
    rounds = [a / run["seconds"] for a, run in zip(means, other.found, strict=True)]
    low, high = median_interval(rounds)
    return {f"ours_to_{name}": median(rounds), f"ours_to_{name}_low": low, f"ours_to_{name}_high": high}


def _note(pairs: int, variants: Mapping[str, Variant], details: Mapping[str, float]) -> str:
    parts = [f"{pairs} pairs of fresh processes"]
    for name in variants:
        compared = details.get(f"ours_to_{name}")
        ratio = "" if compared is None else f", ours / it {compared:.3g}"
        state, extra = details[f"{name}_state_bytes"] / 1e6, details[f"{name}_domain_bytes"] / 1e6
        parts.append(
            f"{name} ({_WHAT[name]}): {details[f'{name}_seconds']:.3g} s{ratio}, state {state:.1f} MB, "
            f"domains {extra:.2f} MB, peak {details[f'{name}_peak_rss_bytes'] / 1e6:.0f} MB"
        )
    return "; ".join(parts)


workflow: Callable[[Case, Setting], Ratio] = partial(measure_workflow, WorkflowSizes())
