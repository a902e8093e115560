"""The tiny GGUF files hold what the tiny torch models hold: llama.cpp computes the same from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_void_p
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerFast

# The largest difference of logits, as a part of the largest logit. llama.cpp looks GELU up in half precision.
TOLERANCES = dict.fromkeys(("gemma", "gemma2", "gemma3"), 1e-3)
TOLERANCES |= dict.fromkeys(("llama", "qwen2", "qwen3", "qwen2vl", "granite", "minicpm", "minicpm3", "mamba"), 1e-5)
TOKENS = [2, 40, 71, 3, 99, 12, 250, 0, 2, 30, 31, 32, 33, 60, 61, 5, 7, 201, 150, 88, 0]
TEXTS = (
    "a plain text about the law",
    "<|im_start|>user\nthe news of the day<|im_end|>\n<|im_start|>assistant\n",
    "  two  spaces, a tab\t, lines\n\n\nand   an end  ",
    "2024 has 366 days; it's 12.5% of 2,928. We'll see",
    "Grüße, señor — 你好, привет 👋🏽 e\u0301",
    "<s>text<s> <|im_end|><|im_end|>x<|im_",
)

TinyGguf = Callable[[str], Path]
TinyGgufModel = Callable[[str], PreTrainedModel]

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def opened(path: Path) -> Iterator[c_void_p]:
    """Give llama.cpp's model of a file, freed afterwards."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model, f"llama.cpp does not load {path.name}"
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def logits_of(path: Path, tokens: list[int]) -> NDArray[np.float32]:
    """Return llama.cpp's logits after every token, (T, vocab), all in float32."""
    with opened(path) as model:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 64
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = llama_cpp.llama_init_from_model(model, params)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        try:
            assert llama_cpp.llama_decode(context, batch) == 0
            vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
            rows = [llama_cpp.llama_get_logits_ith(context, i) for i in range(len(tokens))]
            return np.array([np.ctypeslib.as_array(row, (vocabulary,)) for row in rows])
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)


def tokens_of(path: Path, text: str) -> list[int]:
    """Return llama.cpp's tokens of a text, special ones included."""
    with opened(path) as model:
        encoded = text.encode()
        found = (llama_cpp.llama_token * 256)()
        count = llama_cpp.llama_tokenize(
            llama_cpp.llama_model_get_vocab(model), encoded, len(encoded), found, len(found), False, True
        )
        return list(found[:count])


@pytest.mark.parametrize("architecture", TOLERANCES)
def test_llama_cpp_computes_the_logits_of_torch(
    architecture: str, tiny_gguf: TinyGguf, tiny_gguf_model: TinyGgufModel
) -> None:
    with torch.inference_mode():
        expected = tiny_gguf_model(architecture)(torch.tensor([TOKENS])).logits[0].numpy()
    difference = np.abs(logits_of(tiny_gguf(architecture), TOKENS) - expected).max()
    assert difference <= TOLERANCES[architecture] * np.abs(expected).max()


def test_llama_cpp_runs_the_model_whose_every_layer_reads_token_ids(tiny_gguf: TinyGguf) -> None:
    assert np.isfinite(logits_of(tiny_gguf("gemma3n"), TOKENS)).all()


@pytest.mark.parametrize("text", TEXTS)
def test_llama_cpp_finds_the_tokens_of_the_tokenizer(
    text: str, tiny_gguf: TinyGguf, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    expected = make_tokenizer(chat=True)(text, add_special_tokens=False).input_ids
    assert tokens_of(tiny_gguf("llama"), text) == expected


def test_the_file_holds_the_chat_template_and_the_end_token(
    tiny_gguf: TinyGguf, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    tokenizer = make_tokenizer(chat=True)
    fields = gguf.GGUFReader(tiny_gguf("llama")).fields
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
