"""The `torch` backend: any transformers causal language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from offset_runtime.backends import packed, torch_state
from offset_runtime.backends.base import (
    Capabilities,
    Chunk,
    SequenceId,
    check_chunks,
    fork_tokens,
)
from offset_runtime.backends.executors import Executor, Feed, PackedExecutor, RecurrentExecutor
from offset_runtime.backends.torch_tokenizer import TorchTokenizer
from offset_runtime.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from offset_runtime.identity import BaseIdentity, make_identity, sketch_row_ids
from offset_runtime.placement import Placement

# Largest difference, relative to the largest logit, between two ways of running the same tokens that
# float sums in another order explain (measured on SmolLM2 in float32: 1e-6; bfloat16 keeps 8 bits).
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_COARSE_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What takes the memory, dropped as one at `close`."""

    model: PreTrainedModel
    embedding: torch.nn.Embedding
    executor: Executor


class TorchBackend:
    """A frozen transformers model and the state of its sequences.

    `model` must be in eval mode. At construction the backend proves on it that feeding embeddings
    equals feeding tokens; a model where that does not hold is refused with `UnsupportedModelError`.
    """

    name = "torch"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        model.train(False)
        model.requires_grad_(False)
        executor = _prove_executor(model)
        embedding = cast(torch.nn.Embedding, model.get_input_embeddings())
        self._loaded: _Loaded | None = _Loaded(model, embedding, executor)
        self._states: dict[SequenceId, Any] = {}
        self._next_id = 0
        self._tokenizer = TorchTokenizer(tokenizer, _eos_token_ids(model, tokenizer))
        self._identity = self._make_identity()
        self._capabilities = Capabilities(
            context_tokens=_context_tokens(model.config),
            truncate=executor.truncate,
            split_prefill=executor.split_prefill,
            mixed_batch=executor.mixed_batch,
            save_state=executor.kv_form is not None,
        )

    @classmethod
    def load(cls, source: str | Path, *, dtype: str | None = None, device: str | None = None) -> TorchBackend:
        """Load a transformers folder or hub id.

        `dtype` None: float32 on CPUs (bfloat16 products are far slower on CPUs without hardware for
        them), the checkpoint's own on GPUs. `device` None: a GPU when there is one.

        Raises `InvalidRequestError` for a dtype or device that is unknown, not here or too small,
        `ModelNotFoundError` when transformers cannot read the model, and `UnsupportedModelError`.
        """
        where = _device(device)
        kind = _dtype(dtype) if dtype is not None else (torch.float32 if where.type == "cpu" else "auto")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(source))
            model = AutoModelForCausalLM.from_pretrained(str(source), dtype=kind)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise ModelNotFoundError(
                f"cannot load model {str(source)!r} with transformers: {_first_line(error)}. Expected a hub id, "
                "a folder with config.json, weights and tokenizer, or a .gguf file."
            ) from error
        try:
            moved = model.to(where)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise InvalidRequestError(
                f"model {str(source)!r} cannot be moved to device {str(where)!r}: {_first_line(error)}. "
                "Choose another device, or a dtype of fewer bytes such as 'bfloat16'."
            ) from error
        return cls(moved, tokenizer)

    @property
    def identity(self) -> BaseIdentity:
        return self._identity

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def tokenizer(self) -> TorchTokenizer:
        return self._tokenizer

    @property
    def model(self) -> PreTrainedModel:
        """The frozen model. Raises `InvalidRequestError` after `close`."""
        return self._open().model

    @property
    def executor(self) -> Executor:
        """How the model is run; training uses its differentiable pass."""
        return self._open().executor

    def allocate(self) -> SequenceId:
        return self._add(self.executor.new_state())

    def length(self, sequence: SequenceId) -> int:
        return int(self.state(sequence).length)

    def forward(self, chunks: Sequence[Chunk]) -> list[npt.NDArray[np.float32]]:
        if not chunks:
            return []
        check_chunks(
            chunks,
            self.length,
            hidden_size=self._identity.hidden_size,
            vocab_size=self._identity.vocab_size,
            context_tokens=self._capabilities.context_tokens,
        )
        with torch.inference_mode():
            feeds = [self._feed(chunk) for chunk in chunks]
            logits, states = self.executor.run(feeds)
            # One transfer for the whole batch, not one a sequence.
            flat = torch.cat(logits).float().cpu().numpy()
        for chunk, state in zip(chunks, states, strict=True):
            self._states[chunk.sequence] = state
        bounds = np.cumsum([len(rows) for rows in logits])[:-1]
        return list(np.split(flat, bounds))

    def fork(self, sequence: SequenceId, tokens: int | None = None) -> SequenceId:
        state = self.state(sequence)
        return self._add(state.fork(fork_tokens(tokens, state.length, truncates=self._capabilities.truncate)))

    def truncate(self, sequence: SequenceId, tokens: int) -> None:
        if not self._capabilities.truncate:
            raise InvalidRequestError("this model keeps recurrent state, which cannot be cut back; fork before instead")
        if not 0 <= tokens <= self.length(sequence):
            raise InvalidRequestError(f"cannot cut a sequence of {self.length(sequence)} tokens back to {tokens}")
        self.state(sequence).truncate(tokens)

    def free(self, sequence: SequenceId) -> None:
        self._states.pop(sequence, None)

    def state_key(self) -> str:
        self._kv_form()
        return torch_state.state_key(self.model)

    def export_state(self, sequence: SequenceId) -> dict[str, npt.NDArray[Any]]:
        """See `torch_state.exported`."""
        self._kv_form()
        return torch_state.exported(self.state(sequence))

    def import_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> SequenceId:
        form, limit = self._kv_form(), self._capabilities.context_tokens
        return self._add(torch_state.imported(tensors, form, limit))

    def state_bytes(self) -> int:
        return sum(map(self.sequence_bytes, self._states))

    def sequence_bytes(self, sequence: SequenceId) -> int:
        return int(self.state(sequence).bytes())

    def model_bytes(self) -> int:
        # Tied weights are one tensor under two names.
        unique = {p.data_ptr(): p.numel() * p.element_size() for p in self.model.parameters()}
        return sum(unique.values())

    def close(self) -> None:
        self._states.clear()
        self._loaded = None

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Input embeddings (n, d) of `token_ids`, scaled as the model scales them.

        Raises `InvalidRequestError` for an id outside the vocabulary.
        """
        embedding = self._open().embedding
        rows = embedding.weight.shape[0]
        # On a GPU a wrong id would end the process's use of the device, not this call alone.
        foreign = [token for token in token_ids if not 0 <= token < rows]
        if foreign:
            raise InvalidRequestError(f"token id {foreign[0]} is outside the vocabulary of {rows} tokens")
        ids = torch.tensor(list(token_ids), dtype=torch.long, device=embedding.weight.device)
        return embedding(ids)  # type: ignore[no-any-return]

    def _feed(self, chunk: Chunk) -> Feed:
        state = self.state(chunk.sequence)
        count = len(chunk.token_ids)
        embeddings = self.embed(chunk.token_ids)
        for placement in chunk.placements:
            add_rows(embeddings, placement, state.length)
        rows = {"none": range(0), "last": range(count - 1, count), "all": range(count)}[chunk.logits]
        return Feed(state, embeddings, rows)

    def state(self, sequence: SequenceId) -> Any:
        """State of an open sequence, in the executor's own form; for training."""
        self._open()
        try:
            return self._states[sequence]
        except KeyError:
            raise InvalidRequestError(f"sequence {sequence} is not open") from None

    def _kv_form(self) -> packed.KVForm:
        form = self.executor.kv_form
        if form is None:
            raise InvalidRequestError("this model keeps recurrent state, which cannot be saved or restored here")
        return form

    def _open(self) -> _Loaded:
        if self._loaded is None:
            raise InvalidRequestError("this backend is closed and its model released; load the model again")
        return self._loaded

    def _add(self, state: Any) -> SequenceId:
        self._next_id += 1
        self._states[self._next_id] = state
        return self._next_id

    def _make_identity(self) -> BaseIdentity:
        weight = self._open().embedding.weight
        rows = weight[sketch_row_ids(weight.shape[0])].float().cpu().numpy()
        return make_identity(self.model.config.model_type, weight.shape[0], rows, self._tokenizer.encode)


