"""Two ways to run a transformers model over many sequences: packed attention, or a state a sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from offset_runtime.backends import packed
from offset_runtime.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Feed:
    """One sequence's next embeddings (n, d), its state, and which of its rows need logits."""

    state: Any
    embeddings: Tensor
    logit_rows: Sequence[int]


class Executor(Protocol):
    """Runs the model on the new tokens of many sequences."""

    truncate: bool
    split_prefill: bool
    mixed_batch: bool

    def new_state(self) -> Any:
        """Return the state of an empty sequence; it has a `length`."""

    def run(self, feeds: Sequence[Feed]) -> tuple[list[Tensor], list[Any]]:
        """Return each feed's logits (len(logit_rows), vocabulary) and its new state.

        States given are not changed in a way that a failed pass could leave behind.
        """

    def forward_grad(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Return each feed's logits as `run` does, differentiable in `embeddings`; no state changes."""


class PackedExecutor:
    """For attention-only models: all sequences in one packed row (see `packed`)."""

    truncate = True
    split_prefill = True
    mixed_batch = True

    def __init__(self, model: PreTrainedModel) -> None:
        _refuse_unpackable(model.config)
        model.set_attn_implementation(packed.IMPLEMENTATION)
        self._model = model

    def new_state(self) -> packed.KVState:
        return packed.KVState()

    def run(self, feeds: Sequence[Feed]) -> tuple[list[Tensor], list[packed.KVState]]:
        logits = self._pass(feeds, [feed.state for feed in feeds])
        for feed in feeds:
            feed.state.commit(feed.embeddings.shape[0])
        return logits, [feed.state for feed in feeds]

    def forward_grad(self, feeds: Sequence[Feed]) -> list[Tensor]:
        return self._pass(feeds, [packed.FrozenPrefix(feed.state) for feed in feeds])

    def _pass(self, feeds: Sequence[Feed], keys: Sequence[packed.KeyValues]) -> list[Tensor]:
        packing = packed.Packing()
        positions, wanted, base = [], [], 0
        for feed, sequence_keys in zip(feeds, keys, strict=True):
            tokens = feed.embeddings.shape[0]
            start = 0 if feed.state is None else feed.state.length
            packing.add(tokens, sequence_keys)
            positions.append(torch.arange(start, start + tokens))
            wanted.extend(base + row for row in feed.logit_rows)
            base += tokens
        device = feeds[0].embeddings.device
        out = self._model(
            inputs_embeds=torch.cat([feed.embeddings for feed in feeds]).unsqueeze(0),
            position_ids=torch.cat(positions).unsqueeze(0).to(device),
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=device),
            packing=packing,
        )
        return list(out.logits[0].split([len(feed.logit_rows) for feed in feeds]))


@dataclass(slots=True)
class RecurrentState:
    """The transformers cache of one sequence (None while empty)."""

    length: int = 0
    cache: DynamicCache | None = None

    def fork(self) -> RecurrentState:
        return RecurrentState(self.length, copy.deepcopy(self.cache))

    def bytes(self) -> int:
        return 0 if self.cache is None else sum(t.numel() * t.element_size() for t in _cache_tensors(self.cache))


