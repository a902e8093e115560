"""Tiny GGUF models keep the contract on llama.cpp, and read an offset as their torch twins do."""

from __future__ import annotations

import copy
import random
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


def torch_twin(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> TorchBackend:
    # A copy, since the backend changes how its model computes attention.
    return TorchBackend(copy.deepcopy(model), tokenizer)


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
    twin = torch_twin(tiny_gguf_model(architecture), make_tokenizer(chat=True))
    ids = [int(i) for i in np.random.default_rng(1).integers(10, 280, 20)]
    offset = make_offset(twin.identity, positions=4, anchor=anchor, scale=1.0)
    expected, plain = logits(twin, ids, offset), logits(twin, ids, None)
    largest = float(np.abs(expected).max())
    found = logits(llama_backends(architecture), ids, offset)
    rounding = HALF_PRECISION if "gemma" in architecture else 1e-5
    assert float(np.abs(found - expected).max()) < rounding * largest
    assert float(np.abs(plain - expected).max()) > 100 * HALF_PRECISION * largest


@pytest.mark.parametrize("architecture", [*PLAIN, "granite", *SCALED_ALWAYS, *SCALED_TOKENS])
def test_an_offset_trained_on_torch_is_accepted(
    architecture: str,
    llama_backends: LlamaBackends,
    tiny_gguf_model: Callable[[str], PreTrainedModel],
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> None:
    twin = torch_twin(tiny_gguf_model(architecture), make_tokenizer(chat=True))
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


def test_state_that_cannot_be_cut_back_is_not_declared_to(llama_backends: LlamaBackends) -> None:
    declared = {a: llama_backends(a).capabilities.truncate for a in ("llama", "qwen3", "mamba", "gemma2", "gemma3")}
    assert declared == {"llama": True, "qwen3": True, "mamba": False, "gemma2": False, "gemma3": False}


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mamba"])
def test_a_crowded_cache_gives_what_an_empty_one_gives(architecture: str, tiny_gguf: TinyGguf) -> None:
    """A random walk: sequences come, grow by parts longer than one computation, fork and go, in a cache nearly full.

    llama.cpp uses cells again that left a sliding window; where a call was several computations, an early one
    missed keys that a later one had taken.
    """
    crowded = LlamaCppBackend(tiny_gguf(architecture), EXACT.model_copy(update={"n_ubatch": 16, "n_seq_max": 8}))
    fresh = LlamaCppBackend(tiny_gguf(architecture), EXACT)
    chooser, texts, wrong = random.Random(3), {}, 0.0
    for _ in range(1200):
        act = chooser.random()
        if act < 0.35 and len(texts) < 8:
            texts[crowded.allocate()] = []
        elif act < 0.4 and texts and len(texts) < 8:
            parent = chooser.choice(list(texts))
            texts[crowded.fork(parent)] = list(texts[parent])
        elif act < 0.6 and texts:
            gone = chooser.choice(list(texts))
            crowded.free(gone)
            del texts[gone]
        else:
            wrong = max(wrong, grow(crowded, fresh, texts, chooser))
    crowded.close()
    fresh.close()
    assert wrong < 5e-3


def grow(crowded: Backend, fresh: Backend, texts: dict[int, list[int]], chooser: random.Random) -> float:
    """Feed some sequences more, and return how far their logits are from those of a cold run."""
    chunks = []
    for sequence in chooser.sample(list(texts), chooser.randint(0, len(texts))):
        count = min(chooser.choice([1, 1, 2, 7, 40]), 120 - len(texts[sequence]))
        if count > 0 and sum(len(text) for text in texts.values()) + count < 450:
            chunks.append(Chunk(sequence, [chooser.randrange(10, 280) for _ in range(count)]))
            texts[sequence].extend(chunks[-1].token_ids)
    wrong = 0.0
    for chunk, [row] in zip(chunks, crowded.forward(chunks), strict=True):
        expected = logits(fresh, texts[chunk.sequence], None)[-1]
        wrong = max(wrong, float(np.abs(row[:280] - expected).max() / np.abs(expected).max()))
    return wrong


def test_a_kv_cache_of_a_smaller_type_takes_less_memory(tiny_gguf: TinyGguf) -> None:
    sizes = []
    for options in (EXACT, EXACT.model_copy(update={"type_k": "f16", "type_v": "f16"})):
        backend = LlamaCppBackend(tiny_gguf("llama"), options)
        sequence = backend.allocate()
        backend.forward([Chunk(sequence, list(range(5, 25)))])
        sizes.append(backend.state_bytes())
        backend.close()
    assert sizes[1] < 0.6 * sizes[0]
