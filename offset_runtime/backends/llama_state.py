"""The state of one llama.cpp sequence as bytes, and what its model must be for them to be of use."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import llama_cpp as bindings
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp

from offset_runtime.backends.base import describe
from offset_runtime.backends.gguf_parts import GgufParts
from offset_runtime.backends.llama_log import llama_log
from offset_runtime.backends.options import LlamaCppOptions
from offset_runtime.errors import GenerationError, InvalidRequestError, KVCacheFullError

TENSOR_NAME = "state"
# Raised when what we keep beside llama.cpp's own bytes changes.
_VERSION = 1
# Evenly spaced samples of a file that go into its digest: 32 MiB of a large one, and all of one up to that.
_SAMPLES = 2048
_SAMPLE_BYTES = 16 * 1024
# What a GGUF file begins with: its settings, before the vocabulary.
_HEAD_BYTES = 1024 * 1024


def state_key(path: Path, options: LlamaCppOptions) -> str:
    """See `Backend.state_key`: digest of the weights, llama.cpp's build, and the form of the KV cache."""
    # llama.cpp's format has no version of its own that each change of it raises.
    build = f"llama-cpp-python {bindings.__version__}"
    form = f"{options.type_k}/{options.type_v}, flash_attn {options.flash_attn}"
    return f"llama_cpp state {_VERSION}, {build}, {form}, model {_digest(path)}"


def exported(context: Any, slot: int) -> dict[str, npt.NDArray[Any]]:
    """llama.cpp's bytes of a sequence, one uint8 array `state`.

    Raises `GenerationError` where it writes fewer than it said.
    """
    size = int(llama_cpp.llama_state_seq_get_size(context, slot))
    state = np.empty(size, np.uint8)
    written = int(llama_cpp.llama_state_seq_get_data(context, _address(state), size, slot))
    if written != size:
        raise GenerationError(
            f"llama.cpp wrote {written} bytes of a sequence's state, expected {size}: {llama_log.complaint()}"
        )
    return {TENSOR_NAME: state}


def imported(context: Any, slot: int, tensors: Mapping[str, npt.NDArray[Any]], most_tokens: int) -> int:
    """Put the bytes of `exported` into an empty sequence, and return how many tokens it then holds.

    Raises `InvalidRequestError` for bytes that llama.cpp does not take as a state of this model, or of more than
    `most_tokens` tokens, and `KVCacheFullError` where its cache has no room. The sequence must then be freed.
    """
    state = tensors.get(TENSOR_NAME)
    if set(tensors) != {TENSOR_NAME} or state is None or state.dtype != np.uint8 or state.ndim != 1:
        raise InvalidRequestError(
            f"no state of a llama.cpp sequence: {describe(tensors)}; expected {TENSOR_NAME!r} uint8 of one dimension"
        )
    llama_log.install()
    state = np.ascontiguousarray(state)
    taken = int(llama_cpp.llama_state_seq_set_data(context, _address(state), state.size, slot))
    memory = llama_cpp.llama_get_memory(context)
    tokens = int(llama_cpp.llama_memory_seq_pos_max(memory, slot)) + 1
    if taken == state.size and 0 < tokens <= most_tokens:
        return tokens
    reason = llama_log.complaint()
    if taken == 0 and "cells" in reason:
        raise KVCacheFullError(
            f"no room in llama.cpp's KV cache for a state of {state.size} bytes: {reason}. Wait until a request "
            "ends, or load with a higher n_ctx."
        )
    raise InvalidRequestError(
        f"llama.cpp takes {taken} of {state.size} bytes as a state of this model, which holds {tokens} tokens "
        f"(at most {most_tokens}): {reason}"
    )


def _address(state: npt.NDArray[Any]) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _digest(path: Path) -> str:
    """Over size and samples of each file of the model: a change of the weights touches more than a sample's gap."""
    digest = hashlib.sha256()
    for part in GgufParts.of(path).paths():
        size = part.stat().st_size
        digest.update(f"|{size}|".encode())
        with part.open("rb") as stream:
            digest.update(stream.read(_HEAD_BYTES))
            for start in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