class RecurrentExecutor:
    """For models with recurrent state (Mamba, Mamba-2) and hybrids: one transformers cache a sequence.

    Prompts run one after the other; decode steps of purely recurrent models run as one batch, their
    states stacked. Later chunks of a sequence are fed token by token where the model's scan ignores
    the state it starts from.
    """

    truncate = False
    mixed_batch = False

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.split_prefill = True
        cache = DynamicCache(config=model.config)
        self._stackable = bool(cache.layers) and all(type(layer) is LinearAttentionLayer for layer in cache.layers)
        self.split_prefill = self._continues_in_chunks()

    def new_state(self) -> RecurrentState:
        return RecurrentState()

    def run(self, feeds: Sequence[Feed]) -> tuple[list[Tensor], list[RecurrentState]]:
        single = [i for i, f in enumerate(feeds) if self._stackable and f.state.length and f.embeddings.shape[0] == 1]
        results: dict[int, tuple[Tensor, RecurrentState]] = {}
        if len(single) > 1:
            results.update(zip(single, self._decode_stacked([feeds[i] for i in single]), strict=True))
        for i, feed in enumerate(feeds):
            if i not in results:
                results[i] = self._run_one(feed)
        return [results[i][0] for i in range(len(feeds))], [results[i][1] for i in range(len(feeds))]

    def forward_grad(self, feeds: Sequence[Feed]) -> list[Tensor]:
        # Causal models: padding on the right reaches no earlier position.
        if any(feed.state is not None and feed.state.length for feed in feeds):
            raise UnsupportedModelError("a recurrent model cannot train behind a frozen prefix")
        batch = torch.nn.utils.rnn.pad_sequence([feed.embeddings for feed in feeds], batch_first=True)
        logits = self._model(inputs_embeds=batch, use_cache=False).logits
        return [logits[i, list(feed.logit_rows)] for i, feed in enumerate(feeds)]

    def _run_one(self, feed: Feed) -> tuple[Tensor, RecurrentState]:
        state = feed.state.fork()
        if state.cache is None:
            state.cache = DynamicCache(config=self._model.config)
        at_once = self.split_prefill or state.length == 0
        pieces = [feed.embeddings] if at_once else list(feed.embeddings.split(1))
        outputs = [self._step(state, piece) for piece in pieces]
        return torch.cat(outputs)[list(feed.logit_rows)], state

    def _step(self, state: RecurrentState, embeddings: Tensor) -> Tensor:
        out = self._model(inputs_embeds=embeddings.unsqueeze(0), cache=state.cache, use_cache=True)
        state.length += embeddings.shape[0]
        return out.logits[0]  # type: ignore[no-any-return]

    def _decode_stacked(self, feeds: Sequence[Feed]) -> list[tuple[Tensor, RecurrentState]]:
        states = [feed.state for feed in feeds]
        stacked = copy.deepcopy(states[0].cache)
        for index, layer in enumerate(stacked.layers):
            for store, value in _layer_stores(layer):
                if value[store] is not None:
                    parts = [_layer_store(s.cache.layers[index], value, layer)[store] for s in states]
                    value[store] = torch.cat(parts)
        batch = torch.stack([feed.embeddings for feed in feeds])
        logits = self._model(inputs_embeds=batch, cache=stacked, use_cache=True).logits
        results = []
        for row, feed in enumerate(feeds):
            own = _take_row(stacked, feed.state.cache, row)
            results.append((logits[row, list(feed.logit_rows)], RecurrentState(feed.state.length + 1, own)))
        return results

    def _continues_in_chunks(self) -> bool:
        """Measure whether two chunks give what one gives: some scans start from zero state whatever came before."""
        ids = torch.arange(1, 9, device=self._model.device).unsqueeze(0) % self._model.config.vocab_size
        with torch.inference_mode():
            embeddings = self._model.get_input_embeddings()(ids)[0]
            whole, split = RecurrentState(), RecurrentState()
            for state in (whole, split):
                state.cache = DynamicCache(config=self._model.config)
            expected = self._step(whole, embeddings)[-1]
            self._step(split, embeddings[:4])
            found = self._step(split, embeddings[4:])[-1]
        return bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())))


def _layer_stores(layer: LinearAttentionLayer) -> list[tuple[int, dict[int, Tensor | None]]]:
    stores = []
    for states in (layer.conv_states, layer.recurrent_states):
        stores.extend((index, states) for index in states)
    return stores


def _layer_store(
    other: LinearAttentionLayer, states: dict[int, Tensor | None], layer: LinearAttentionLayer
) -> dict[int, Any]:
    return other.conv_states if states is layer.conv_states else other.recurrent_states


def _take_row(stacked: DynamicCache, template: DynamicCache, row: int) -> DynamicCache:
    own = copy.copy(template)
    own.layers = []
    for layer in stacked.layers:
        mine = copy.copy(layer)
        mine.has_previous_state = dict(layer.has_previous_state)
        mine.conv_states = {i: None if t is None else t[row : row + 1].clone() for i, t in layer.conv_states.items()}
        mine.recurrent_states = {
            i: None if t is None else t[row : row + 1].clone() for i, t in layer.recurrent_states.items()
        }
        own.layers.append(mine)
    return own


def _cache_tensors(cache: DynamicCache) -> list[Tensor]:
    found: list[Tensor] = []
    for layer in cache.layers:
        for name in ("keys", "values"):
            if isinstance(getattr(layer, name, None), Tensor):
                found.append(getattr(layer, name))
        if isinstance(layer, LinearAttentionLayer):
            found.extend(states[i] for i, states in _layer_stores(layer) if states[i] is not None)  # type: ignore[misc]
    return found


def _refuse_unpackable(config: Any) -> None:
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    foreign = types - {"full_attention", "sliding_attention"}
    if foreign:
        raise UnsupportedModelError(f"layers of type {', '.join(sorted(foreign))} cannot be packed")