def add_rows(embeddings: Tensor, placement: Placement, start: int) -> None:
    """Add, in place, the rows of `placement` that fall on `embeddings` (n, d), which begin at position `start`."""
    first = max(placement.index, start)
    last = min(placement.stop, start + embeddings.shape[0])
    if first < last:
        rows = torch.from_numpy(placement.offset.tensor[first - placement.index : last - placement.index].copy())
        # Added in the wider of the two types, so that the rows are rounded once, with the sum.
        touched = embeddings[first - start : last - start]
        touched.copy_(touched + rows.to(embeddings.device))


def _prove_executor(model: PreTrainedModel) -> Executor:
    """Check that embeddings equal tokens, and return the fastest executor that computes what the model computes."""
    if model.config._attn_implementation == packed.IMPLEMENTATION:
        # Another backend runs a model of the same configuration; the plain pass needs a plain attention.
        model.set_attn_implementation("eager")
    vocabulary = cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    ids = torch.linspace(1, vocabulary - 2, 12, dtype=torch.float64).long()
    with torch.inference_mode():
        expected = _plain_logits(model, input_ids=ids.unsqueeze(0).to(model.device))
        embeddings = model.get_input_embeddings()(ids.to(model.device))
        try:
            found = _plain_logits(model, inputs_embeds=embeddings.unsqueeze(0))
        except Exception as error:
            raise _refused(model, f"feeding embeddings fails ({_first_line(error)})") from error
        if not _close(found, expected, embeddings.dtype):
            raise _refused(model, f"feeding embeddings changes the logits by up to {_gap(found, expected):.3g}")
        reasons = []
        original = model.config._attn_implementation
        for make in (PackedExecutor, RecurrentExecutor):
            try:
                executor: Executor = make(model)
                if _reproduces(executor, embeddings, expected):
                    return executor
                reasons.append(f"{make.__name__} computes other logits")
            except Exception as error:
                reasons.append(f"{make.__name__}: {_first_line(error)}")
            if model.config._attn_implementation != original:
                model.set_attn_implementation(original)
    raise _refused(model, "; ".join(reasons))


