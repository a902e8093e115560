"""All cases of the benchmark, in the order they are run and shown."""

from __future__ import annotations

from collections.abc import Iterable

from offset_runtime.bench.batching import measure_batch, own_loop_1, own_loop_8
from offset_runtime.bench.case import REAL_BACKENDS, Case
from offset_runtime.bench.constrained import constrained_step
from offset_runtime.bench.domain_costs import measure_decode_step, measure_eight_domains, measure_prefill
from offset_runtime.bench.history import shared_history
from offset_runtime.bench.processes import measure_cold_llama, measure_cold_transformers, measure_memory
from offset_runtime.bench.restoring import restore_state
from offset_runtime.bench.switching import measure_domain_switch
from offset_runtime.bench.turns import second_turn, second_turn_other_domains
from offset_runtime.bench.workflow import workflow
from offset_runtime.errors import InvalidRequestError, nearest_hint

_LLAMA_CPP = frozenset({"llama_cpp"})

CASES = (
    Case("prefill", "256 tokens with an offset / without", 1.02, on_model=measure_prefill),
    Case("decode_step", "decode, domain active / plain", 1.01, on_model=measure_decode_step),
    Case("constrained_step", "decode step, JSON schema / free", 1.10, on_model=constrained_step),
    Case(
        "own_loop_1",
        "engine's decode / bare llama_decode, 1 sequence",
        1.05,
        on_model=own_loop_1,
        backends=_LLAMA_CPP,
    ),
    Case(
        "own_loop_8",
        "engine's decode / bare llama_decode, 8 sequences",
        1.05,
        on_model=own_loop_8,
        backends=_LLAMA_CPP,
    ),
    Case(
        "eight_domains",
        "throughput of 8 requests, 8 domains / one",
        0.98,
        on_model=measure_eight_domains,
        higher_is_better=True,
    ),
    Case(
        "batch_8",
        "decode throughput of 8 requests, batched / in turn",
        2.5,
        on_model=measure_batch,
        higher_is_better=True,
    ),
    Case(
        "domain_switch",
        "switch of domain / PEFT set_adapter, 8 of each",
        1 / 1000,
        on_model=measure_domain_switch,
        backends=REAL_BACKENDS,
    ),
    Case("second_turn", "first token of a 2nd turn, cached / without cache", 0.10, on_model=second_turn),
    Case(
        "second_turn_other_domains",
        "first token of a 2nd turn, after other domains' turns / without them",
        1.05,
        on_model=second_turn_other_domains,
    ),
    Case("shared_history", "4 domains over one history, turn / sequence anchors", 0.35, on_model=shared_history),
    Case("restore_state", "state of 1,000 tokens from disk / prefill", 0.05, on_model=restore_state),
    Case("memory_100", "resident memory with 100 domains / with 1", 1.01, in_processes=measure_memory),
    Case(
        "workflow",
        "8 agents in 4 domains, 3 rounds: ours / a call after another",
        0.4,
        in_processes=workflow,
        backends=REAL_BACKENDS,
    ),
    Case(
        "cold_start_llama",
        "cold process to first token, ours / Llama",
        None,
        in_processes=measure_cold_llama,
        backends=REAL_BACKENDS,
    ),
    Case(
        "cold_start_transformers",
        "cold process to first token, ours / transformers",
        None,
        in_processes=measure_cold_transformers,
        backends=REAL_BACKENDS,
    ),
)


def select(names: Iterable[str]) -> tuple[Case, ...]:
    """Return the cases of these names, in the order of `CASES`; all of them for no name.

    Raises `InvalidRequestError` for a name that no case has.
    """
    known = {case.name: case for case in CASES}
    wanted = set(names)
    for name in sorted(wanted - known.keys()):
        raise InvalidRequestError(
            f"no benchmark is called {name!r}; expected one of {', '.join(known)}{nearest_hint(name, known)}"
        )
    return tuple(case for case in CASES if not wanted or case.name in wanted)
