"""A backend without a model: deterministic and instant, for tests of whatever stands on a backend.

Its next-token logits are a fixed pseudo-random function of everything the sequence has read, offset
rows included, so any mix-up of sequences, positions or offsets changes the output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offset_runtime.backends.base import Capabilities, Chunk, Message, SequenceId, Vocabulary, describe, fork_tokens
from offset_runtime.errors import InvalidRequestError, KVCacheFullError
from offset_runtime.identity import BaseIdentity, make_identity, sketch_row_ids

_SPECIAL = ("<|im_start|>", "<|im_end|>")
_BYTES = 256
VOCAB_SIZE = _BYTES + len(_SPECIAL)
HIDDEN_SIZE = 16

Script = Callable[[str], str | None]


class FakeTokenizer:
    """One token a UTF-8 byte, and ChatML's two markers. `tools`: whether its chat template shows tools."""

    bos_token_id: int | None = None
    adds_bos = False
    eos_token_ids = frozenset({_BYTES + 1})
    has_chat_template = True
    chat_template: str | None = "ChatML"

    def __init__(self, *, tools: bool = False) -> None:
        self._tools = tools
        if tools:
            self.chat_template = "ChatML with <tool_call>"

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            at, marker = min(((text.find(m), i) for i, m in enumerate(_SPECIAL) if m in text), default=(len(text), -1))
            ids.extend(text[:at].encode())
            text = text[at:]
            if marker >= 0:
                ids.append(_BYTES + marker)
                text = text[len(_SPECIAL[marker]) :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < _BYTES).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        if self._tools and tools:
            told = {"role": "tools", "content": "\n".join(json.dumps(tool) for tool in tools)}
            messages = [told, *messages]
        turns = [f"<|im_start|>{m['role']}\n{self._content(m)}<|im_end|>\n" for m in messages]
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def _content(self, message: Message) -> str:
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ()) if self._tools]
        return "\n".join([message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])

    def vocabulary(self) -> Vocabulary:
        tokens = [*(bytes([i]) for i in range(_BYTES)), *(marker.encode() for marker in _SPECIAL)]
        return Vocabulary(tokens, frozenset(range(_BYTES, VOCAB_SIZE)))