def _reproduces(executor: Executor, embeddings: Tensor, expected: Tensor) -> bool:
    """Whether prefill, then two single steps beside another sequence, give the plain logits `expected` (n, vocab)."""
    count = embeddings.shape[0]
    head = count - 2
    first, [state] = executor.run([Feed(executor.new_state(), embeddings[:head], range(head))])
    found = [first[0]]
    other: Any = executor.new_state()
    for position in range(head, count):
        step = [
            Feed(state, embeddings[position : position + 1], [0]),
            Feed(other, embeddings[: 1 if other.length else 3], [0]),
        ]
        logits, [state, other] = executor.run(step)
        found.append(logits[0])
    return _close(torch.cat(found), expected, embeddings.dtype)


def _plain_logits(model: PreTrainedModel, **inputs: Tensor) -> Tensor:
    return model(**inputs, use_cache=False).logits[0]  # type: ignore[no-any-return]


def _gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def _close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    # The model's own type decides: some models return float32 logits whatever they compute in.
    tolerance = _TOLERANCE.get(dtype, _COARSE_TOLERANCE)
    return _gap(found, expected) <= tolerance * max(1.0, float(expected.abs().max()))


def _refused(model: PreTrainedModel, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type {model.config.model_type!r} cannot take domain offsets: {why}. "
        "Offsets need a causal language model whose input embeddings fully replace its token ids."
    )


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = set(configured) if isinstance(configured, list) else {configured}
    ids.add(tokenizer.eos_token_id)
    return {int(i) for i in ids if i is not None}


def _context_tokens(config: Any) -> int:
    # Recurrent models name no limit; their state does not grow.
    limit = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    # "longrope" turns all keys by other angles once a sequence of the batch is longer than this: beyond it a
    # sequence would depend on those beside it, and on how its prompt was cut.
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            limit = min(limit, int(parameters.get("original_max_position_embeddings") or limit))
    return limit


def _device(name: str | None) -> torch.device:
    """Return the device `name`, tried out: a device that is not here would fail only once the model was read."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name is None else name
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequestError(f"unknown device {name!r}; expected one of {_devices_here()}") from error
    try:
        # There and back: "meta" takes tensors and returns none.
        torch.zeros(1, device=device).cpu()
    # What torch raises where its build lacks the device's kind, the machine the device, or it a driver package.
    except (AssertionError, RuntimeError, ImportError) as error:
        raise InvalidRequestError(
            f"device {name!r} cannot be used here: {_first_line(error)}. Expected one of {_devices_here()}; "
            "a GPU needs a build of torch for its kind."
        ) from error
    return device


def _devices_here() -> str:
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if kind else 0
    return ", ".join(["'cpu'", *(f"'{kind}:{index}'" for index in range(count))])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if found not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise InvalidRequestError(f"unknown dtype {name!r}; expected 'float32', 'bfloat16', 'float16' or 'float64'")
    return cast(torch.dtype, found)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
