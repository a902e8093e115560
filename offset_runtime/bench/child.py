"""What a process of its own measures. Run as a script, so that each side imports nothing but what it needs.

``python -P child.py SIDE JSON`` prints one line: `MARK` and the figures as JSON, right when they are known.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
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
}

if __name__ == "__main__":
    SIDES[sys.argv[1]](**json.loads(sys.argv[2]))
