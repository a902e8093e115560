"""Tiny GGUF models keep the contract on llama.cpp, and read an offset as their torch twins do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from offset_runtime import DomainOffset, LlamaCppOptions
from offset_runtime.backends import conformance
from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.errors import UnsupportedModelError
from offset_runtime.offset import Anchor
from offset_runtime.placement import place

# How llama.cpp scales embedding input, and whether transformers scales a row before an offset is added to it.
PLAIN = ("llama", "qwen2", "qwen3", "mamba")
MULTIPLIED_AFTER = ("granite", "minicpm")
SCALED_ALWAYS = ("gemma", "gemma2", "minicpm3")
SCALED_TOKENS = ("gemma3",)
ARCHITECTURES = (*PLAIN, *MULTIPLIED_AFTER, *SCALED_ALWAYS, *SCALED_TOKENS)

# llama.cpp looks Gemma's activation function up in a table of half-precision numbers.
HALF_PRECISION = 1e-3

EXACT = LlamaCppOptions(n_ctx=512, n_threads=1, flash_attn=False, type_k="f32", type_v="f32")

TinyGguf = Callable[[str], Path]
LlamaBackends = Callable[[str], LlamaCppBackend]


@pytest.fixture(scope="module")
def llama_backends(tiny_gguf: TinyGguf) -> LlamaBackends:
    """Return the function that gives the backend of an architecture's tiny model, loaded at its first use."""
    made: dict[str, LlamaCppBackend] = {}

    def backend(architecture: str) -> LlamaCppBackend:
        if architecture not in made:
            made[architecture] = LlamaCppBackend(tiny_gguf(architecture), EXACT)
        return made[architecture]

    return backend


def logits(backend: Backend, ids: list[int], offset: DomainOffset | None) -> np.ndarray:
    sequence = backend.allocate()
    placements = () if offset is None else (place(offset, len(ids)),)
    [rows] = backend.forward([Chunk(sequence, ids, placements, "all")])
    backend.free(sequence)
    # Rows behind the tokenizer's vocabulary are padding.
    return rows[:, :280]


@pytest.mark.parametrize("behaviour", conformance.BEHAVIOURS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_contract(architecture: str, behaviour: str, llama_backends: LlamaBackends) -> None:
    conformance.check(behaviour, partial(llama_backends, architecture))


@pytest.mark.parametrize("anchor", ["turn", "sequence"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_offset_comes_to_the_logits_that_torch_gives(
    architecture: str,
    anchor: Anchor,
    llama_backends: LlamaBackends,
    tiny_gguf_model: Callable[[str], PreTrainedModel],
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
    make_offset: Callable[..., DomainOffset],
) -> None:
    twin = TorchBackend(tiny_gguf_model(architecture), make_tokenizer(chat=True))
    ids = [int(i) for i in np.random.default_rng(1).integers(10, 280, 20)]
    offset = make_offset(twin.identity, positions=4, anchor=anchor, scale=1.0)
    expected, plain = logits(twin, ids, offset), logits(twin, ids, None)
    largest = float(np.abs(expected).max())
    found = logits(llama_backends(architecture), ids, offset)
    assert float(np.abs(found - expected).max()) < HALF_PRECISION * largest
    assert float(np.abs(plain - expected).max()) > 100 * HALF_PRECISION * largest


@pytest.mark.parametrize("architecture", [*PLAIN, "granite", *SCALED_ALWAYS, *SCALED_TOKENS])
def test_an_offset_trained_on_torch_is_accepted(
    architecture: str,
    llama_backends: LlamaBackends,
    tiny_gguf_model: Callable[[str], PreTrainedModel],
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    twin = TorchBackend(tiny_gguf_model(architecture), make_tokenizer(chat=True))
    llama_backends(architecture).identity.check(twin.identity, domain="x")


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("gemma3n", "feeding embeddings changes the logits by .*%"), ("qwen2vl", r"several positions a token \(M-RoPE\)")],
)
def test_models_whose_embeddings_are_not_all_they_read_are_refused(
    architecture: str, reason: str, tiny_gguf: TinyGguf
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{architecture}.* cannot take domain offsets: .*{reason}"):
        LlamaCppBackend(tiny_gguf(architecture), EXACT)


@pytest.mark.parametrize(
    "options",
    [
        # Prompts of the suite have 20 tokens: they, and their offsets, are cut across calls of llama.cpp.
        {"n_batch": 7},
        {"n_batch": 16, "n_ubatch": 3},
        {"flash_attn": True},
        {"use_mmap": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("behaviour", conformance.BEHAVIOURS)
def test_contract_under_other_options(options: dict[str, object], behaviour: str, tiny_gguf: TinyGguf) -> None:
    changed = EXACT.model_copy(update=options)
    backend = LlamaCppBackend(tiny_gguf("llama"), changed)
    conformance.check(behaviour, lambda: backend, tolerance=1e-3)
    backend.close()


def test_recurrent_state_is_not_declared_to_be_cut_back(llama_backends: LlamaBackends) -> None:
    assert not llama_backends("mamba").capabilities.truncate
    assert llama_backends("llama").capabilities.truncate


def test_a_kv_cache_of_a_smaller_type_takes_less_memory(tiny_gguf: TinyGguf) -> None:
    sizes = []
    for options in (EXACT, EXACT.model_copy(update={"type_k": "f16", "type_v": "f16"})):
        backend = LlamaCppBackend(tiny_gguf("llama"), options)
        sequence = backend.allocate()
        backend.forward([Chunk(sequence, list(range(5, 25)))])
        sizes.append(backend.state_bytes())
        backend.close()
    assert sizes[1] < 0.6 * sizes[0]
