"""The tokenizer of a GGUF file, in the shape of `backends.base.Tokenizer`."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError
from llama_cpp import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from offset_runtime.backends.base import Message, Vocabulary
from offset_runtime.errors import InvalidRequestError, PromptFormatError


class Lease:
    """A pointer that many threads use and one releases: `release` waits until nobody uses it.

    llama.cpp does not know who holds its memory; a tokenizer used while another thread closes the model
    would end the process.
    """

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self._users = 0
        self._free = threading.Condition()

    @contextmanager
    def use(self) -> Iterator[Any]:
        """Lend the pointer. Raises `InvalidRequestError` after `release`."""
        with self._free:
            if self._pointer is None:
                raise InvalidRequestError("this backend is closed and its model released; load the model again")
            pointer = self._pointer
            self._users += 1
        try:
            yield pointer
        finally:
            with self._free:
                self._users -= 1
                self._free.notify_all()

    def release(self, free: Callable[[Any], None]) -> None:
        """Call `free` on the pointer once nobody uses it; a second call does nothing."""
        with self._free:
            pointer, self._pointer = self._pointer, None
            self._free.wait_for(lambda: self._users == 0)
        if pointer is not None:
            free(pointer)


class LlamaTokenizer:
    """The vocabulary and the chat template of a loaded GGUF file. `model` lends llama.cpp's model."""

    def __init__(self, model: Lease) -> None:
        self._model = model
        self._pieces: dict[int, bytes] = {}
        self._layouts: dict[bool, Jinja2ChatFormatter] = {}
        with model.use() as pointer:
            vocab = llama_cpp.llama_model_get_vocab(pointer)
            self._bos = _token(llama_cpp.llama_vocab_bos(vocab))
            self._adds_bos = bool(llama_cpp.llama_vocab_get_add_bos(vocab))
            count = llama_cpp.llama_vocab_n_tokens(vocab)
            self._eos = frozenset(i for i in range(count) if llama_cpp.llama_vocab_is_eog(vocab, i))
            self._template = llama_cpp.llama_model_chat_template(pointer, None)
            self._eos_text = _text(vocab, llama_cpp.llama_vocab_eos(vocab))
            self._bos_text = _text(vocab, self._bos)

    @property
    def bos_token_id(self) -> int | None:
        return self._bos

    @property
    def adds_bos(self) -> bool:
        return self._bos is not None and self._adds_bos

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template)

    @property
    def chat_template(self) -> str | None:
        return self._template.decode(errors="replace") if self._template else None

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        # A token stands for at least one byte, but for a space that some tokenizers put first.
        size = len(data) + 2
        buffer = (llama_cpp.llama_token * size)()
        with self._model.use() as pointer:
            vocab = llama_cpp.llama_model_get_vocab(pointer)
            count = llama_cpp.llama_tokenize(vocab, data, len(data), buffer, size, False, True)
            if count < 0:
                buffer = (llama_cpp.llama_token * -count)()
                count = llama_cpp.llama_tokenize(vocab, data, len(data), buffer, -count, False, True)
        return list(buffer[:count])

    def decode(self, token_ids: Sequence[int]) -> str:
        # llama.cpp's own detokenizer drops spaces before punctuation for some vocabularies, which changes the
        # text that was generated; the pieces of a text joined are that text.
        return b"".join([self._piece(token) for token in token_ids]).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        if not self._template:
            raise PromptFormatError("this model has no chat template; continue plain text instead")
        layout = self._layout(add_generation_prompt)
        try:
            shown: Any = None if tools is None else [dict(tool) for tool in tools]
            laid_out = layout(messages=[dict(message) for message in messages], tools=shown)  # type: ignore[misc]
        # A template is a program: it refuses messages by ValueError, and stumbles over them in any other way.
        except Exception as error:
            raise PromptFormatError(
                f"the model's chat template refuses these messages: {error}. Roles found: "
                f"{', '.join(str(message.get('role')) for message in messages)}; change their order or roles."
            ) from error
        return str(laid_out.prompt)

    def vocabulary(self) -> Vocabulary:
        nameless = llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN | llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        with self._model.use() as pointer:
            vocab = llama_cpp.llama_model_get_vocab(pointer)
            ids = range(llama_cpp.llama_vocab_n_tokens(vocab))
            special = frozenset(token for token in ids if llama_cpp.llama_vocab_get_attr(vocab, token) & nameless)
            tokens = [_piece(vocab, token, special=token in special) for token in ids]
        return Vocabulary(tokens, special)

    def _layout(self, add_generation_prompt: bool) -> Jinja2ChatFormatter:
        """The template, read at its first use: a model whose template is broken can still continue plain text."""
        if add_generation_prompt not in self._layouts:
            try:
                self._layouts[add_generation_prompt] = Jinja2ChatFormatter(
                    self._template.decode(), self._eos_text, self._bos_text, add_generation_prompt
                )
            except (TemplateError, UnicodeDecodeError) as error:
                raise PromptFormatError(
                    f"the chat template in the GGUF file is no valid Jinja template: {error}; continue plain text, "
                    "or use a file with a working template"
                ) from error
        return self._layouts[add_generation_prompt]

    def _piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            with self._model.use() as pointer:
                piece = _piece(llama_cpp.llama_model_get_vocab(pointer), token)
            self._pieces[token] = piece
        return piece


def _piece(vocab: Any, token: int, *, special: bool = False) -> bytes:
    if not 0 <= token < llama_cpp.llama_vocab_n_tokens(vocab):
        raise InvalidRequestError(f"token id {token} is outside the vocabulary")
    size = 32
    while True:
        buffer = ctypes.create_string_buffer(size)
        count = llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, special)
        if count >= 0:
            return buffer.raw[:count]
        size = -count


def _text(vocab: Any, token: int | None) -> str:
    if token is None or token < 0:
        return ""
    return (llama_cpp.llama_vocab_get_text(vocab, token) or b"").decode("utf-8", errors="replace")


def _token(found: int) -> int | None:
    return None if found < 0 else int(found)
