"""The state of a packed torch sequence as numpy arrays, and what its model must be for them to be of use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from offset_runtime.backends.base import describe
from offset_runtime.backends.packed import KVForm, KVState
from offset_runtime.errors import InvalidRequestError

# Raised when the names, the layout or the meaning of the arrays changes.
_VERSION = 1
# Numbers of each weight that go into the key: evenly spaced, since first rows are often left alone by training.
_SAMPLES = 64
# Numpy has no bfloat16; its bits are kept as whole numbers.
_STAND_INS = {torch.bfloat16: torch.uint16}
# Fields of a configuration that say where a model is from and how it is run, and not what it computes.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}


def state_key(model: PreTrainedModel) -> str:
    """See `Backend.state_key`: a digest over configuration, samples of every weight and buffer, and dtype."""
    digest = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if key not in _INCIDENTAL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, weight in named:
        digest.update(f"|{name} {weight.dtype} {tuple(weight.shape)}".encode())
    for sample in _samples(weight.detach() for _, weight in named):
        digest.update(sample)
    # Another release of transformers may compute a model otherwise.
    return f"torch packed state {_VERSION}, transformers {transformers.__version__}, model {digest.hexdigest()}"


def exported(state: KVState) -> dict[str, npt.NDArray[Any]]:
    """Keys and values of each layer, (H_kv, length, d_head), as `keys.0`, `values.0`, `keys.1`, …; bits unchanged."""
    if not state.length:
        raise InvalidRequestError("an empty sequence has no state to export")
    arrays = {}
    for layer in state.layers():
        for kind, tensor in zip(("keys", "values"), state.layer(layer), strict=True):
            # Cloned: what is contiguous as it is would be the sequence's own memory.
            arrays[f"{kind}.{layer}"] = _bits(tensor.clone(memory_format=torch.contiguous_format))
    return arrays


def imported(
    tensors: Mapping[str, npt.NDArray[Any]], form: KVForm, device: torch.device, context_tokens: int
) -> KVState:
    """The state that `exported` gave, for a model whose state has this `form`.

    Raises `InvalidRequestError` for other names, shapes or dtypes, and for more than `context_tokens` tokens.
    """
    expected = {f"{kind}.{layer}": part for layer, parts in form.items() for kind, part in parts.items()}
    first = next(iter(tensors.values()), None)
    tokens = first.shape[1] if first is not None and first.ndim == 3 else 0
    fits = tensors.keys() == expected.keys() and 0 < tokens <= context_tokens
    fits = fits and all(
        tensors[name].shape == (heads, tokens, size) and tensors[name].dtype == _numpy_dtype(dtype)
        for name, (heads, size, dtype) in expected.items()
    )
    if not fits:
        example = next(iter(expected.items()), None)
        raise InvalidRequestError(
            f"no state of this model: {describe(tensors)}; expected {len(expected)} arrays such as {example} "
            f"(heads, head size, dtype), all of one length from 1 to {context_tokens} tokens"
        )
    keys: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}
    for layer, parts in form.items():
        for kind, into in (("keys", keys), ("values", values)):
            # Copied: the caller's arrays may change, or be read-only.
            tensor = torch.from_numpy(np.array(tensors[f"{kind}.{layer}"]))
            into[layer] = tensor.view(parts[kind][2]).to(device)
    return KVState.of(tokens, keys, values)


def _bits(tensor: Tensor) -> npt.NDArray[Any]:
    stand_in = _STAND_INS.get(tensor.dtype)
    found: npt.NDArray[Any] = (tensor if stand_in is None else tensor.view(stand_in)).cpu().numpy()
    return found


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return _bits(torch.empty(0, dtype=dtype)).dtype


def _samples(weights: Iterable[Tensor]) -> Iterator[bytes]:
    """The bits of evenly spaced numbers of each weight, fetched from each device at once."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for weight in weights:
        if weight.numel():
            where = torch.linspace(0, weight.numel() - 1, min(_SAMPLES, weight.numel()), dtype=torch.float64).long()
            found = weight.take(where.to(weight.device)).view(torch.uint8)
            by_device.setdefault(weight.device, []).append(found)
    for samples in by_device.values():
        yield torch.cat(samples).cpu().numpy().tobytes()
