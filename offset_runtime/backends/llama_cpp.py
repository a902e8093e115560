"""The `llama_cpp` backend: any GGUF file, through llama-cpp-python's low-level API."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp import llama_cpp

from offset_runtime.backends.base import Capabilities, Chunk, SequenceId
from offset_runtime.backends.embedding_rule import EmbeddingRule, find_rule
from offset_runtime.backends.embedding_table import EmbeddingTable
from offset_runtime.backends.llama_batch import LlamaBatch
from offset_runtime.backends.llama_log import llama_log
from offset_runtime.backends.llama_tokenizer import Lease, LlamaTokenizer
from offset_runtime.backends.options import LlamaCppOptions
from offset_runtime.errors import (
    ContextOverflowError,
    GenerationError,
    InvalidRequestError,
    KVCacheFullError,
    ModelNotFoundError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from offset_runtime.identity import BaseIdentity, make_identity, sketch_row_ids

DEFAULT_N_CTX = 8192
# A KV cache has a multiple of this many cells.
_CELLS = 256

Logits = npt.NDArray[np.float32]

# Enough for attention and positions to show; a large model reads a few tens of tokens a second.
_PROBE_TOKENS = 4
_FLASH_ATTENTION = {
    None: llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    False: llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    True: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
}
_NO_SLOT = 1


@dataclass(slots=True)
class _Sequence:
    """An open sequence: llama.cpp's id for it, and its tokens."""

    slot: int
    length: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """The part of a chunk that one call holds."""

    chunk: Chunk
    first: int
    stop: int


