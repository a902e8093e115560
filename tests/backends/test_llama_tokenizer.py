"""The tokenizer of a GGUF file gives what transformers gives from the same vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from offset_runtime import LlamaCppOptions
from offset_runtime.backends.base import Backend
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.llama_tokenizer import LlamaTokenizer
from offset_runtime.backends.torch_tokenizer import TorchTokenizer
from offset_runtime.errors import InvalidRequestError, PromptFormatError

TEXTS = (
    "a plain text about the law",
    "  two spaces, and a  gap ",
    "<|im_start|>user\nthe news<|im_end|>\n",
    "Größe, naïve, 東京 😀",
    "line\n\n\nline\ttab",
    "1998 and 12,345.67",
    "a\x00b",
    "x !",
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the news of the day"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_gguf: Callable[[str], Path]) -> Iterator[LlamaTokenizer]:
    backend = LlamaCppBackend(tiny_gguf("llama"), LlamaCppOptions(n_ctx=256, n_threads=1))
    yield backend.tokenizer
    backend.close()


@pytest.fixture(scope="module")
def twin(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> TorchTokenizer:
    return TorchTokenizer(make_tokenizer(chat=True), [0])


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_the_same_tokens_and_the_same_text(
    text: str, tokenizer: LlamaTokenizer, twin: TorchTokenizer
) -> None:
    ids = tokenizer.encode(text)
    assert ids == twin.encode(text)
    assert tokenizer.decode(ids) == twin.decode(ids)


def test_special_tokens_are_known(tokenizer: LlamaTokenizer) -> None:
    assert tokenizer.bos_token_id == 1
    assert not tokenizer.adds_bos
    assert 0 in tokenizer.eos_token_ids


@pytest.mark.parametrize("ask", [True, False])
def test_messages_are_laid_out_as_transformers_lays_them_out(
    ask: bool, tokenizer: LlamaTokenizer, twin: TorchTokenizer
) -> None:
    assert tokenizer.has_chat_template
    expected = twin.render_chat(MESSAGES, add_generation_prompt=ask)
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=ask) == expected


def test_messages_that_the_template_cannot_read_are_refused(tokenizer: LlamaTokenizer) -> None:
    with pytest.raises(PromptFormatError, match=r"chat template refuses these messages.*user.*change their order"):
        tokenizer.render_chat([{"role": "user"}])


def test_a_token_outside_the_vocabulary_has_no_text(tokenizer: LlamaTokenizer) -> None:
    for token in (-1, 320):
        with pytest.raises(InvalidRequestError, match=f"token id {token} is outside the vocabulary"):
            tokenizer.decode([token])


def test_half_a_character_decodes_to_the_replacement_character(tokenizer: LlamaTokenizer) -> None:
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"


@pytest.mark.real_model
def test_both_backends_read_the_real_model_s_template_alike(smollm_torch: Backend, smollm_llama: Backend) -> None:
    expected = smollm_torch.tokenizer.render_chat(MESSAGES)
    assert smollm_llama.tokenizer.render_chat(MESSAGES) == expected
    assert smollm_llama.tokenizer.encode(expected) == smollm_torch.tokenizer.encode(expected)
    # transformers knows of the end of a turn alone, llama.cpp of the end of a text too.
    assert smollm_torch.tokenizer.eos_token_ids <= smollm_llama.tokenizer.eos_token_ids


@pytest.mark.real_model
def test_an_offset_of_either_backend_fits_the_other(smollm_torch: Backend, smollm_llama: Backend) -> None:
    smollm_llama.identity.check(smollm_torch.identity, domain="x")
    smollm_torch.identity.check(smollm_llama.identity, domain="x")
