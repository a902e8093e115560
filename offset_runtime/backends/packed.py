"""Attention over sequences of unequal length, packed one after another into one row.

The model sees a batch of shape (1, T): the new tokens of all sequences, without padding. Linear
layers and norms work on all T tokens at once; the attention function below gives each token only the
keys of its own sequence. So a mixed batch needs no padding mask, no position can be shifted by
another sequence, and prefill chunks and decode steps share one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from offset_runtime.errors import UnsupportedModelError

IMPLEMENTATION = "offset_packed"


class KeyValues(Protocol):
    """Keys and values of one sequence, by layer."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (H_kv, n, d_head) new keys and values; return all, (H_kv, length + n, d_head)."""


# By layer, of "keys" and "values": heads, head size, dtype and device.
KVForm = dict[int, dict[str, tuple[int, int, torch.dtype, torch.device]]]


class KVState:
    """The KV state of one sequence, in buffers that grow by a quarter.

    `extend` writes behind `length` and leaves `length` alone; `advanced` returns the state that holds
    what was written. A forward pass that fails half-way therefore changes nothing.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @classmethod
    def of(cls, length: int, keys: dict[int, Tensor], values: dict[int, Tensor]) -> KVState:
        """Return the state of `length` tokens that keeps `keys` and `values` of each layer, (H_kv, length, d_head)."""
        state = cls()
        state.length, state._keys, state._values = length, keys, values
        return state

    @property
    def form(self) -> KVForm:
        """The sizes of a token's keys and values, by layer."""
        return {
            layer: {
                kind: (tensor.shape[0], tensor.shape[2], tensor.dtype, tensor.device)
                for kind, tensor in (("keys", self._keys[layer]), ("values", self._values[layer]))
            }
            for layer in self.layers()
        }

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + keys.shape[1]
        all_keys = self._room(self._keys, layer, keys, end)
        all_values = self._room(self._values, layer, values, end)
        all_keys[:, self.length : end] = keys
        all_values[:, self.length : end] = values
        return all_keys[:, :end], all_values[:, :end]

    def advanced(self, tokens: int) -> KVState:
        """Return the state after `tokens` more tokens, in the same buffers; drop this one for it."""
        later = KVState()
        later.length = self.length + tokens
        later._keys, later._values = self._keys, self._values
        return later

    def truncate(self, tokens: int) -> None:
        self.length = tokens

    def fork(self, tokens: int) -> KVState:
        """Return a copy of the state of the first `tokens` tokens."""
        copy = KVState()
        copy.length = tokens
        copy._keys = {layer: _grown(t, tokens, tokens) for layer, t in self._keys.items()}
        copy._values = {layer: _grown(t, tokens, tokens) for layer, t in self._values.items()}
        return copy

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the committed keys and values of `layer`, each (H_kv, length, d_head)."""
        return self._keys[layer][:, : self.length], self._values[layer][:, : self.length]

    def layers(self) -> list[int]:
        """Return the layers that hold keys."""
        return sorted(self._keys)

    def bytes(self) -> int:
        tensors = [*self._keys.values(), *self._values.values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _room(self, buffers: dict[int, Tensor], layer: int, new: Tensor, end: int) -> Tensor:
        buffer = buffers.get(layer)
        if buffer is None or buffer.shape[1] < end:
            buffers[layer] = buffer = _grown(new if buffer is None else buffer, self.length, end)
        return buffer


def _grown(like: Tensor, length: int, end: int) -> Tensor:
    """A buffer with room for `end` tokens and some more, and the first `length` tokens of `like` (H, n, d) in it."""
    # A quarter more, not twice as much: the cache of prefixes keeps buffers whole.
    grown = like.new_empty((like.shape[0], end + max(64, end // 4), like.shape[2]))
    grown[:, :length] = like[:, :length]
    return grown


class FrozenPrefix:
    """Keys and values that gradients flow around: `extend` returns prefix and new keys joined.

    For training, where writing into a buffer would break the gradient. `state` None: no prefix.
    """

    def __init__(self, state: KVState | None) -> None:
        self._state = state if state is not None and state.length else None

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self._state is None:
            return keys, values
        past_keys, past_values = self._state.layer(layer)
        return torch.cat([past_keys, keys], dim=1), torch.cat([past_values, values], dim=1)


class Packing:
    """Which part of the packed row belongs to which sequence: (first token, tokens, its keys)."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, KeyValues]] = []
        self._tokens = 0

    def add(self, tokens: int, keys: KeyValues) -> None:
        self.parts.append((self._tokens, tokens, keys))
        self._tokens += tokens


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of packed sequences, in the signature transformers calls.

    `query` (1, H, T, d_head), `key` and `value` (1, H_kv, T, d_head); returns (1, T, H, d_head).
    """
    if packing is None or s_aux is not None:
        raise UnsupportedModelError("this model's attention cannot be packed (no packing given, or attention sinks)")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    _check_window(module, layer, sliding_window)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    outputs = []
    for start, tokens, keys in packing.parts:
        part = slice(start, start + tokens)
        all_keys, all_values = keys.extend(layer, key[0, :, part], value[0, :, part])
        outputs.append(_attend(query[0, :, part], all_keys, all_values, scale, sliding_window, softcap))
    return torch.cat(outputs, dim=1).transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


def _check_window(module: torch.nn.Module, layer: int, sliding_window: int | None) -> None:
    # A model that only tells its mask about a window would silently attend to everything here.
    types: Sequence[str] | None = getattr(module.config, "layer_types", None)
    configured = getattr(module.config, "sliding_window", None)
    windowed = configured is not None if types is None else types[layer] == "sliding_attention"
    if windowed and sliding_window is None:
        raise UnsupportedModelError("this model does not tell its attention about the sliding window")


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention of the last n of L positions: (H, n, d), (H_kv, L, d) -> (H, n, d)."""
    heads, tokens, size = query.shape
    if window is not None and keys.shape[1] > window + tokens - 1:
        # Older keys are outside the window of every query here.
        keys, values = keys[:, -(window + tokens - 1) :], values[:, -(window + tokens - 1) :]
    groups = heads // keys.shape[0]
    # Query heads that share a key head become extra query rows, so keys need not be repeated.
    grouped = query.reshape(keys.shape[0], groups * tokens, size)
    mask = None if tokens == 1 else _causal_mask(query, tokens, keys.shape[1], window).repeat(groups, 1)
    if softcap is not None:
        scores = torch.tanh(grouped @ keys.transpose(1, 2) * scale / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        mixed = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values
    else:
        mixed = functional.scaled_dot_product_attention(
            grouped.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=scale
        )[0]
    return mixed.reshape(heads, tokens, size)


def _causal_mask(like: Tensor, tokens: int, keys: int, window: int | None) -> Tensor:
    """Bool (n, L), True where query i (at position L - n + i) may read key j."""
    positions = torch.arange(keys, device=like.device)
    queries = positions[keys - tokens :, None]
    mask = positions <= queries
    return mask if window is None else mask & (positions > queries - window)
