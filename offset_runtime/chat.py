"""From chat messages to prompt tokens."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence

from offset_runtime.backends.base import Message, Tokenizer
from offset_runtime.errors import InvalidRequestError, PromptFormatError
from offset_runtime.tool_formats import ToolFormat
from offset_runtime.tool_turns import ToolTurns, tool_turns
from offset_runtime.tools import Tool

ROLES = frozenset({"system", "user", "assistant", "tool"})


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids of `messages` under the model's own template, up to where the reply begins.

    The template writes its special tokens itself, so none are added.

    Raises `PromptFormatError` when the model has no chat template, `InvalidRequestError` for what is no
    list of messages, an empty conversation, an unknown role, or content that is no text or no valid
    Unicode.
    """
    return chat_turns(tokenizer, messages, ())[0]


def chat_turns(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    spoken: Collection[int],
    tools: Sequence[Tool] = (),
    form: ToolFormat | None = None,
) -> tuple[list[int], dict[int, int]]:
    """As `chat_prompt`, with the texts of the messages `spoken` (indices) as they stood when they were generated.

    Such a text is encoded apart from what is around it, and stands as it was written, whatever the template does
    to earlier replies: its tokens are those that were generated, where the tokenizer encodes the text so. Returns the
    token ids, and for each message of `spoken` the position of its first token; one that the template leaves out has
    none.

    `tools`, and calls and results among the messages, are laid out as `tool_turns` does, in the model's own format
    where `form` is None.

    Raises what `chat_prompt` raises.
    """
    _check_messages(tokenizer, messages)
    # Not to be found in anyone's text.
    marks = {index: f"<{secrets.token_hex(16)}>" for index in spoken}
    marked = [{**m, "content": marks.get(i, m.get("content"))} for i, m in enumerate(messages)]
    rendered = _rendered(tokenizer, tool_turns(tokenizer, marked, tools, form))
    for text in (rendered, *(messages[index]["content"] for index in spoken)):
        check_text(text)
    ids: list[int] = []
    positions: dict[int, int] = {}
    for index in sorted(marks, key=lambda index: rendered.find(marks[index])):
        text, mark = messages[index]["content"], marks[index]
        if rendered.count(mark) != 1:
            rendered = rendered.replace(mark, text)
            continue
        before, rendered = rendered.split(mark)
        ids += tokenizer.encode(before)
        positions[index] = len(ids)
        ids += tokenizer.encode(text)
    return ids + tokenizer.encode(rendered), positions


def _check_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
    if not tokenizer.has_chat_template:
        raise PromptFormatError(
            "this model has no chat template, so chat messages cannot be laid out; "
            "continue plain text with OffsetRuntime.text_request instead"
        )
    _check_list(messages)
    if not messages:
        raise InvalidRequestError("no messages; a chat needs at least one")
    for place, message in enumerate(messages, start=1):
        _check(message, place)


def _rendered(tokenizer: Tokenizer, turns: ToolTurns) -> str:
    messages = turns.messages
    try:
        return tokenizer.render_chat(messages, tools=turns.specs)
    except PromptFormatError:
        if messages[0].get("role") != "system" or len(messages) == 1:
            raise
        # Some templates know no system role (Gemma's); what it says then opens the user's message.
        return tokenizer.render_chat(_system_in_user_message(messages), tools=turns.specs)


def check_text(text: object) -> None:
    """Raise `InvalidRequestError` unless `text` is a string that UTF-8 can hold; tokenizers read nothing else."""
    if not isinstance(text, str):
        raise InvalidRequestError(f"the text is {_found(text)}; expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text holds characters that are no valid Unicode (lone surrogates, from bytes that are not UTF-8): "
            f"{text[error.start]!a} at position {error.start}; give the text in UTF-8, for example converted "
            "with iconv, or read it with errors='replace'"
        ) from error


def _check_list(messages: object) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise _no_messages("messages are", messages)
    for place, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise _no_messages(f"message {place} is", message)


def _no_messages(what: str, found: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what} {_found(found)}; expected a list of messages with role and content, "
        'for example [{"role": "user", "content": "hello"}]'
    )


def _found(value: object) -> str:
    return f"{ascii(value)[:40]} of type {type(value).__name__}"


def _check(message: Message, place: int) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"unknown message role {role!r} in message {place}; expected one of {', '.join(sorted(ROLES))}"
        )
    if not isinstance(content, str):
        found = f"content of type {type(content).__name__}" if "content" in message else "no content"
        raise InvalidRequestError(
            f"message {place} ({role}) has {found}; expected a string, which may be empty where an "
            "assistant's message holds tool_calls alone"
        )


def _system_in_user_message(messages: Sequence[Message]) -> list[Message]:
    system, first, *rest = messages
    if first.get("role") != "user":
        return [{"role": "user", "content": system["content"]}, first, *rest]
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
