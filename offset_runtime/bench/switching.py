"""Choosing another domain, beside choosing another LoRA adapter with PEFT."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from offset_runtime.backends import embedding_rule
from offset_runtime.backends.base import Backend
from offset_runtime.bench.case import Case, LeftOutError, Setting
from offset_runtime.bench.pairs import Ratio, measure
from offset_runtime.bench.workload import PROMPT_TOKENS, prompt, random_offset
from offset_runtime.models import ModelSpec, converted_gguf, locate
from offset_runtime.placement import Placement, place
from offset_runtime.runtime import OffsetRuntime
from offset_runtime.terminal import quiet_libraries

DOMAINS = 8
LORA_RANK = 8
# A switch of ours takes microseconds: timed alone, it would be lost in the clock's own cost.
_SWITCHES = 4096

_NOTE = (
    "A: look a registered domain up, place its offset in a prompt, add its rows to the embeddings of one chunk; "
    f"B: set_adapter on all linear layers, rank {LORA_RANK}; {DOMAINS} domains and {DOMAINS} adapters in turn"
)


def measure_domain_switch(case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Seconds of choosing another of 8 domains for a request, and of choosing another of 8 LoRA adapters."""
    adapted = _with_adapters(setting.spec, runtime.backend)
    # A runtime for this case alone: the caller's shall not keep its domains.
    own = OffsetRuntime(runtime.backend)
    try:
        ratio = measure(
            case.name,
            _domain_switches(own),
            lambda: _adapter_switch_s(adapted),
            goal=case.goal,
            pairs=setting.pairs,
            progress=setting.progress,
        )
    finally:
        # Its engine alone, since the model is the caller's.
        own.engine.close()
    return replace(ratio, note=_NOTE)


def _domain_switches(runtime: OffsetRuntime) -> Callable[[], float]:
    """Return the function that switches many times, and returns the seconds of one."""
    for number in range(DOMAINS):
        runtime.register(random_offset(runtime.backend.identity, number))
    names = [f"bench-{number}" for number in range(DOMAINS)]
    add = _adder(runtime.backend)

    def seconds() -> float:
        began = time.perf_counter()
        for at in range(_SWITCHES):
            offset = runtime.offset(names[at % DOMAINS])
            assert offset is not None
            add(place(offset, PROMPT_TOKENS))
        return (time.perf_counter() - began) / _SWITCHES

    return seconds


def _adder(backend: Backend) -> Callable[[Placement], None]:
    """Return what the backend does with the rows of a placement in one chunk."""
    import torch

    from offset_runtime.backends.torch import TorchBackend, add_rows

    if isinstance(backend, TorchBackend):
        with torch.inference_mode():
            embeddings = backend.embed(prompt(backend.tokenizer, PROMPT_TOKENS))

        def add(placement: Placement) -> None:
            with torch.inference_mode():
                add_rows(embeddings, placement, 0)

        return add
    # llama.cpp's embeddings are an array. Reading the tokens' own rows is not part of a switch: that is due
    # with every domain, the same as before or another, and counts in the case `prefill`.
    rows = np.zeros((PROMPT_TOKENS, backend.identity.hidden_size), np.float32)

    def add_to_array(placement: Placement) -> None:
        embedding_rule.add_rows(rows, placement, 0, 1.0)

    return add_to_array


def _adapter_switch_s(model: Any) -> float:
    began = time.perf_counter()
    for number in range(DOMAINS):
        model.set_adapter(f"bench-{number}")
    return (time.perf_counter() - began) / DOMAINS


def _with_adapters(spec: ModelSpec, backend: Backend) -> Any:
    """Return the same base model in torch under 8 LoRA adapters; its weights are not held twice where torch runs it."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise LeftOutError("needs the package peft; run: pip install 'offset-runtime[bench]'") from error
    model = _torch_model(spec, backend)
    config = LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # PEFT reads what newer versions of transformers call by another name.
        warnings.simplefilter("ignore", FutureWarning)
        adapted: Any = get_peft_model(model, config, adapter_name="bench-0")
        for number in range(1, DOMAINS):
            adapted.add_adapter(f"bench-{number}", config)
    return adapted


def _torch_model(spec: ModelSpec, backend: Backend) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from offset_runtime.backends.torch import TorchBackend

    if isinstance(backend, TorchBackend):
        # PEFT replaces layers in place; this copy shares only the weights, so the backend's own stays as it is.
        model = backend.model
        shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        return copy.deepcopy(model, shared)
    source = locate(spec.base)
    if not isinstance(source, Path):
        raise LeftOutError(f"needs the model's weights in torch, and {spec.base!r} is no file here")
    quiet_libraries()
    return AutoModelForCausalLM.from_pretrained(converted_gguf(source), dtype=torch.float32)
