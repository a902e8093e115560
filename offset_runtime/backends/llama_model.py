"""A GGUF file loaded by llama.cpp, and a context on it; what llama.cpp refuses becomes an error of ours."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import Any

import psutil
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp import llama_cpp

from offset_runtime.backends.llama_log import llama_log
from offset_runtime.backends.options import LlamaCppOptions
from offset_runtime.errors import InvalidRequestError, ModelNotFoundError, OutOfMemoryError, UnsupportedModelError

DEFAULT_N_CTX = 8192
# A KV cache has a multiple of this many cells.
_CELLS = 256

_FLASH_ATTENTION = {
    None: llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    False: llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    True: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
}


def load_model(path: Path, options: LlamaCppOptions) -> Any:
    """Return llama.cpp's pointer to the model in `path`. Raises `ModelNotFoundError`."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = options.n_gpu_layers
    modes = {
        (False, False): llama_cpp.LLAMA_LOAD_MODE_NONE,
        (True, False): llama_cpp.LLAMA_LOAD_MODE_MMAP,
        (False, True): llama_cpp.LLAMA_LOAD_MODE_MLOCK,
        (True, True): llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
    }
    parameters.load_mode = modes[options.use_mmap, options.use_mlock]
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        raise ModelNotFoundError(
            f"llama.cpp cannot load {path}: {llama_log.complaint()}. Expected a whole GGUF file of an architecture "
            "that the installed llama-cpp-python knows; get the file again, or upgrade llama-cpp-python."
        )
    return model


def check_kind(path: Path, model: Any) -> None:
    """Raise `UnsupportedModelError` for models whose input is more than a row of embeddings."""
    several = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE, llama_cpp.LLAMA_ROPE_TYPE_VISION)
    reason = None
    if llama_cpp.llama_model_has_encoder(model) or not llama_cpp.llama_model_has_decoder(model):
        reason = "it has an encoder, or no decoder"
    elif llama_cpp.llama_model_is_diffusion(model):
        reason = "it writes by diffusion and not from left to right"
    elif llama_cpp.llama_model_rope_type(model) in several:
        reason = "it reads several positions a token (M-RoPE)"
    elif llama_cpp.llama_vocab_type(llama_cpp.llama_model_get_vocab(model)) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        reason = "it holds no vocabulary"
    if reason:
        raise UnsupportedModelError(
            f"{path.name} cannot take domain offsets: {reason}. Offsets need a causal language model that reads "
            "one embedding and one position a token."
        )


def default_threads() -> int:
    """Threads where none are asked for, of decode and of prefill: one a physical core that this process may use."""
    cores = psutil.cpu_count(logical=False) or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return min(cores, usable)


def make_context(path: Path, model: Any, options: LlamaCppOptions) -> Any:
    """Return llama.cpp's pointer to a context on `model`, with one KV cache for all sequences.

    Raises `OutOfMemoryError` where it does not fit, and `InvalidRequestError` for options that llama.cpp refuses.
    """
    parameters = llama_cpp.llama_context_default_params()
    # Rounded as llama.cpp will: it ends the process where a context or a batch is smaller than n_seq_max.
    parameters.n_ctx = math.ceil((options.n_ctx or DEFAULT_N_CTX) / _CELLS) * _CELLS
    parameters.n_batch = max(min(options.n_batch, parameters.n_ctx), options.n_seq_max)
    parameters.n_ubatch = min(options.n_ubatch, options.n_batch, parameters.n_ctx)
    parameters.n_seq_max = options.n_seq_max
    parameters.n_threads = options.n_threads or default_threads()
    parameters.n_threads_batch = options.n_threads_batch or parameters.n_threads
    parameters.flash_attn_type = _FLASH_ATTENTION[options.flash_attn]
    parameters.type_k = GGMLQuantizationType[options.type_k.upper()]
    parameters.type_v = GGMLQuantizationType[options.type_v.upper()]
    # One pool of cells for all sequences, so that a fork shares its parent's.
    parameters.kv_unified = True
    parameters.no_perf = True
    _check_memory(path, model, options, parameters.n_ctx)
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        reason = llama_log.complaint()
        kind = OutOfMemoryError if "alloc" in reason else InvalidRequestError
        raise kind(
            f"llama.cpp cannot set up a context for {path.name} with {_sizes(options, parameters.n_ctx)}: {reason}. "
            "Lower n_ctx or n_batch, or choose other types for the KV cache."
        )
    return context


def _check_memory(path: Path, model: Any, options: LlamaCppOptions, n_ctx: int) -> None:
    """Refuse a KV cache larger than the free memory: llama.cpp fills it at once, and the system would end us."""
    heads, layers = llama_cpp.llama_model_n_head_kv(model), llama_cpp.llama_model_n_layer(model)
    architecture = metadata(model, "general.architecture")
    width = llama_cpp.llama_model_n_embd(model) // max(llama_cpp.llama_model_n_head(model), 1)
    needed = 0.0
    for name, part in ((options.type_k, "key"), (options.type_v, "value")):
        size = int(metadata(model, f"{architecture}.attention.{part}_length") or width)
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
        needed += n_ctx * layers * heads * size * block_bytes / block
    free = psutil.virtual_memory().available
    on_gpu = options.n_gpu_layers != 0 and llama_cpp.llama_supports_gpu_offload()
    if needed > free and not on_gpu:
        raise OutOfMemoryError(
            f"the KV cache of {path.name} with {_sizes(options, n_ctx)} takes {needed / 1e9:.1f} GB, but "
            f"{free / 1e9:.1f} GB of memory are free; lower n_ctx to at most "
            f"{math.floor(n_ctx * free / needed) // _CELLS * _CELLS}"
        )


def _sizes(options: LlamaCppOptions, n_ctx: int) -> str:
    return f"n_ctx={n_ctx}, n_batch={options.n_batch}, type_k={options.type_k}, type_v={options.type_v}"


def metadata(model: Any, key: str) -> str | None:
    """A value of the file's metadata as text, or None where it has none."""
    buffer = ctypes.create_string_buffer(256)
    found = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", errors="replace") if found >= 0 else None
