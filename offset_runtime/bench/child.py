"""What a process of its own measures. Run as a script, so that each side imports nothing but what it needs.

``python -P child.py SIDE JSON`` prints one line: `MARK` and the figures as JSON, right when they are known.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

MARK = "offset-runtime-bench: "

Figures = dict[str, float]


def ours(spec: dict[str, Any], text: str) -> Figures:
    """Load with this package, and generate one token."""
    began = time.perf_counter()
    from offset_runtime import ModelSpec, OffsetRuntime, SamplingParams

    with OffsetRuntime.load(ModelSpec.model_validate(spec)) as runtime:
        loaded = time.perf_counter()
        runtime.run(runtime.text_request(text, sampling=SamplingParams(max_tokens=1)))
        return _report(began, loaded)


def llama(path: str, text: str, options: dict[str, Any]) -> Figures:
    """Load with llama-cpp-python's `Llama`, and generate one token."""
    began = time.perf_counter()
    from llama_cpp import Llama

    model = Llama(path, verbose=False, **options)
    loaded = time.perf_counter()
    model(text, max_tokens=1, temperature=0.0)
    return _report(began, loaded)


def transformers(source: str, gguf_file: str | None, device: str | None, text: str) -> Figures:
    """Load with transformers, in float32 on a CPU as this package does, and generate one token."""
    began = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    extra: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    dtype: Any = torch.float32 if where.type == "cpu" else "auto"
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **extra)
    model.to(where)
    loaded = time.perf_counter()
    model.generate(**tokenizer(text, return_tensors="pt").to(where), max_new_tokens=1, do_sample=False)
    return _report(began, loaded)


def memory(spec: dict[str, Any], domains: int, requests: int) -> Figures:
    """Register `domains` domains, use them in turn in `requests` requests, and look at the resident memory."""
    import psutil

    from offset_runtime import EngineSettings, ModelSpec, OffsetRuntime
    from offset_runtime.bench.workload import prompt, random_offset, request

    # Without the prefix cache, which has a limit of its own, and holds more where requests differ.
    settings = EngineSettings(cache_bytes=0)
    with OffsetRuntime.load(ModelSpec.model_validate(spec), settings=settings) as runtime:
        for number in range(domains):
            runtime.register(random_offset(runtime.backend.identity, number))
        tokens = prompt(runtime.backend.tokenizer, 16)
        for number in range(requests):
            offset = runtime.offset(f"bench-{number % domains}")
            runtime.run(request(tokens, offset, output_tokens=2))
        return _printed({"rss_bytes": float(psutil.Process().memory_info().rss)})


class Rounds:
    """The prompts of a workflow, in the ids of the model's tokenizer: `text` is what they are cut from.

    `transcript` grows by the replies of each round.
    """

    def __init__(self, text: Sequence[int], sizes: dict[str, int]) -> None:
        self.rounds, self.reply_tokens = sizes["rounds"], sizes["reply_tokens"]
        self.transcript = _cut(text, sizes["transcript_tokens"])
        starts = [11 * agent + 5 for agent in range(sizes["agents"])]
        self.instructions = [_cut(text, sizes["instruction_tokens"], start) for start in starts]
        # Read by no agent, to warm up with.
        self.other = _cut(text, sizes["instruction_tokens"], 3)

    def in_turn(self, reply: Callable[[int, list[int]], list[int]]) -> dict[str, float]:
        """Run it with a call for each agent after another: `reply` to the agent's instructions and the transcript."""
        reply(0, self.other)
        began = time.perf_counter()
        generated = 0
        for _ in range(self.rounds):
            replies = [reply(agent, [*own, *self.transcript]) for agent, own in enumerate(self.instructions)]
            generated += sum(map(len, replies))
            self.transcript += [token for tokens in replies for token in tokens]
        return {"seconds": time.perf_counter() - began, "output_tokens": generated}


def workflow_together(spec: dict[str, Any], text: str, sizes: dict[str, int]) -> Figures:
    """A workflow with this package as it is meant to be used: the prefix cache, a batch a round, turn anchors.

    The transcript comes before an agent's own instructions, so that all agents share its state.
    """
    from offset_runtime import EngineSettings, ModelSpec
    from offset_runtime.bench.workload import endless_engine, random_offset, request, run_together
    from offset_runtime.models import load_backend

    with closing(load_backend(ModelSpec.model_validate(spec))) as backend:
        work = Rounds(backend.tokenizer.encode(text), sizes)
        offsets = [random_offset(backend.identity, number) for number in range(sizes["domains"])]
        with endless_engine(backend, EngineSettings()) as engine:
            run_together(engine, [request(work.other, output_tokens=work.reply_tokens)])
            usages = []
            began = time.perf_counter()
            for _ in range(work.rounds):
                asked = [
                    request([*work.transcript, *own], offsets[agent % len(offsets)], work.reply_tokens)
                    for agent, own in enumerate(work.instructions)
                ]
                replies = run_together(engine, asked).completions
                usages += [completion.usage for completion in replies]
                work.transcript += [token for completion in replies for token in completion.token_ids]
            seconds = time.perf_counter() - began
            found = {
                "seconds": seconds,
                "output_tokens": sum(usage.output_tokens for usage in usages),
                "prefilled_tokens": sum(usage.prompt_tokens - usage.cached_tokens for usage in usages),
                # Each cached sequence counted as if it shared nothing.
                "state_bytes": engine.cache_figures.bytes,
                "domain_bytes": sum(offset.tensor.nbytes for offset in offsets),
            }
            return _printed({**found, "peak_rss_bytes": peak_rss_bytes()})


