"""The text of a reply, token by token: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from offset_runtime.backends.base import Tokenizer

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so at most the last 3 tokens can belong to one that is incomplete.
_MAX_PENDING_TOKENS = 3


class ReplyText:
    """Turns a stream of token ids into text deltas.

    Text is held back while it may still become a stop string or while a character is incomplete.
    `stopped` turns True at the first stop string; nothing from it on is ever returned.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded: those whose text is out, then the new ones
        self._clean = 0  # ids up to here ended with a whole character
        self._out = ""  # text of the ids from `_context` on that has left the decoder
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
        text = self._tokenizer.decode(self._ids[self._context :])
        if final or not text.endswith(_REPLACEMENT):
            new = text[len(self._out) :]
            self._settle(text)
            return new
        # An incomplete character, or bytes that never become one: what cannot change any more goes out.
        sure = self._tokenizer.decode(self._ids[self._context : -_MAX_PENDING_TOKENS])
        if not (text.startswith(sure) and sure.startswith(self._out)):
            return ""
        new, self._out = sure[len(self._out) :], sure
        return new

    def _settle(self, text: str) -> None:
        """Leave the ids so far behind, but for the last that has text: decoding the next beside it keeps spaces
        right for tokenizers that drop a leading one."""
        previous, self._clean = self._clean, len(self._ids)
        last = self._tokenizer.decode(self._ids[previous:])
        if last:
            self._context, self._out = previous, last
        else:
            self._out = text

    def _release(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first, and of those the longest, however the text is cut into tokens.
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        keep = 0 if final else max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