class FakeBackend:
    """See the module. `script` maps the prompt's text to a reply to write instead of random text.

    `context_tokens`, `kv_capacity_tokens` and `max_sequences` are the limits it declares; it holds to the last.
    `truncate` False: its sequences cannot be cut back, like those of a recurrent model. `tools`: whether its chat
    template shows tools.
    """

    name = "fake"

    def __init__(
        self,
        script: Script | None = None,
        *,
        context_tokens: int = 4096,
        kv_capacity_tokens: int | None = None,
        max_sequences: int | None = None,
        truncate: bool = True,
        tools: bool = False,
    ) -> None:
        self._script = script
        self._sequences: dict[SequenceId, list[bytes]] = {}
        self._next_id = 0
        # What was read at a position, an embedding with or without an offset's row -> the token it is nearest to.
        self._nearest: dict[bytes, int] = {}
        self.tokenizer = FakeTokenizer(tools=tools)
        self.capabilities = Capabilities(
            context_tokens=context_tokens,
            kv_capacity_tokens=kv_capacity_tokens,
            max_sequences=max_sequences,
            truncate=truncate,
            save_state=True,
        )
        rows = np.random.default_rng(7).normal(size=(VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
        self._rows = rows
        self.identity: BaseIdentity = make_identity(
            "fake", VOCAB_SIZE, rows[sketch_row_ids(VOCAB_SIZE)], self.tokenizer.encode
        )

    def allocate(self) -> SequenceId:
        return self._add([])

    def length(self, sequence: SequenceId) -> int:
        return len(self._read(sequence))

    def forward(self, chunks: Sequence[Chunk]) -> list[npt.NDArray[np.float32]]:
        if len({chunk.sequence for chunk in chunks}) != len(chunks):
            raise InvalidRequestError("a forward pass takes at most one chunk a sequence")
        added = [self._embedded(chunk) for chunk in chunks]
        results = []
        for chunk, new in zip(chunks, added, strict=True):
            read = self._read(chunk.sequence)
            start = len(read)
            read.extend(new)
            count = len(new)
            first = {"none": count, "last": count - 1, "all": 0}[chunk.logits]
            rows = [self._logits(read[: start + i + 1]) for i in range(first, count)]
            results.append(np.stack(rows) if rows else np.zeros((0, VOCAB_SIZE), np.float32))
        return results

    def fork(self, sequence: SequenceId, tokens: int | None = None) -> SequenceId:
        read = self._read(sequence)
        return self._add(read[: fork_tokens(tokens, len(read), truncates=self.capabilities.truncate)])

    def truncate(self, sequence: SequenceId, tokens: int) -> None:
        if not self.capabilities.truncate:
            raise InvalidRequestError("this backend was made with truncate=False; fork before instead")
        if not 0 <= tokens <= self.length(sequence):
            raise InvalidRequestError(f"cannot cut a sequence of {self.length(sequence)} tokens back to {tokens}")
        del self._read(sequence)[tokens:]

    def free(self, sequence: SequenceId) -> None:
        self._sequences.pop(sequence, None)

    def state_key(self) -> str:
        return f"fake state 1, rows {hashlib.sha256(self._rows.tobytes()).hexdigest()}"

    def export_state(self, sequence: SequenceId) -> dict[str, npt.NDArray[Any]]:
        """One array `read`, float32 of shape (tokens, `HIDDEN_SIZE`): the embeddings read."""
        read = self._read(sequence)
        if not read:
            raise InvalidRequestError("an empty sequence has no state to export")
        return {"read": np.frombuffer(b"".join(read), np.float32).reshape(len(read), HIDDEN_SIZE)}

    def import_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> SequenceId:
        read = tensors.get("read")
        if set(tensors) != {"read"} or read is None or read.dtype != np.float32:
            raise InvalidRequestError(f"no state of the fake backend: {describe(tensors)}; expected float32 'read'")
        if read.ndim != 2 or read.shape[1] != HIDDEN_SIZE or not 0 < len(read) <= self.capabilities.context_tokens:
            raise InvalidRequestError(
                f"no state of the fake backend: {describe(tensors)}; expected (n, {HIDDEN_SIZE}) with n from 1 to "
                f"{self.capabilities.context_tokens}"
            )
        return self._add([row.tobytes() for row in read])

    def state_bytes(self) -> int:
        return sum(map(self.sequence_bytes, self._sequences))

    def sequence_bytes(self, sequence: SequenceId) -> int:
        return sum(map(len, self._read(sequence)))

    def model_bytes(self) -> int:
        return int(self._rows.nbytes)

    def close(self) -> None:
        self._sequences.clear()

    @property
    def open_sequences(self) -> int:
        """How many sequences are open: 0 once every request has ended."""
        return len(self._sequences)

    def _embedded(self, chunk: Chunk) -> list[bytes]:
        if not chunk.token_ids:
            raise InvalidRequestError("a chunk needs at least one token")
        foreign = [token for token in chunk.token_ids if not 0 <= token < VOCAB_SIZE]
        if foreign:
            raise InvalidRequestError(f"token id {foreign[0]} is outside the vocabulary of {VOCAB_SIZE} tokens")
        embeddings = self._rows[list(chunk.token_ids)]
        start = self.length(chunk.sequence)
        for placement in chunk.placements:
            for row in range(placement.rows):
                at = placement.index + row - start
                if 0 <= at < len(embeddings):
                    embeddings[at] += placement.offset.tensor[row]
        return [row.tobytes() for row in embeddings]

    def _logits(self, read: list[bytes]) -> npt.NDArray[np.float32]:
        logits = np.random.default_rng(_seed(read)).normal(size=VOCAB_SIZE).astype(np.float32)
        scripted = self._scripted_token(read)
        if scripted is not None:
            logits[scripted] = 20.0
        elif self._script is None:
            # Printable ASCII, so that replies are readable and rarely end by chance.
            logits[32:127] += 6.0
        return logits

    def _scripted_token(self, read: list[bytes]) -> int | None:
        if self._script is None:
            return None
        ids = self._nearest_ids(read)
        starts = [i for i, token in enumerate(ids) if token == _BYTES]
        # The reply begins after "<|im_start|>assistant\n".
        begin = (starts[-1] + len("assistant\n") + 1) if starts else len(ids)
        reply = self._script(self.tokenizer.decode(ids[:begin]))
        if reply is None:
            return None
        wanted = [*reply.encode(), _BYTES + 1]
        at = len(ids) - begin
        return wanted[at] if 0 <= at < len(wanted) else None

    def _nearest_ids(self, read: list[bytes]) -> list[int]:
        new = [item for item in dict.fromkeys(read) if item not in self._nearest]
        if new:
            rows = np.stack([np.frombuffer(item, dtype=np.float32) for item in new])
            distances = ((rows[:, None, :] - self._rows[None, :, :]) ** 2).sum(axis=2)
            self._nearest.update(zip(new, map(int, distances.argmin(axis=1)), strict=True))
        return [self._nearest[item] for item in read]

    def _read(self, sequence: SequenceId) -> list[bytes]:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise InvalidRequestError(f"sequence {sequence} is not open") from None

    def _add(self, read: list[bytes]) -> SequenceId:
        if len(self._sequences) == self.capabilities.max_sequences:
            raise KVCacheFullError(f"all {len(self._sequences)} sequences are in use; wait until one ends")
        self._next_id += 1
        self._sequences[self._next_id] = read
        return self._next_id


def _seed(read: list[bytes]) -> int:
    return int.from_bytes(hashlib.sha256(b"".join(read)).digest()[:8], "little")