def workflow_alone(spec: dict[str, Any], text: str, sizes: dict[str, int]) -> Figures:
    """A workflow with this package, without cache and batch: a request after another, the instructions first."""
    from offset_runtime import ModelSpec
    from offset_runtime.backends.base import Chunk
    from offset_runtime.bench.workload import endless_engine, random_offset, request, run_together
    from offset_runtime.models import load_backend

    with closing(load_backend(ModelSpec.model_validate(spec))) as backend:
        work = Rounds(backend.tokenizer.encode(text), sizes)
        offsets = [random_offset(backend.identity, number) for number in range(sizes["domains"])]
        longest: list[int] = []
        prefilled = 0
        with endless_engine(backend) as engine:

            def reply(agent: int, ids: list[int]) -> list[int]:
                nonlocal longest, prefilled
                longest = ids
                asked = request(ids, offsets[agent % len(offsets)], work.reply_tokens)
                (completion,) = run_together(engine, [asked]).completions
                prefilled += len(ids)
                return list(completion.token_ids)

            found = work.in_turn(reply)
        peak = peak_rss_bytes()
        sequence = backend.allocate()
        backend.forward([Chunk(sequence, longest)])
        return _printed(
            {
                **found,
                "prefilled_tokens": prefilled - len(work.other),
                "state_bytes": backend.sequence_bytes(sequence),
                "domain_bytes": sum(offset.tensor.nbytes for offset in offsets),
                "peak_rss_bytes": peak,
            }
        )


def workflow_llama(path: str, options: dict[str, Any], text: str, sizes: dict[str, int]) -> Figures:
    """A workflow with llama-cpp-python's `Llama`, which keeps what two calls in a row begin with; no domains."""
    from itertools import islice

    import llama_cpp

    with closing(llama_cpp.Llama(path, verbose=False, **options)) as model:
        work = Rounds(model.tokenize(text.encode(), add_bos=False), sizes)
        # What `create_completion`, and so ChatLlamaCpp, stands on; end tokens do not end it.
        found = work.in_turn(lambda agent, ids: list(islice(model.generate(ids, temp=0.0), work.reply_tokens)))
        state = llama_cpp.llama_state_seq_get_size(model.ctx, 0)
        return _printed({**found, "state_bytes": state, "domain_bytes": 0, "peak_rss_bytes": peak_rss_bytes()})


def workflow_transformers(
    source: str, device: str | None, dtype: str | None, text: str, sizes: dict[str, int], rank: int = 0
) -> Figures:
    """A workflow with transformers' `generate`; with `rank`, each domain is a random LoRA adapter of that rank."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind: Any = dtype or ("float32" if where.type == "cpu" else "auto")
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=kind)
    model.to(where)
    # No end token, so that every reply has all its tokens.
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    names = [f"bench-{number}" for number in range(sizes["domains"])]
    adapter_bytes = 0
    if rank:
        model, adapter_bytes = _with_adapters(model, names, rank)
    work = Rounds(AutoTokenizer.from_pretrained(source).encode(text, add_special_tokens=False), sizes)
    state = 0

    def reply(agent: int, ids: list[int]) -> list[int]:
        nonlocal state
        if rank:
            model.set_adapter(names[agent % len(names)])
        asked = torch.tensor([ids], device=where)
        found = model.generate(
            input_ids=asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=work.reply_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        layers = found.past_key_values.layers
        state = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        tokens: list[int] = found.sequences[0, len(ids) :].tolist()
        return tokens

    figures = work.in_turn(reply)
    memory = {"state_bytes": state, "domain_bytes": adapter_bytes, "peak_rss_bytes": peak_rss_bytes()}
    return _printed({**figures, **memory})


def _with_adapters(model: Any, names: Sequence[str], rank: int) -> tuple[Any, int]:
    """The model under random LoRA adapters of these names on all linear layers, and their bytes together."""
    from peft import LoraConfig, get_peft_model

    # Random, where PEFT would begin with ones that do nothing.
    config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with warnings.catch_warnings():
        # PEFT reads what newer versions of transformers call by another name.
        warnings.simplefilter("ignore", FutureWarning)
        adapted: Any = get_peft_model(model, config, adapter_name=names[0])
        for name in names[1:]:
            adapted.add_adapter(name, config)
    adapted.train(False)
    return adapted, sum(tensor.nbytes for name, tensor in adapted.named_parameters() if "lora_" in name)


def _cut(text: Sequence[int], tokens: int, start: int = 0) -> list[int]:
    """`tokens` ids of a text that repeats, read from `start` on."""
    return [text[(start + at) % len(text)] for at in range(tokens)]


def peak_rss_bytes() -> float:
    """The most memory that this process had resident until now."""
    status = Path("/proc/self/status")
    if status.exists():
        # What getrusage says on Linux begins with the memory of the process that started this one.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return float(line.split()[1]) * 1024
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def _report(began: float, loaded: float) -> Figures:
    return _printed({"load_s": loaded - began, "first_token_s": time.perf_counter() - loaded})


def _printed(figures: Figures) -> Figures:
    # At once: the time until the parent reads it is part of what is measured, and ending the process is not.
    print(MARK + json.dumps(figures), flush=True)
    return figures


SIDES: dict[str, Callable[..., Figures]] = {
    "ours": ours,
    "llama": llama,
    "transformers": transformers,
    "memory": memory,
    "workflow_together": workflow_together,
    "workflow_alone": workflow_alone,
    "workflow_llama": workflow_llama,
    "workflow_transformers": workflow_transformers,
}

if __name__ == "__main__":
    SIDES[sys.argv[1]](**json.loads(sys.argv[2]))
