"""Two ways to run a transformers model over many sequences: packed attention, or a state a sequence."""

from __future__ import annotations

import copy
import inspect
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
    # Whether states are `packed.KVState`, and of which form; known once the model was run.
    kv_form: packed.KVForm | None

    def new_state(self) -> Any:
        """Return the state of an empty sequence; it has a `length`."""

    def run(self, feeds: Sequence[Feed]) -> tuple[list[Tensor], list[Any]]:
        """Return each feed's logits (len(logit_rows), vocabulary) and its new state, which replaces the one given.

        Until it does, the state given still stands for what it did, so a failed pass leaves nothing behind.
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
        self.kv_form: packed.KVForm | None = None

    def new_state(self) -> packed.KVState:
        return packed.KVState()

    def run(self, feeds: Sequence[Feed]) -> tuple[list[Tensor], list[packed.KVState]]:
        logits = self._pass(feeds, [feed.state for feed in feeds])
        if self.kv_form is None:
            self.kv_form = feeds[0].state.form
        return logits, [feed.state.advanced(feed.embeddings.shape[0]) for feed in feeds]

    def forward_grad(self, feeds: Sequence[Feed]) -> list[Tensor]:
        return self._pass(feeds, [packed.FrozenPrefix(feed.state) for feed in feeds])

    def _pass(self, feeds: Sequence[Feed], keys: Sequence[packed.KeyValues]) -> list[Tensor]:
        packing = packed.Packing()
        positions: list[Tensor] = []
        wanted: list[int] = []
        base = 0
        for feed, sequence_keys in zip(feeds, keys, strict=True):
            tokens = feed.embeddings.shape[0]
            start = 0 if feed.state is None else feed.state.length
            packing.add(tokens, sequence_keys)
            positions.append(torch.arange(start, start + tokens))
            wanted.extend(base + row for row in feed.logit_rows)
            base += tokens
        device = feeds[0].embeddings.device
        keep = torch.tensor(wanted, dtype=torch.long, device=device)
        logits: Tensor = self._model(
            inputs_embeds=torch.cat([feed.embeddings for feed in feeds]).unsqueeze(0),
            position_ids=torch.cat(positions).unsqueeze(0).to(device),
            use_cache=False,
            logits_to_keep=keep,
            packing=packing,
        ).logits[0]
        if logits.shape[0] != len(wanted):
            # A few models do not know `logits_to_keep` and return every row.
            logits = logits[keep]
        return list(torch.split(logits, [len(feed.logit_rows) for feed in feeds]))


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The transformers cache of one sequence (None while empty)."""

    length: int = 0
    cache: DynamicCache | None = None

    def fork(self) -> RecurrentState:
        return RecurrentState(self.length, None if self.cache is None else _forked(self.cache))

    def bytes(self) -> int:
        if self.cache is None:
            return 0
        found = [value for layer in self.cache.layers for value in vars(layer).values()]
        found += [tensor for value in found if isinstance(value, dict) for tensor in value.values()]
        return sum(t.numel() * t.element_size() for t in found if isinstance(t, Tensor))


class RecurrentExecutor:
    """For models with recurrent state (Mamba, Mamba-2) and hybrids: one transformers cache a sequence.

    Prompts run one after the other; decode steps of purely recurrent models run as one batch, their
    states stacked. Later chunks of a sequence are fed token by token where the model's scan ignores
    the state it starts from.
    """

    truncate = False
    mixed_batch = False
    kv_form: packed.KVForm | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        layers = DynamicCache(config=model.config).layers
        self._stackable = bool(layers) and all(type(layer) is LinearAttentionLayer for layer in layers)
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
        state: RecurrentState = feed.state
        tokens = feed.embeddings.shape[0]
        cache = DynamicCache(config=self._model.config) if state.cache is None else _forked(state.cache)
        step = tokens if self.split_prefill or state.length == 0 else 1
        outputs = []
        for start in range(0, tokens, step):
            rows = [row - start for row in feed.logit_rows if start <= row < start + step]
            outputs.append(self._pass(cache, feed.embeddings[start : start + step].unsqueeze(0), rows)[0])
        return torch.cat(outputs), RecurrentState(state.length + tokens, cache)

    def _pass(self, cache: DynamicCache, embeddings: Tensor, rows: Sequence[int]) -> Tensor:
        """Feed `embeddings` (B, n, d), moving `cache` on; return the logits (B, len(rows), vocabulary) of `rows`."""
        keep = torch.tensor(list(rows), dtype=torch.long, device=embeddings.device)
        inputs = {"logits_to_keep": keep} if self._keeps_logits else {}
        logits: Tensor = self._model(inputs_embeds=embeddings, cache=cache, use_cache=True, **inputs).logits
        return logits if self._keeps_logits else logits[:, keep]

    def _decode_stacked(self, feeds: Sequence[Feed]) -> list[tuple[Tensor, RecurrentState]]:
        stacked = _stacked([feed.state.cache for feed in feeds])
        logits = self._pass(stacked, torch.stack([feed.embeddings for feed in feeds]), [0])
        return [
            (logits[row, : len(feed.logit_rows)], RecurrentState(feed.state.length + 1, _forked(stacked, row)))
            for row, feed in enumerate(feeds)
        ]

    def _continues_in_chunks(self) -> bool:
        """Measure whether two chunks give what one gives: some scans start from zero state whatever came before.

        Single steps do continue, so what they are off by is rounding; a chunk may be off by little more.
        (No fixed tolerance will do: the state can have a small effect on these few tokens.)
        """
        with torch.inference_mode():
            ids = torch.linspace(1, self._model.config.vocab_size - 2, 8, dtype=torch.float64).long()
            embeddings = self._model.get_input_embeddings()(ids.to(self._model.device)).unsqueeze(0)
            expected = self._pass(DynamicCache(config=self._model.config), embeddings, range(4, 8))
            head = DynamicCache(config=self._model.config)
            self._pass(head, embeddings[:, :4], [])
            by_step = _forked(head)
            steps = torch.cat([self._pass(by_step, embeddings[:, i : i + 1], [0]) for i in range(4, 8)], dim=1)
            found = self._pass(head, embeddings[:, 4:], range(4))
        rounding = torch.finfo(embeddings.dtype).eps * float(expected.abs().max())
        return _gap(found, expected) <= 4 * max(_gap(steps, expected), rounding)


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def _forked(cache: DynamicCache, row: int | None = None) -> DynamicCache:
    """Return a copy of `cache`, or of its batch row `row`, that can be moved on without changing the original.

    Attention layers replace their keys and values at each update, so those are shared; recurrent and
    convolution states are written in place, so those are copied.
    """
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in other.layers:
        for name, value in list(vars(layer).items()):
            if isinstance(value, dict):
                setattr(layer, name, {key: _own(item, row) for key, item in value.items()})
    return other


def _own(value: Any, row: int | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone() if row is None else value[row : row + 1].clone()


def _stacked(caches: Sequence[DynamicCache]) -> DynamicCache:
    """Return one cache whose batch rows are the `caches`, all of the same purely recurrent model."""
    stacked = _forked(caches[0])
    for index, layer in enumerate(stacked.layers):
        for name, states in vars(layer).items():
            if isinstance(states, dict):
                for key, value in list(states.items()):
                    if isinstance(value, Tensor):
                        states[key] = torch.cat([vars(cache.layers[index])[name][key] for cache in caches])
    return stacked


def _refuse_unpackable(config: Any) -> None:
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    foreign = types - {"full_attention", "sliding_attention"}
    if foreign:
        raise UnsupportedModelError(f"layers of type {', '.join(sorted(foreign))} cannot be packed")
