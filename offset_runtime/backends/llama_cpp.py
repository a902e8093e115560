"""The `llama_cpp` backend: any GGUF file, through llama-cpp-python's low-level API."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp

from offset_runtime.backends import llama_state
from offset_runtime.backends.base import Capabilities, Chunk, SequenceId, check_chunks
from offset_runtime.backends.embedding_rule import EmbeddingRule, add_rows, find_rule
from offset_runtime.backends.embedding_table import EmbeddingTable
from offset_runtime.backends.llama_batch import LlamaBatch
from offset_runtime.backends.llama_log import llama_log
from offset_runtime.backends.llama_model import check_kind, load_model, make_context, metadata
from offset_runtime.backends.llama_tokenizer import Lease, LlamaTokenizer
from offset_runtime.backends.options import LlamaCppOptions
from offset_runtime.errors import (
    GenerationError,
    InvalidRequestError,
    KVCacheFullError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from offset_runtime.identity import BaseIdentity, make_identity, sketch_row_ids

Logits = npt.NDArray[np.float32]

# Enough for attention and positions to show; a large model reads a few tens of tokens a second.
_PROBE_TOKENS = 4
# What llama_decode returns where the cache has no room, and where memory for the computation has none.
_NO_SLOT = 1
_NO_MEMORY = -2


@dataclass(slots=True)
class _Sequence:
    """An open sequence: llama.cpp's id for it, and its tokens."""

    slot: int
    length: int = 0


