"""The contract between the engine and whatever runs the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from offset_runtime.errors import ContextOverflowError, InvalidRequestError, PlacementError
from offset_runtime.identity import BaseIdentity
from offset_runtime.placement import Placement

SequenceId = int
LogitsWanted = Literal["none", "last", "all"]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do with the loaded model. The conformance suite holds it to its word.

    `context_tokens`: the longest sequence. `kv_capacity_tokens`: how many tokens all sequences
    together may hold, or None where only memory bounds it. `max_sequences`: how many may be open at once, or
    None for any number. `truncate`: a sequence can be cut back
    (not so for recurrent state). `fork`: a sequence can be copied. `split_prefill`: a prompt may be
    fed in several chunks at full speed; where False, later chunks are fed token by token, so the
    scheduler gives a prompt in one piece. `mixed_batch`: one forward pass holds sequences of
    different lengths; where False they run one after the other, with the same result. `save_state`: the
    state of a sequence can be taken out and put back, in another process too.
    """

    context_tokens: int
    kv_capacity_tokens: int | None = None
    max_sequences: int | None = None
    truncate: bool = True
    fork: bool = True
    split_prefill: bool = True
    mixed_batch: bool = True
    save_state: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one sequence.

    They are fed at positions length(sequence), length(sequence) + 1, …. `placements` hold absolute
    positions; the rows that fall inside this chunk are added to its embeddings, all others are ignored.
    """

    sequence: SequenceId
    token_ids: Sequence[int]
    placements: Sequence[Placement] = ()
    logits: LogitsWanted = "last"


def check_chunks(
    chunks: Sequence[Chunk],
    length: Callable[[SequenceId], int],
    *,
    hidden_size: int,
    vocab_size: int,
    context_tokens: int,
) -> None:
    """Raise what `Backend.forward` raises for chunks that cannot be fed; `length` gives a sequence's, if it is open.

    Raises `InvalidRequestError`, `PlacementError` for an offset whose rows have another size than `hidden_size`, and
    `ContextOverflowError` for a sequence that would exceed `context_tokens`.
    """
    if len({chunk.sequence for chunk in chunks}) != len(chunks):
        raise InvalidRequestError("a forward pass takes at most one chunk a sequence")
    for chunk in chunks:
        held, count = length(chunk.sequence), len(chunk.token_ids)
        if count == 0:
            raise InvalidRequestError("a chunk needs at least one token")
        for token in chunk.token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(f"token id {token} is outside the vocabulary of {vocab_size} tokens")
        for placement in chunk.placements:
            if placement.offset.hidden_size != hidden_size:
                raise PlacementError(
                    f"the offset of domain {placement.offset.domain!r} has rows of {placement.offset.hidden_size} "
                    f"numbers; the model reads {hidden_size}"
                )
        if held + count > context_tokens:
            raise ContextOverflowError(
                f"a sequence of {held} tokens + {count} more exceeds the context of {context_tokens} tokens"
            )


def fork_tokens(tokens: int | None, length: int, *, truncates: bool) -> int:
    """How many tokens a fork of the first `tokens` tokens of a sequence of `length` holds; None: all.

    Raises what `Backend.fork` raises; `truncates`: whether the backend declares `truncate`.
    """
    if tokens is None or tokens == length:
        return length
    if not 0 <= tokens <= length:
        raise InvalidRequestError(f"cannot fork the first {tokens} tokens of a sequence of {length}")
    if not truncates:
        raise InvalidRequestError(
            f"cannot fork the first {tokens} of {length} tokens: the state of this model cannot be cut back; "
            "fork when the sequence holds no more than that"
        )
    return tokens


def describe(tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """Names, dtypes and shapes of a few tensors, for messages on state that does not fit."""
    shown = [f"{name!r} {array.dtype} {array.shape}" for name, array in list(tensors.items())[:3]]
    more = [f"{len(tensors) - 3} more"] if len(tensors) > 3 else []
    return ", ".join([*shown, *more]) or "no tensors"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes that each token adds to a text, by token id.

    `special_ids`: tokens that add nothing, such as those that end a turn; `tokens` holds their names instead.
    """

    tokens: Sequence[bytes]
    special_ids: frozenset[int]


