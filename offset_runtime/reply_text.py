"""The text of a reply, token by token: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from offset_runtime.backends.base import Tokenizer

_REPLACEMENT = "\ufffd"
# No UTF-8 character is longer than 4 bytes, so an incomplete one resolves within 4 byte tokens. A model
# that emits broken bytes on purpose gets replacement characters after that.
_MAX_PENDING_TOKENS = 4


class ReplyText:
    """Turns a stream of token ids into text deltas.

    Text is held back while it may still become a stop string or while a character is incomplete.
    `stopped` turns True at the first stop string; nothing from it on is ever returned.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._settled = 0  # ids before this are not decoded again, but for context
        self._read = 0  # ids whose text is already out of the decoder
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now certain."""
        self._ids.append(token_id)
        return self._release(self._decode_new(final=False), final=False)

    def finish(self) -> str:
        """Return what was held back, after the last token."""
        return self._release(self._decode_new(final=True), final=True)

    def _decode_new(self, *, final: bool) -> str:
        # Decoding with the tokens before keeps spaces right for tokenizers that drop a leading one.
        before = self._tokenizer.decode(self._ids[self._settled : self._read])
        text = self._tokenizer.decode(self._ids[self._settled :])
        pending = len(self._ids) - self._read
        if text.endswith(_REPLACEMENT) and not final and pending < _MAX_PENDING_TOKENS:
            return ""
        self._settled, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _release(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
