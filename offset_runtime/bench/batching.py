"""What the engine's loop costs and brings: eight sequences in a batch, and its decode loop beside a bare one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from offset_runtime.backends.base import Chunk
from offset_runtime.bench.case import Case, Setting
from offset_runtime.bench.pairs import Ratio, measure
from offset_runtime.bench.workload import (
    GROUP,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Group,
    check_room,
    endless_engine,
    prompt,
    request,
    run_together,
)
from offset_runtime.errors import GenerationError
from offset_runtime.runtime import OffsetRuntime


def measure_batch(case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Tokens a second of 8 requests' decode: all in one batch, and one request after the other."""
    check_room(runtime.backend, PROMPT_TOKENS + OUTPUT_TOKENS, sequences=GROUP)
    tokenizer = runtime.backend.tokenizer
    requests = [request(prompt(tokenizer, PROMPT_TOKENS, start=11 * i)) for i in range(GROUP)]
    with endless_engine(runtime.backend) as engine:

        def together() -> float:
            group = run_together(engine, requests)
            return group.decode_tokens / group.decode_s

        def one_by_one() -> float:
            groups = [run_together(engine, [alone]) for alone in requests]
            return sum(group.decode_tokens for group in groups) / sum(group.decode_s for group in groups)

        return measure(
            case.name,
            together,
            one_by_one,
            goal=case.goal,
            higher_is_better=case.higher_is_better,
            unit="tokens_per_s",
            pairs=setting.pairs,
            progress=setting.progress,
        )


def measure_own_loop(sequences: int, case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Seconds a step of decode: the whole engine, and nothing but `llama_decode` of the tokens that it chose."""
    backend = runtime.backend
    check_room(backend, PROMPT_TOKENS + OUTPUT_TOKENS, sequences=sequences)
    prompts = [prompt(backend.tokenizer, PROMPT_TOKENS, start=11 * i) for i in range(sequences)]
    requests = [request(ids) for ids in prompts]

    def own_loop() -> Group:
        with endless_engine(backend) as engine:
            return run_together(engine, requests)

    # Greedy, so these are the tokens of every later run too.
    chosen = [completion.token_ids for completion in own_loop().completions]
    steps = len(chosen[0]) - 1

    def alone() -> float:
        # Each side on a thread of its own that ends: OpenMP keeps workers for every thread that computes, and two
        # sets of them would slow both sides down.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(bare_loop_s, backend, prompts, chosen).result()

    return measure(
        case.name,
        lambda: own_loop().decode_s / steps,
        lambda: alone() / steps,
        goal=case.goal,
        pairs=setting.pairs,
        progress=setting.progress,
    )


own_loop_1 = partial(measure_own_loop, 1)
own_loop_8 = partial(measure_own_loop, GROUP)


def bare_loop_s(backend: Any, prompts: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]]) -> float:
    """Seconds that llama.cpp takes to decode `chosen` behind `prompts`, one token of each sequence a step."""
    sequences = [backend.allocate() for _ in prompts]
    try:
        backend.forward([Chunk(sequence, ids) for sequence, ids in zip(sequences, prompts, strict=True)])
        slots = [backend.slot(sequence) for sequence in sequences]
        return bare_decode_s(backend.context, slots, [len(ids) for ids in prompts], chosen)
    finally:
        for sequence in sequences:
            backend.free(sequence)


def bare_decode_s(context: Any, slots: Sequence[int], starts: Sequence[int], chosen: Sequence[Sequence[int]]) -> float:
    """Seconds of `llama_decode` alone: `chosen[i]` goes to slot `slots[i]`, from position `starts[i]` on."""
    import llama_cpp

    batch = llama_cpp.llama_batch_init(len(slots), 0, 1)
    try:
        batch.n_tokens = len(slots)
        for row, slot in enumerate(slots):
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, slot, 1
        began = time.perf_counter()
        # The last token of a reply is never fed.
        for step in range(len(chosen[0]) - 1):
            for row, tokens in enumerate(chosen):
                batch.token[row], batch.pos[row] = tokens[step], starts[row] + step
            status = llama_cpp.llama_decode(context, batch)
            if status != 0:
                raise GenerationError(f"llama_decode returned status {status} in the bare loop; expected 0")
            # A GPU may still be at work, and the next token could not be chosen before it ends.
            llama_cpp.llama_synchronize(context)
        return time.perf_counter() - began
    finally:
        llama_cpp.llama_batch_free(batch)
