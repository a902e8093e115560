"""Quantised GGUF files in float32."""

from __future__ import annotations

from pathlib import Path

from llama_cpp import llama_cpp


def dequantised(source: Path, target: Path) -> Path:
    """Write the weights of the GGUF file `source` in float32.

    Products of quantised numbers depend on the shape of a batch by more than what tests of the contract look for.
    """
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
    assert llama_cpp.llama_model_quantize(bytes(source), bytes(target), parameters) == 0
    return target
