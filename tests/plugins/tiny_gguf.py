"""GGUF files of the tiny models, so that torch and llama.cpp run the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import MakeModel
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

TinyGguf = Callable[[str], Path]
TinyGgufModel = Callable[[str], PreTrainedModel]

# Rows of q and k are stored as llama.cpp turns them: the two numbers of a pair side by side.
_PAIRS_SIDE_BY_SIDE = ("llama", "granite", "minicpm")
# These multiply a normalised state by 1 + weight in transformers, by the weight in llama.cpp.
_NORMS_FROM_ZERO = ("gemma", "gemma2", "gemma3")

# What llama.cpp fixes in its code, or lacks, for an architecture: the tiny model, and what changes in it.
_MADE_FROM: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    # Positions in three dimensions, which are equal in text: the weights of qwen2 do.
    "qwen2vl": ("qwen2", {"use_sliding_window": False}),
    # Its equations are Granite's, but for the scale of attention.
    "minicpm": ("granite", {"attention_multiplier": 8**-0.5}),
    # Made to be loaded and refused: its logits are not those of torch.
    "gemma3n": (
        "gemma3n",
        {"laurel_rank": 64, "hidden_size_per_layer_input": 256, "activation_sparsity_pattern": [0.95] * 4},
    ),
}


def _rope_base(config: PreTrainedConfig, layer_type: str) -> float:
    parameters = config.rope_parameters
    return float(parameters.get(layer_type, parameters)["rope_theta"])


def _add_attention(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_rope_base(config, "full_attention"))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_window(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_sliding_window(config.sliding_window)
    # Sliding and full layers in turn, the first one sliding.
    writer.add_sliding_window_pattern(2)
    writer.add_rope_freq_base_swa(_rope_base(config, "sliding_attention"))


def _add_softcaps(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_multipliers(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _add_latent_attention(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.qk_head_dim)
    writer.add_value_length(config.v_head_dim)


def _add_alternating_updates(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)


def _add_position_sections(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_rope_dimension_sections([1, 1, 2, 0])


def _add_state_space(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)


def _add_short_convolutions(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    # The model makes a multiple of this of the size it is asked for.
    writer.add_feed_forward_length(config.block_multiple_of)
    writer.add_head_count(config.num_attention_heads)
    # Layers without keys are convolutions.
    writer.add_head_count_kv([0 if kind == "conv" else config.num_key_value_heads for kind in config.layer_types])
    writer.add_rope_freq_base(_rope_base(config, "full_attention"))
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)


AddMetadata = Callable[[gguf.GGUFWriter, PreTrainedConfig], None]

_METADATA: dict[str, tuple[AddMetadata, ...]] = {
    "llama": (_add_attention,),
    "qwen2": (_add_attention,),
    "qwen3": (_add_attention,),
    "qwen2vl": (_add_attention, _add_position_sections),
    "granite": (_add_attention, _add_multipliers),
    "minicpm": (_add_attention, _add_multipliers),
    "minicpm3": (_add_attention, _add_latent_attention),
    "gemma": (_add_attention,),
    "gemma2": (_add_attention, _add_window, _add_softcaps),
    "gemma3": (_add_attention, _add_window),
    "gemma3n": (_add_attention, _add_window, _add_alternating_updates),
    "mamba": (_add_state_space,),
    "lfm2": (_add_short_convolutions,),
}


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    # The model has more rows than the tokenizer has tokens.
    tokens = [f"[unused{i}]" for i in range(config.vocab_size)]
    types = [gguf.TokenType.UNUSED] * config.vocab_size
    for token, i in tokenizer.get_vocab().items():
        tokens[i] = token
        types[i] = gguf.TokenType.CONTROL if i in tokenizer.added_tokens_decoder else gguf.TokenType.NORMAL
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(tokenizer.bos_token is not None)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights by transformers' names, but Gemma 3n's numbered projections stacked as GGUF has them."""
    weights = dict(model.state_dict())
    for name in ("model.altup_projections", "model.altup_unembed_projections"):
        numbered = [key for key in weights if key.startswith(f"{name}.")]
        if numbered:
            weights[f"{name}.weight"] = torch.stack([weights.pop(key) for key in numbered])
    for name in [key for key in weights if key.endswith("correct_output_scale")]:
        weights[f"{name}.weight"] = weights.pop(name)
    return weights


def _converted(name: str, tensor: torch.Tensor, architecture: str, config: PreTrainedConfig) -> torch.Tensor:
    """Return the tensor as llama.cpp's graph of this architecture reads it."""
    if name.endswith("norm.weight") and architecture in _NORMS_FROM_ZERO:
        return tensor + 1
    if name.endswith(("q_proj.weight", "k_proj.weight")) and architecture in _PAIRS_SIDE_BY_SIDE:
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    if name.endswith("A_log"):
        return -tensor.exp()
    return tensor.squeeze()


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
    config = model.config
    arch = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in _weights(model).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise ValueError(f"{architecture}: GGUF has no name for the tensor {name!r}")
        yield stored, _converted(name, tensor, architecture, config).float().contiguous().numpy()


def write_gguf(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path, architecture: str | None = None
) -> Path:
    """Write a model and a byte-level BPE tokenizer to a GGUF file in float32.

    `architecture`: its name in GGUF; None: the model's own. Returns `path`.
    """
    config = model.config
    architecture = architecture or config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    for add in _METADATA[architecture]:
        add(writer, config)
    _add_vocabulary(writer, tokenizer, config)
    for name, values in _tensors(model, architecture):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_gguf_model(make_model: MakeModel) -> TinyGgufModel:
    """Return the function that gives the torch model whose weights an architecture's tiny GGUF file holds."""
    made: dict[str, PreTrainedModel] = {}

    def give(architecture: str) -> PreTrainedModel:
        if architecture not in made:
            name, changes = _MADE_FROM.get(architecture, (architecture, {}))
            model = make_model(name, **changes)
            # Norms and biases are all alike at first, and one written in the place of another would not show.
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.2 * torch.randn_like(parameter))
            made[architecture] = model
        return made[architecture]

    return give


@pytest.fixture(scope="session")
def tiny_gguf(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_gguf_model: TinyGgufModel,
    make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> TinyGguf:
    """Return the function that gives the path of an architecture's tiny GGUF file, written at its first use."""
    folder = tmp_path_factory.mktemp("gguf")

    def give(architecture: str) -> Path:
        path = folder / f"{architecture}.gguf"
        if not path.exists():
            write_gguf(tiny_gguf_model(architecture), make_tokenizer(chat=True), path, architecture)
        return path

    return give