class Tokenizer(Protocol):
    """Text to token ids and back. All methods may be called from any thread."""

    @property
    def bos_token_id(self) -> int | None:
        """The start token, or None for models without one."""

    @property
    def adds_bos(self) -> bool:
        """Whether the model reads plain text behind its start token (some have one, but not for this)."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be used."""

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template, a Jinja template, or None."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised, none are added."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out."""

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Lay `messages` out with the model's own chat template; `tools` in OpenAI's shape, where it shows them."""

    def vocabulary(self) -> Vocabulary:
        """All tokens; read anew at each call, which takes up to a second.

        Raises `ConstraintError` for a tokenizer whose tokens stand for no bytes of their own.
        """


class Backend(Protocol):
    """A loaded base model that holds the KV (or recurrent) state of many sequences.

    Used from one thread at a time; `tokenizer`, `identity` and `capabilities` from any.
    """

    @property
    def name(self) -> str:
        """The backend's name: ``torch``, ``llama_cpp``, ``fake``."""

    @property
    def identity(self) -> BaseIdentity:
        """Which base model is loaded."""

    @property
    def capabilities(self) -> Capabilities:
        """What the loaded model can do here."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def allocate(self) -> SequenceId:
        """Open an empty sequence."""

    def length(self, sequence: SequenceId) -> int:
        """Tokens the sequence holds."""

    def forward(self, chunks: Sequence[Chunk]) -> list[npt.NDArray[np.float32]]:
        """Feed all chunks in one pass; at most one chunk a sequence.

        Returns for each chunk its next-token logits, float32 of shape (n, vocabulary): n is 0, 1 or
        the chunk's length, as `Chunk.logits` says. On an error no sequence has changed; where `truncate` is not
        declared, one that has may be closed instead.

        Raises `InvalidRequestError` for a chunk without tokens, a token outside the vocabulary, a sequence
        that is not open, or two chunks of one sequence; `ContextOverflowError` for a sequence beyond the context;
        `KVCacheFullError` where the state of all does not fit.
        """

    def fork(self, sequence: SequenceId, tokens: int | None = None) -> SequenceId:
        """Open a new sequence with the state of the first `tokens` tokens; None: of all. The two are independent.

        Raises `InvalidRequestError` where the backend does not declare it, for a length that the sequence does not
        have, and for fewer tokens than it has where `truncate` is not declared.
        """

    def truncate(self, sequence: SequenceId, tokens: int) -> None:
        """Cut the sequence back to its first `tokens` tokens.

        Raises `InvalidRequestError` where the backend does not declare it, and for a length that the
        sequence does not have.
        """

    def free(self, sequence: SequenceId) -> None:
        """Release the sequence and its state. Freeing it once more does nothing."""

    def state_key(self) -> str:
        """What two processes must have in common for the state of one to be of use in the other, in one line.

        Equal only where backend, weights, form of the state and its version are: more than `identity`, which
        tolerates quantisation. Raises `InvalidRequestError` where `save_state` is not declared.
        """

    def export_state(self, sequence: SequenceId) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of the state of a sequence that holds at least one token, as arrays by name.

        Raises `InvalidRequestError` for an empty sequence, and where `save_state` is not declared.
        """

    def import_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> SequenceId:
        """Open a sequence with a copy of state that `export_state` gave on a backend of the same `state_key`.

        Raises `InvalidRequestError` for what is no state of this model (other names, shapes or dtypes, or longer
        than the context), and where `save_state` is not declared; `KVCacheFullError` where there is no room.
        """

    def state_bytes(self) -> int:
        """Bytes of state that all open sequences hold together."""

    def sequence_bytes(self, sequence: SequenceId) -> int:
        """Bytes of state that one open sequence holds, what it may share with a fork included.

        Raises `InvalidRequestError` for a sequence that is not open.
        """

    def model_bytes(self) -> int:
        """Bytes of the loaded weights."""

    def close(self) -> None:
        """Release the model. The backend must not be used afterwards."""
