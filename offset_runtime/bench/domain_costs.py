"""What a domain costs a request: in prefill, in each decode step, and where a batch mixes domains."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from offset_runtime.backends.base import Chunk
from offset_runtime.bench.case import Case, Setting
from offset_runtime.bench.pairs import Ratio, measure
from offset_runtime.bench.workload import (
    GROUP,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    check_room,
    endless_engine,
    prompt,
    random_offset,
    request,
    run_together,
)
from offset_runtime.offset import DomainOffset
from offset_runtime.placement import place
from offset_runtime.runtime import OffsetRuntime

PREFILL_TOKENS = 256


def measure_prefill(case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Seconds of one forward pass over a fresh sequence of 256 tokens, the offset on its last 8, or none."""
    backend = runtime.backend
    check_room(backend, PREFILL_TOKENS)
    tokens = prompt(backend.tokenizer, PREFILL_TOKENS)
    placed = (place(random_offset(backend.identity), PREFILL_TOKENS),)

    def seconds(with_offset: bool) -> float:
        sequence = backend.allocate()
        chunk = Chunk(sequence, tokens, placed if with_offset else ())
        try:
            began = time.perf_counter()
            backend.forward([chunk])
            return time.perf_counter() - began
        finally:
            backend.free(sequence)

    # On a thread that ends: OpenMP keeps workers for every thread that computed, to the cost of the cases after it.
    with ThreadPoolExecutor(1) as pool:
        return measure(
            case.name,
            lambda: pool.submit(seconds, True).result(),
            lambda: pool.submit(seconds, False).result(),
            goal=case.goal,
            pairs=setting.pairs,
            progress=setting.progress,
        )


def measure_decode_step(case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Seconds a token of one request's decode, in the engine."""
    check_room(runtime.backend, PROMPT_TOKENS + OUTPUT_TOKENS)
    tokens = prompt(runtime.backend.tokenizer, PROMPT_TOKENS)
    offset = random_offset(runtime.backend.identity)
    with endless_engine(runtime.backend) as engine:

        def seconds(domain: DomainOffset | None) -> float:
            group = run_together(engine, [request(tokens, domain)])
            return group.decode_s / group.decode_tokens

        return measure(
            case.name,
            lambda: seconds(offset),
            lambda: seconds(None),
            goal=case.goal,
            pairs=setting.pairs,
            progress=setting.progress,
        )


def measure_eight_domains(case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Tokens a second, read and written, of 8 requests together."""
    backend = runtime.backend
    check_room(backend, PROMPT_TOKENS + OUTPUT_TOKENS, sequences=GROUP)
    prompts = [prompt(backend.tokenizer, PROMPT_TOKENS, start=11 * i) for i in range(GROUP)]
    offsets = [random_offset(backend.identity, i) for i in range(GROUP)]
    tokens = GROUP * (PROMPT_TOKENS + OUTPUT_TOKENS)
    with endless_engine(backend) as engine:

        def throughput(domains: list[DomainOffset]) -> float:
            requests = [request(ids, domain) for ids, domain in zip(prompts, domains, strict=True)]
            return tokens / run_together(engine, requests).seconds

        return measure(
            case.name,
            lambda: throughput(offsets),
            lambda: throughput(offsets[:1] * GROUP),
            goal=case.goal,
            higher_is_better=case.higher_is_better,
            unit="tokens_per_s",
            pairs=setting.pairs,
            progress=setting.progress,
        )