class LlamaCppBackend:
    """A GGUF model and the state of its sequences in one unified KV cache.

    `path` is the file, or the first part of a split one. At construction the backend proves on the model that
    feeding embeddings equals feeding tokens, and finds out how an offset must be scaled.

    Raises `ModelNotFoundError` when llama.cpp cannot load the file, `OutOfMemoryError` when the context does
    not fit, `InvalidRequestError` for options that llama.cpp refuses, and `UnsupportedModelError` for a model
    that cannot take offsets.
    """

    name = "llama_cpp"

    def __init__(self, path: str | Path, options: LlamaCppOptions | None = None) -> None:
        self.path = Path(path)
        self.options = options or LlamaCppOptions()
        llama_log.install()
        self._table = EmbeddingTable(self.path)
        model = _load_model(self.path, self.options)
        self._model = Lease(model)
        self._context: Any = None
        try:
            _check_kind(self.path, model)
            self._context = _make_context(self.path, model, self.options)
            self._set_up(model)
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(cls, path: str | Path, options: LlamaCppOptions | None = None) -> LlamaCppBackend:
        """Load a GGUF file; see the class."""
        return cls(path, options)

    def _set_up(self, model: Any) -> None:
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = LlamaBatch(min(self.options.n_batch, int(llama_cpp.llama_n_batch(self._context))))
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._next_id = 0
        self._free_slots = list(range(int(llama_cpp.llama_n_seq_max(self._context))))[::-1]
        self._tokenizer = LlamaTokenizer(self._model)
        self._vocab_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        self._model_bytes = int(llama_cpp.llama_model_size(model))
        architecture = _metadata(model, "general.architecture") or "unknown"
        self._identity = make_identity(
            architecture,
            self._table.size,
            self._table.rows(sketch_row_ids(self._table.size)),
            self._tokenizer.encode,
        )
        recurrent = bool(llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model))
        cells = int(llama_cpp.llama_n_ctx(self._context))
        trained = int(llama_cpp.llama_model_n_ctx_train(model))
        self._capabilities = Capabilities(
            context_tokens=min(cells, trained) if trained > 0 else cells,
            kv_capacity_tokens=cells,
            max_sequences=len(self._free_slots),
            truncate=not recurrent,
        )
        # On a thread that ends: OpenMP keeps workers for every thread that ever computed, and those of two such
        # threads are more than there are cores, which makes each decode step of the engine's up to 1.7 times slower.
        with ThreadPoolExecutor(1) as pool:
            self._rule = pool.submit(self._prove, architecture, model).result()

    @property
    def identity(self) -> BaseIdentity:
        return self._identity

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def tokenizer(self) -> LlamaTokenizer:
        return self._tokenizer

    @property
    def context(self) -> Any:
        """llama.cpp's context, for the thread that owns the backend. Raises `InvalidRequestError` after `close`."""
        if self._context is None:
            raise InvalidRequestError("this backend is closed and its model released; load the model again")
        return self._context

    def slot(self, sequence: SequenceId) -> int:
        """llama.cpp's own id of an open sequence."""
        return self._get(sequence).slot

    def allocate(self) -> SequenceId:
        _ = self.context
        if not self._free_slots:
            raise KVCacheFullError(
                f"all {self._capabilities.max_sequences} sequences of the llama.cpp context are in use; "
                "wait until one ends, or load the model with a higher n_seq_max (at most 256)"
            )
        self._next_id += 1
        self._sequences[self._next_id] = _Sequence(self._free_slots.pop())
        return self._next_id

    def length(self, sequence: SequenceId) -> int:
        return self._get(sequence).length

    def forward(self, chunks: Sequence[Chunk]) -> list[Logits]:
        if len({chunk.sequence for chunk in chunks}) != len(chunks):
            raise InvalidRequestError("a forward pass takes at most one chunk a sequence")
        for chunk in chunks:
            self._check(chunk)
        found: dict[SequenceId, list[Logits]] = {chunk.sequence: [] for chunk in chunks}
        before = {chunk.sequence: self._get(chunk.sequence).length for chunk in chunks}
        try:
            for entries in self._calls(chunks):
                for entry, rows in zip(entries, self._call(entries), strict=True):
                    found[entry.chunk.sequence].append(rows)
        except BaseException:
            self._restore(before)
            raise
        return [np.concatenate(rows) if len(rows) > 1 else rows[0] for rows in found.values()]

    def fork(self, sequence: SequenceId) -> SequenceId:
        parent = self._get(sequence)
        child = self.allocate()
        # Unified cells: both now name the same ones, and no key is copied.
        llama_cpp.llama_memory_seq_cp(self._memory, parent.slot, self._get(child).slot, -1, -1)
        self._get(child).length = parent.length
        return child

    def truncate(self, sequence: SequenceId, tokens: int) -> None:
        if not self._capabilities.truncate:
            raise InvalidRequestError("this model keeps recurrent state, which cannot be cut back; fork before instead")
        state = self._get(sequence)
        if not 0 <= tokens <= state.length:
            raise InvalidRequestError(f"cannot cut a sequence of {state.length} tokens back to {tokens}")
        llama_cpp.llama_memory_seq_rm(self._memory, state.slot, tokens, -1)
        state.length = tokens

    def free(self, sequence: SequenceId) -> None:
        state = self._sequences.pop(sequence, None)
        if state is not None and self._context is not None:
            llama_cpp.llama_memory_seq_rm(self._memory, state.slot, -1, -1)
            self._free_slots.append(state.slot)

    def state_bytes(self) -> int:
        context = self.context
        return sum(int(llama_cpp.llama_state_seq_get_size(context, s.slot)) for s in self._sequences.values())

    def model_bytes(self) -> int:
        return self._model_bytes

    def close(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            llama_cpp.llama_free(context)
        self._model.release(llama_cpp.llama_model_free)

    def _get(self, sequence: SequenceId) -> _Sequence:
        _ = self.context
        try:
            return self._sequences[sequence]
        except KeyError:
            raise InvalidRequestError(f"sequence {sequence} is not open") from None

    def _check(self, chunk: Chunk) -> None:
        length, count = self._get(chunk.sequence).length, len(chunk.token_ids)
        if count == 0:
            raise InvalidRequestError("a chunk needs at least one token")
        foreign = [token for token in chunk.token_ids if not 0 <= token < self._vocab_size]
        if foreign:
            raise InvalidRequestError(f"token id {foreign[0]} is outside the vocabulary of {self._vocab_size} tokens")
        context = self._capabilities.context_tokens
        if length + count > context:
            raise ContextOverflowError(
                f"a sequence of {length} tokens + {count} more exceeds the context of {context} tokens"
            )

    def _calls(self, chunks: Sequence[Chunk]) -> Iterable[list[_Entry]]:
        """Cut `chunks` to calls of at most n_batch entries."""
        call: list[_Entry] = []
        room = self._batch.capacity
        for chunk in chunks:
            first = 0
            while first < len(chunk.token_ids):
                stop = min(len(chunk.token_ids), first + room)
                call.append(_Entry(chunk, first, stop))
                room -= stop - first
                first = stop
                if room == 0:
                    yield call
                    call, room = [], self._batch.capacity
        if call:
            yield call

    def _call(self, entries: Sequence[_Entry]) -> list[Logits]:
        batch, at = self._batch, 0
        for entry in entries:
            state, size = self._get(entry.chunk.sequence), entry.stop - entry.first
            batch.tokens[at : at + size] = entry.chunk.token_ids[entry.first : entry.stop]
            batch.positions[at : at + size] = np.arange(state.length, state.length + size)
            batch.slots[at : at + size] = state.slot
            batch.wanted[at : at + size] = entry.chunk.logits == "all"
            if entry.chunk.logits == "last" and entry.stop == len(entry.chunk.token_ids):
                batch.wanted[at + size - 1] = 1
            at += size
        status = batch.decode(self.context, at, self._embeddings(entries, at))
        if status != 0:
            raise self._failure(status, at)
        logits = self._logits(int(batch.wanted[:at].sum()))
        results, at = [], 0
        for entry in entries:
            self._get(entry.chunk.sequence).length += entry.stop - entry.first
            whole = entry.stop - entry.first if entry.chunk.logits == "all" else 0
            count = whole or int(entry.chunk.logits == "last" and entry.stop == len(entry.chunk.token_ids))
            results.append(logits[at : at + count])
            at += count
        return results

    def _embeddings(self, entries: Sequence[_Entry], size: int) -> npt.NDArray[np.float32] | None:
        """The input (size, d) where a row of an offset falls on it, else None: then tokens are fed.

        A call is all tokens or all embeddings. Feeding every entry as its row costs next to nothing, and saves
        the second pass over the weights that a call of their own for the offset's few rows would be.
        """
        added = []
        at = 0
        for entry in entries:
            start = self._get(entry.chunk.sequence).length
            stop = start + entry.stop - entry.first
            for placement in entry.chunk.placements:
                first, last = max(placement.index, start), min(placement.stop, stop)
                if first < last:
                    rows = placement.offset.tensor[first - placement.index : last - placement.index]
                    added.append((at + first - start, rows))
            at += stop - start
        if not added:
            return None
        embeddings = self._table.rows(self._batch.tokens[:size])
        if self._rule.row_factor != 1.0:
            embeddings *= np.float32(self._rule.row_factor)
        for place, rows in added:
            embeddings[place : place + len(rows)] += rows * np.float32(self._rule.offset_factor)
        return embeddings

    def _logits(self, count: int) -> Logits:
        """Logits (count, vocabulary) of the wanted entries of the last call, in their order."""
        if count == 0:
            llama_cpp.llama_synchronize(self.context)
            return np.zeros((0, self._vocab_size), np.float32)
        # Copied: llama.cpp writes the next call's logits over these.
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (count, self._vocab_size)).copy()

    def _failure(self, status: int, size: int) -> Exception:
        if status == _NO_SLOT:
            held = sum(state.length for state in self._sequences.values())
            return KVCacheFullError(
                f"no room for {size} more tokens in the KV cache of {self._capabilities.kv_capacity_tokens}: "
                f"{len(self._sequences)} sequences name {held}. Wait until one ends, or load with a higher n_ctx."
            )
        return GenerationError(f"llama.cpp failed with status {status} on {size} tokens: {llama_log.complaint()}")

    def _restore(self, lengths: dict[SequenceId, int]) -> None:
        """Cut sequences back to `lengths` after a call failed."""
        for sequence, length in lengths.items():
            state = self._sequences[sequence]
            if self._capabilities.truncate:
                llama_cpp.llama_memory_seq_rm(self._memory, state.slot, length, -1)
                state.length = length
            elif int(llama_cpp.llama_memory_seq_pos_max(self._memory, state.slot)) + 1 != length:
                # Recurrent state cannot be cut back: rather no sequence than one that has read too much.
                self.free(sequence)

    def _prove(self, architecture: str, model: Any) -> EmbeddingRule:
        """Find out how embeddings must be fed, or raise `UnsupportedModelError`."""
        count = min(_PROBE_TOKENS, self._batch.capacity, self._capabilities.context_tokens)
        ids = np.linspace(1, self._vocab_size - 2, count).astype(np.int32)
        rows = self._table.rows(ids)
        batch, slot = self._batch, self._free_slots[-1]
        batch.tokens[:count], batch.positions[:count] = ids, np.arange(count)
        batch.slots[:count], batch.wanted[:count] = slot, 1

        def feed(embeddings: npt.NDArray[np.float32] | None) -> Logits:
            status = batch.decode(self.context, count, embeddings)
            if status != 0:
                raise UnsupportedModelError(
                    f"{self.path.name} cannot be run: llama.cpp failed with status {status}: {llama_log.complaint()}"
                )
            logits = self._logits(count)
            llama_cpp.llama_memory_seq_rm(self._memory, slot, -1, -1)
            return logits

        declared = _metadata(model, f"{architecture}.embedding_scale")
        rule, gap = find_rule(
            architecture,
            self._identity.hidden_size,
            float(declared) if declared else None,
            feed(None),
            lambda factor: feed(rows * np.float32(factor)),
        )
        if rule is None:
            raise UnsupportedModelError(
                f"{self.path.name} (architecture {architecture!r}) cannot take domain offsets: feeding embeddings "
                f"changes the logits by {gap:.0%} of the largest one, however they are scaled. Offsets need a model "
                "whose input embeddings fully replace its token ids."
            )
        return rule


