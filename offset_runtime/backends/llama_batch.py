"""The input of one `llama_decode`: tokens or embeddings of several sequences, with their positions."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp


class LlamaBatch:
    """Arrays of `capacity` entries that llama.cpp reads in place; filled anew for each call.

    One entry is one position of one sequence. `slots` are llama.cpp's sequence ids, `wanted` says whose
    logits are computed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = np.zeros(capacity, np.int32)
        self.positions = np.zeros(capacity, np.int32)
        self.slots = np.zeros(capacity, np.int32)
        self.wanted = np.zeros(capacity, np.int8)
        self._counts = np.ones(capacity, np.int32)
        # Each entry belongs to one sequence, so its list of sequences is one of `slots`.
        addresses = self.slots.ctypes.data + self.slots.itemsize * np.arange(capacity)
        self._lists = addresses.astype(np.uintp)
        # Made once, since a pointer takes longer to make than all the rest of a decode step takes here.
        self._fields: Any = llama_cpp.llama_batch()
        self._fields.pos = _pointer(self.positions, llama_cpp.llama_pos)
        self._fields.n_seq_id = _pointer(self._counts, ctypes.c_int32)
        self._fields.seq_id = _pointer(self._lists, ctypes.POINTER(llama_cpp.llama_seq_id))
        self._fields.logits = _pointer(self.wanted, ctypes.c_int8)
        self._token = _pointer(self.tokens, llama_cpp.llama_token)

    def decode(self, context: Any, size: int, embeddings: npt.NDArray[np.float32] | None) -> int:
        """Run the first `size` entries and return llama.cpp's status, 0 for success.

        `embeddings` (size, d) are read in place of the tokens where given: a batch is all of one kind.
        """
        fields = self._fields
        fields.n_tokens = size
        fields.token = self._token if embeddings is None else None
        fields.embd = None if embeddings is None else _pointer(embeddings, ctypes.c_float)
        return int(llama_cpp.llama_decode(context, fields))


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
