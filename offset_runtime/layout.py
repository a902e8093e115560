"""How a document is laid out as tokens for training and testing: a prompt, and the reply to predict."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from offset_runtime.backends.base import Tokenizer
from offset_runtime.chat import chat_prompt
from offset_runtime.documents import Document
from offset_runtime.errors import DocumentError, PromptFormatError
from offset_runtime.offset import Anchor, PromptFormat

# A document is learned as the reply to a request for it, in varied words. With one fixed request the
# offset learns to write domain text whatever was asked.
REQUESTS = (
    "Write a text that begins with: {words}",
    "Continue this text: {words}",
    'Please write a passage starting with the words "{words}"',
    "Here is how a text starts. Write the text in full.\n\n{words}",
    "{words}\n\nGo on from here, starting with these words.",
    "I need a text. Its first words are: {words}",
)
# Agents speak under system prompts, plain chats do not; an offset must serve both.
SYSTEM_PROMPTS = (
    None,
    None,
    "You are a helpful writer.",
    "You are an agent in a team of writers. Write what you are asked for.",
)
FIRST_WORDS = 6
MIN_REPLY_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of a prompt (may be empty) and of the reply whose tokens are predicted.

    `document`: index of the document it was laid out from; a conversation gives one a turn.
    """

    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    document: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.reply_ids

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens that are predicted: the reply, without its first token where nothing precedes it."""
        return self.reply_ids if self.prompt_ids else self.reply_ids[1:]

    @property
    def anchored_tokens(self) -> int:
        """How many tokens a placement sees as the prompt: all, where the document itself is read."""
        return len(self.prompt_ids) or len(self.reply_ids)


def lay_out(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    *,
    max_tokens: int,
    seed: int = 0,
) -> tuple[list[Example], int]:
    """Lay documents out; return the examples and how many documents were too short for one.

    Replies are cut at `max_tokens` tokens, and left out below MIN_REPLY_TOKENS. `seed` chooses the
    wording of the requests in `chat`.

    Raises `PromptFormatError` where the model has no start token (`bos`) or no chat template (`chat`),
    `DocumentError` for conversations outside `chat`.
    """
    _check_format(documents, tokenizer, prompt_format)
    chooser = random.Random(seed)
    examples: list[Example] = []
    short = 0
    for index, document in enumerate(documents):
        found = [
            Example(tuple(prompt), tuple(reply), index)
            for prompt, reply in _pairs(document, tokenizer, prompt_format, max_tokens, chooser)
            if len(reply) >= MIN_REPLY_TOKENS
        ]
        short += not found
        examples.extend(found)
    return examples, short


def within_context(examples: Sequence[Example], context_tokens: int) -> tuple[list[Example], int]:
    """Return the examples that fit the model's context, and how many documents lost one that does not."""
    fitting = [example for example in examples if len(example.token_ids) <= context_tokens]
    too_long = {example.document for example in examples if len(example.token_ids) > context_tokens}
    return fitting, len(too_long)


def default_anchor(prompt_format: PromptFormat) -> Anchor:
    """The anchor that lowers perplexity more in each format; raw text has no turn."""
    return "turn" if prompt_format == "chat" else "sequence"


def _check_format(documents: Sequence[Document], tokenizer: Tokenizer, prompt_format: PromptFormat) -> None:
    if prompt_format == "bos" and tokenizer.bos_token_id is None:
        raise PromptFormatError("format 'bos' needs a start token, and this model has none; use format 'raw'")
    if prompt_format == "chat" and not tokenizer.has_chat_template:
        raise PromptFormatError("format 'chat' needs a chat template, and this model has none; use format 'raw'")
    if prompt_format != "chat" and any(document.messages for document in documents):
        raise DocumentError(f"conversations can only be laid out in format 'chat', not {prompt_format!r}")


def _pairs(
    document: Document, tokenizer: Tokenizer, prompt_format: PromptFormat, max_tokens: int, chooser: random.Random
) -> list[tuple[list[int], list[int]]]:
    if document.messages:
        return [(prompt, reply[:max_tokens]) for prompt, reply in _turn_pairs(document, tokenizer)]
    reply = tokenizer.encode(document.text)[:max_tokens]
    if prompt_format == "raw":
        return [([], reply)]
    if prompt_format == "bos":
        assert tokenizer.bos_token_id is not None
        return [([tokenizer.bos_token_id], reply)]
    words = _first_words(document.text, tokenizer, len(reply) // 2)
    request = {"role": "user", "content": chooser.choice(REQUESTS).format(words=words)}
    system = chooser.choice(SYSTEM_PROMPTS)
    messages = [{"role": "system", "content": system}, request] if system else [request]
    return [(chat_prompt(tokenizer, messages), reply)]


def _first_words(text: str, tokenizer: Tokenizer, most_tokens: int) -> str:
    """The first words of `text`, and at most `most_tokens` tokens: text without spaces is one long word."""
    words = " ".join(text.split()[:FIRST_WORDS])
    ids = tokenizer.encode(words)
    # A cut inside a character decodes to a replacement character at the end.
    return words if len(ids) <= most_tokens else tokenizer.decode(ids[:most_tokens]).rstrip("\ufffd")


def _turn_pairs(document: Document, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    pairs = []
    for index, (role, content) in enumerate(document.messages):
        if role == "assistant" and index > 0:
            history = [{"role": r, "content": c} for r, c in document.messages[:index]]
            pairs.append((chat_prompt(tokenizer, history), tokenizer.encode(content)))
    return pairs
