"""Tiny models of many architectures, randomly initialised, and a tokenizer trained in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from offset_runtime.backends.torch import TorchBackend

VOCAB_SIZE = 320
CONTEXT_TOKENS = 128
# Shorter than the prompts of the tests, so that keys do fall out of it.
WINDOW_TOKENS = 6

MakeModel = Callable[..., PreTrainedModel]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# As most transformers configurations spell it; four query heads share two key heads.
_SIZES: dict[str, Any] = dict(
    _SMALL,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT_TOKENS,
)

# How each architecture is configured: its configuration class in transformers, and its settings.
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "gpt_neox": ("GPTNeoXConfig", _SIZES),
    "gpt2": ("GPT2Config", dict(_SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT_TOKENS)),
    "qwen2": ("Qwen2Config", dict(_SIZES, use_sliding_window=True, sliding_window=WINDOW_TOKENS, max_window_layers=1)),
    "qwen3": ("Qwen3Config", dict(_SIZES, head_dim=8)),
    "mistral": ("MistralConfig", dict(_SIZES, sliding_window=WINDOW_TOKENS)),
    "granite": (
        "GraniteConfig",
        dict(_SIZES, embedding_multiplier=3, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=2.0),
    ),
    "gemma": ("GemmaConfig", dict(_SIZES, head_dim=8)),
    "gemma2": (
        "Gemma2Config",
        dict(
            _SIZES,
            head_dim=8,
            sliding_window=WINDOW_TOKENS,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=6.0,
        ),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        dict(
            _SIZES,
            num_hidden_layers=3,
            head_dim=8,
            sliding_window=WINDOW_TOKENS,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    # Keys and values from a latent state; multipliers on embeddings, residuals and logits.
    "minicpm3": (
        "MiniCPM3Config",
        dict(_SIZES, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8),
    ),
    "mamba": ("MambaConfig", dict(_SMALL, state_size=8)),
    "mamba2": ("Mamba2Config", dict(_SMALL, state_size=16, num_heads=8, head_dim=8, n_groups=2, chunk_size=4)),
    # Attention and convolution layers in turn.
    "lfm2": ("Lfm2Config", dict(_SIZES, layer_types=["conv", "full_attention"])),
    # Attention and Mamba layers in turn; its scan starts from zero at every chunk.
    "jamba": (
        "JambaConfig",
        dict(
            _SIZES,
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=4,
            mamba_d_state=8,
            mamba_dt_rank=4,
        ),
    ),
    # Positions by a bias on the scores: not to be packed.
    "bloom": ("BloomConfig", dict(_SMALL, n_layer=2, n_head=4)),
    # Tells its window to the mask alone.
    "phimoe": ("PhimoeConfig", dict(_SIZES, sliding_window=WINDOW_TOKENS, num_local_experts=2)),
    # A table of embeddings in every layer, read by token id.
    "gemma3n": (
        "Gemma3nTextConfig",
        dict(
            _SIZES,
            num_hidden_layers=4,
            head_dim=8,
            sliding_window=WINDOW_TOKENS,
            laurel_rank=4,
            vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=0,
            layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=[0.0] * 4,
        ),
    ),
    # Keeps its state in its modules, whatever sequence is fed.
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        dict(_SIZES, head_dim=8, lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"]),
    ),
    # Turns keys by other angles in long sequences.
    "phi3": (
        "Phi3Config",
        dict(
            _SIZES,
            original_max_position_embeddings=CONTEXT_TOKENS // 2,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": CONTEXT_TOKENS // 2,
            },
        ),
    ),
}


def _make_model(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    name, settings = _ARCHITECTURES[architecture]
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings | changes), dtype=torch.float32)
    # Initial weights are so small that a model hardly reads its context, and every mistake would hide in rounding.
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(0, module.weight.shape[1] ** -0.5)
            elif isinstance(module, torch.nn.Embedding):
                module.weight.normal_(0, 1)
            elif isinstance(module, torch.nn.Conv1d):
                module.weight.normal_(0, 0.5)
        for name, parameter in model.named_parameters():
            if "correct_output_scale" in name or name.endswith("c_attn.weight") or name.endswith("c_proj.weight"):
                parameter.normal_(0, 0.3)
    return model.eval()


def _make_tokenizer(*, chat: bool = False, bos: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<s>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["a plain text about the law and the news of the day"] * 9, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    if bos:
        wrapped.bos_token = "<s>"
    if chat:
        wrapped.chat_template = CHATML
    return wrapped


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on two threads than on one, by far where the machine has other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """Return the function that makes the tiny model of an architecture."""
    return _make_model


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Return the function that makes a byte-level tokenizer, with a chat template or a start token if asked."""
    return _make_tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return _make_tokenizer()


@pytest.fixture(scope="session")
def tiny_backends(tiny_tokenizer: PreTrainedTokenizerFast) -> Callable[[str], TorchBackend]:
    """Return the function that gives the backend of an architecture's tiny model, made at its first use."""
    made: dict[str, TorchBackend] = {}

    def backend(architecture: str) -> TorchBackend:
        if architecture not in made:
            made[architecture] = TorchBackend(_make_model(architecture), tiny_tokenizer)
        return made[architecture]

    return backend