@dataclass(slots=True)
class _Part:
    """The tokens of a chunk that one call holds, and how many of its last positions' logits are asked for."""

    chunk: Chunk
    token_ids: Sequence[int]
    wanted: int


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
        model = load_model(self.path, self.options)
        self._model = Lease(model)
        self._context: Any = None
        self._state_key: str | None = None
        try:
            check_kind(self.path, model)
            self._context = make_context(self.path, model, self.options)
            self._set_up(model)
        except BaseException:
            self.close()
            raise

    def _set_up(self, model: Any) -> None:
        self._memory = llama_cpp.llama_get_memory(self._context)
        windowed = int(llama_cpp.llama_model_n_swa(model)) > 0
        # With a sliding window llama.cpp uses the cells of positions that left it again, at once for all the
        # computations of a call: one takes the keys that another still reads. So there a call is one computation.
        limit = llama_cpp.llama_n_ubatch(self._context) if windowed else llama_cpp.llama_n_batch(self._context)
        self._batch = LlamaBatch(min(self.options.n_batch, int(limit)))
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._next_id = 0
        self._free_slots = list(range(int(llama_cpp.llama_n_seq_max(self._context))))[::-1]
        self._tokenizer = LlamaTokenizer(self._model)
        self._vocab_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        self._model_bytes = int(llama_cpp.llama_model_size(model))
        architecture = metadata(model, "general.architecture") or "unknown"
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
            # What left a window is gone, and a shorter sequence would miss it.
            truncate=not (recurrent or windowed),
            save_state=True,
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
        check_chunks(
            chunks,
            self.length,
            hidden_size=self._table.width,
            vocab_size=self._vocab_size,
            context_tokens=self._capabilities.context_tokens,
        )
        found: dict[SequenceId, list[Logits]] = {chunk.sequence: [] for chunk in chunks}
        before = {chunk.sequence: self._get(chunk.sequence).length for chunk in chunks}
        try:
            for parts in self._calls(chunks):
                for part, rows in zip(parts, self._call(parts), strict=True):
                    found[part.chunk.sequence].append(rows)
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
            raise InvalidRequestError(
                "a sequence of this model, which has recurrent state or a sliding window, cannot be cut back; "
                "fork before instead"
            )
        state = self._get(sequence)
        if not 0 <= tokens <= state.length:
            raise InvalidRequestError(f"cannot cut a sequence of {state.length} tokens back to {tokens}")
        self._cut(state, tokens)

    def free(self, sequence: SequenceId) -> None:
        state = self._sequences.pop(sequence, None)
        if state is not None and self._context is not None:
            llama_cpp.llama_memory_seq_rm(self._memory, state.slot, -1, -1)
            self._free_slots.append(state.slot)

    def state_key(self) -> str:
        if self._state_key is None:
            self._state_key = llama_state.state_key(self.path, self.options)
        return self._state_key

    def export_state(self, sequence: SequenceId) -> dict[str, npt.NDArray[Any]]:
        """See `llama_state.exported`. Raises `GenerationError` too, where llama.cpp fails."""
        state = self._get(sequence)
        if state.length == 0:
            raise InvalidRequestError("an empty sequence has no state to export")
        return llama_state.exported(self.context, state.slot)

    def import_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> SequenceId:
        sequence = self.allocate()
        state, limit = self._get(sequence), self._capabilities.context_tokens
        try:
            state.length = llama_state.imported(self.context, state.slot, tensors, limit)
        except BaseException:
            self.free(sequence)
            raise
        return sequence

    def state_bytes(self) -> int:
        _ = self.context
        return sum(map(self.sequence_bytes, self._sequences))

    def sequence_bytes(self, sequence: SequenceId) -> int:
        return int(llama_cpp.llama_state_seq_get_size(self.context, self._get(sequence).slot))

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

    def _calls(self, chunks: Sequence[Chunk]) -> Iterator[list[_Part]]:
        """Cut `chunks` to calls of at most n_batch positions."""
        call: list[_Part] = []
        room = self._batch.capacity
        for chunk in chunks:
            left = chunk.token_ids
            while len(left):
                token_ids, left = left[:room], left[room:]
                wanted = len(token_ids) if chunk.logits == "all" else int(chunk.logits == "last" and len(left) == 0)
                call.append(_Part(chunk, token_ids, wanted))
                room -= len(token_ids)
                if room == 0:
                    yield call
                    call, room = [], self._batch.capacity
        if call:
            yield call

    def _call(self, parts: Sequence[_Part]) -> list[Logits]:
        """Run one `llama_decode` over all parts, and return the logits (n, vocabulary) that each asks for."""
        batch, at = self._batch, 0
        for part in parts:
            state, size = self._sequences[part.chunk.sequence], len(part.token_ids)
            stop = at + size
            batch.tokens[at:stop] = part.token_ids
            batch.positions[at:stop] = range(state.length, state.length + size)
            batch.slots[at:stop] = state.slot
            batch.wanted[at:stop] = 0
            batch.wanted[stop - part.wanted : stop] = 1
            at = stop
        status = batch.decode(self.context, at, self._embeddings(parts, at))
        if status != 0:
            raise self._failure(status, at)
        for part in parts:
            self._sequences[part.chunk.sequence].length += len(part.token_ids)
        bounds = list(accumulate((part.wanted for part in parts), initial=0))
        logits = self._logits(bounds[-1])
        return [logits[first:stop] for first, stop in pairwise(bounds)]

    def _embeddings(self, parts: Sequence[_Part], positions: int) -> npt.NDArray[np.float32] | None:
        """The input (positions, d) where a row of an offset falls on it, else None: then tokens are fed.

        A call is all tokens or all embeddings. Feeding every position as its row costs next to nothing, and saves
        the second pass over the weights that a call of their own for the offset's few rows would be.
        """
        touched = []
        at = 0
        for part in parts:
            start, size = self._sequences[part.chunk.sequence].length, len(part.token_ids)
            for placement in part.chunk.placements:
                if placement.index < start + size and placement.stop > start:
                    touched.append((placement, at, size, start))
            at += size
        if not touched:
            return None
        embeddings = self._table.rows(self._batch.tokens[:positions])
        if self._rule.row_factor != 1.0:
            embeddings *= np.float32(self._rule.row_factor)
        for placement, at, size, start in touched:
            add_rows(embeddings[at : at + size], placement, start, self._rule.offset_factor)
        return embeddings

    def _logits(self, count: int) -> Logits:
        """Logits (count, vocabulary) of the wanted entries of the last call, in their order."""
        if count == 0:
            llama_cpp.llama_synchronize(self.context)
            return np.zeros((0, self._vocab_size), np.float32)
        size = count * self._vocab_size
        address = ctypes.addressof(llama_cpp.llama_get_logits(self.context).contents)
        numbers: Any = (ctypes.c_float * size).from_address(address)
        found: Logits = np.frombuffer(numbers, np.float32)
        # Copied: llama.cpp writes the next call's logits over these.
        return found.reshape(count, self._vocab_size).copy()

    def _failure(self, status: int, size: int) -> Exception:
        if status == _NO_SLOT:
            held = sum(state.length for state in self._sequences.values())
            return KVCacheFullError(
                f"no room for {size} more tokens in the KV cache of {self._capabilities.kv_capacity_tokens}: "
                f"{len(self._sequences)} sequences name {held}. Wait until one ends, or load with a higher n_ctx."
            )
        if status == _NO_MEMORY:
            return OutOfMemoryError(
                f"llama.cpp has no memory to compute {size} tokens: {llama_log.complaint()}. Load with a lower "
                "n_ubatch or n_ctx."
            )
        return GenerationError(f"llama.cpp failed with status {status} on {size} tokens: {llama_log.complaint()}")

    def _restore(self, lengths: dict[SequenceId, int]) -> None:
        """Cut sequences back to `lengths` after a call failed."""
        for sequence, length in lengths.items():
            state = self._sequences[sequence]
            if self._capabilities.truncate:
                self._cut(state, length)
            elif int(llama_cpp.llama_memory_seq_pos_max(self._memory, state.slot)) + 1 != length:
                # It cannot be cut back: rather no sequence than one that has read too much.
                self.free(sequence)

    def _cut(self, state: _Sequence, tokens: int) -> None:
        if not llama_cpp.llama_memory_seq_rm(self._memory, state.slot, tokens, -1):
            raise GenerationError(f"llama.cpp cannot cut a sequence of {state.length} tokens back to {tokens}")
        state.length = tokens

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
                raise self._failure(status, count)
            logits = self._logits(count)
            llama_cpp.llama_memory_seq_rm(self._memory, slot, -1, -1)
            return logits

        declared = metadata(model, f"{architecture}.embedding_scale")
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
