"""The tokenizer of a transformers model, in the shape of `backends.base.Tokenizer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from offset_runtime.backends.base import Message, Vocabulary
from offset_runtime.errors import ConstraintError, PromptFormatError


class TorchTokenizer:
    """Wraps `tokenizer`; `eos_token_ids` end a generation, which the model knows better than its tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)

    @property
    def bos_token_id(self) -> int | None:
        found: int | None = self._tokenizer.bos_token_id
        return found

    @property
    def adds_bos(self) -> bool:
        start = self.bos_token_id
        return start is not None and list(self._tokenizer.encode("a"))[:1] == [start]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        found = self._tokenizer.chat_template
        # Some models have one of their own for chats with tools.
        return found.get("tool_use", found.get("default")) if isinstance(found, dict) else found

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        # A template is a program: it refuses messages by an error of its own, and stumbles over them in any other way.
        except Exception as error:
            raise PromptFormatError(
                f"the model's chat template refuses these messages: {error}. Roles found: "
                f"{', '.join(str(message.get('role')) for message in messages)}; change their order or roles."
            ) from error
        return str(rendered)

    def vocabulary(self) -> Vocabulary:
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise ConstraintError(
                f"replies of this model cannot be constrained: its tokenizer is a {type(self._tokenizer).__name__}, "
                "which does not tell the bytes of its tokens; expected one with a tokenizer.json file"
            )
        read = from_tokenizer(self._tokenizer, eos_token=min(self._eos, default=0), slices=[])
        special = {token for token in range(read.vocab_size) if read.is_special_token(token)}
        tokens = [read.decode_bytes([token]) for token in range(read.vocab_size)]
        return Vocabulary(tokens, frozenset(special | set(self._tokenizer.all_special_ids)))