def _load_model(path: Path, options: LlamaCppOptions) -> Any:
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


def _check_kind(path: Path, model: Any) -> None:
    """Raise `UnsupportedModelError` for models whose input is more than a row of embeddings."""
    several = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE, llama_cpp.LLAMA_ROPE_TYPE_VISION)
    reason = None
    if llama_cpp.llama_model_has_encoder(model) or not llama_cpp.llama_model_has_decoder(model):
        reason = "it has an encoder, or no decoder"
    elif llama_cpp.llama_model_is_diffusion(model):
        reason = "it writes by diffusion and not from left to right"
    elif llama_cpp.llama_model_rope_type(model) in several:
        reason = "it reads several positions a token (M-RoPE)"
    if reason:
        raise UnsupportedModelError(
            f"{path.name} cannot take domain offsets: {reason}. Offsets need a causal language model that reads "
            "one embedding and one position a token."
        )


def _make_context(path: Path, model: Any, options: LlamaCppOptions) -> Any:
    cores = psutil.cpu_count(logical=False) or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    parameters = llama_cpp.llama_context_default_params()
    # Rounded as llama.cpp will: it ends the process where a context or a batch is smaller than n_seq_max.
    parameters.n_ctx = math.ceil((options.n_ctx or DEFAULT_N_CTX) / _CELLS) * _CELLS
    parameters.n_batch = max(min(options.n_batch, parameters.n_ctx), options.n_seq_max)
    parameters.n_ubatch = min(options.n_ubatch, options.n_batch, parameters.n_ctx)
    parameters.n_seq_max = options.n_seq_max
    parameters.n_threads = options.n_threads or min(cores, usable)
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
    architecture = _metadata(model, "general.architecture")
    width = llama_cpp.llama_model_n_embd(model) // max(llama_cpp.llama_model_n_head(model), 1)
    needed = 0.0
    for name, part in ((options.type_k, "key"), (options.type_v, "value")):
        size = int(_metadata(model, f"{architecture}.attention.{part}_length") or width)
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
        needed += n_ctx * layers * heads * size * block_bytes / block
    free = psutil.virtual_memory().available
    on_gpu = options.n_gpu_layers != 0 and llama_cpp.llama_supports_gpu_offload()
    if needed > free and not on_gpu:
        raise OutOfMemoryError(
            f"the KV cache of {path.name} with {_sizes(options, n_ctx)} takes {needed / 1e9:.1f} GB, but "
            f"{free / 1e9:.1f} GB of memory are free; lower n_ctx to at most {math.floor(n_ctx * free / needed)}"
        )


def _sizes(options: LlamaCppOptions, n_ctx: int) -> str:
    return f"n_ctx={n_ctx}, n_batch={options.n_batch}, type_k={options.type_k}, type_v={options.type_v}"


def _metadata(model: Any, key: str) -> str | None:
    """A value of the file's metadata as text, or None where it has none."""
    buffer = ctypes.create_string_buffer(256)
    found = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", errors="replace") if found >= 0 else None
