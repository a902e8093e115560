"""A document becomes a prompt and a reply; nothing of the reply's rest leaks into the prompt."""

from __future__ import annotations

import pytest

from offset_runtime.backends.fake import FakeTokenizer
from offset_runtime.documents import Document
from offset_runtime.errors import DocumentError, PromptFormatError
from offset_runtime.layout import MIN_REPLY_TOKENS, Example, default_anchor, lay_out, within_context
from offset_runtime.offset import PromptFormat

TEXT = "The court held that the clause applies to both parties, and dismissed the claim with costs."


class PlainTokenizer(FakeTokenizer):
    """A tokenizer of a model without chat template."""

    has_chat_template = False


class BosTokenizer(FakeTokenizer):
    """A tokenizer with a start token."""

    bos_token_id = 256


def one(document: Document, prompt_format: PromptFormat, max_tokens: int = 32, seed: int = 0) -> Example:
    tokenizer = BosTokenizer()
    [example], short = lay_out([document], tokenizer, prompt_format, max_tokens=max_tokens, seed=seed)
    assert short == 0
    return example


def test_raw_is_the_document_alone_and_its_first_token_is_not_predicted() -> None:
    example = one(Document(TEXT), "raw")
    assert example.prompt_ids == ()
    assert example.reply_ids == tuple(TEXT.encode()[:32])
    assert example.targets == example.reply_ids[1:]
    assert example.anchored_tokens == 32


def test_bos_puts_the_start_token_first_and_predicts_every_token() -> None:
    example = one(Document(TEXT), "bos")
    assert example.prompt_ids == (256,)
    assert example.targets == example.reply_ids
    assert example.anchored_tokens == 1


def test_chat_is_a_request_for_the_text_and_the_text_as_reply() -> None:
    example = one(Document(TEXT), "chat", max_tokens=80)
    prompt = FakeTokenizer().decode(example.prompt_ids)
    assert "The court held that the clause" in prompt
    assert "applies" not in prompt
    assert prompt.endswith("assistant\n")
    assert example.reply_ids == tuple(TEXT.encode()[:80])
    assert example.token_ids == example.prompt_ids + example.reply_ids


def test_requests_are_worded_in_several_ways_and_repeat_under_a_seed() -> None:
    documents = [Document(TEXT) for _ in range(20)]
    first, _ = lay_out(documents, FakeTokenizer(), "chat", max_tokens=32)
    again, _ = lay_out(documents, FakeTokenizer(), "chat", max_tokens=32)
    other, _ = lay_out(documents, FakeTokenizer(), "chat", max_tokens=32, seed=1)
    assert first == again
    assert first != other
    assert len({example.prompt_ids for example in first}) > 4


@pytest.mark.parametrize("text", ["今天天气很好我们一起去公园散步吧孩子们都非常高兴", "x" * 200, "{" * 40 + "}" * 40])
def test_text_without_spaces_is_quoted_in_the_prompt_by_half_at_most(text: str) -> None:
    example = one(Document(text), "chat")
    prompt = FakeTokenizer().decode(example.prompt_ids)
    reply = FakeTokenizer().decode(example.reply_ids[:16]).rstrip("\ufffd")
    assert reply in prompt
    assert text[: len(reply) + 1] not in prompt
    assert "\ufffd" not in prompt


def test_short_documents_are_counted_and_left_out() -> None:
    documents = [Document("abc"), Document(TEXT), Document("ab")]
    examples, short = lay_out(documents, FakeTokenizer(), "raw", max_tokens=32)
    assert [example.document for example in examples] == [1]
    assert short == 2


def test_the_shortest_usable_document_is_used() -> None:
    examples, short = lay_out([Document("x" * MIN_REPLY_TOKENS)], FakeTokenizer(), "raw", max_tokens=32)
    assert (len(examples), short) == (1, 0)


def test_a_conversation_gives_one_example_an_assistant_turn() -> None:
    turns = (("user", "Hello there"), ("assistant", "Good day"), ("user", "Go on"), ("assistant", "Of course"))
    documents = [Document(TEXT), Document("joined", turns)]
    examples, _ = lay_out(documents, FakeTokenizer(), "chat", max_tokens=32)
    assert [example.document for example in examples] == [0, 1, 1]
    assert [bytes(example.reply_ids) for example in examples[1:]] == [b"Good day", b"Of course"]
    second = FakeTokenizer().decode(examples[2].prompt_ids)
    assert "Good day" in second
    assert "Of course" not in second


def test_a_conversation_that_opens_with_the_assistant_learns_only_later_turns() -> None:
    turns = (("assistant", "How can I help?"), ("user", "Say it"), ("assistant", "It is said"))
    examples, short = lay_out([Document("joined", turns)], FakeTokenizer(), "chat", max_tokens=32)
    assert [bytes(example.reply_ids) for example in examples] == [b"It is said"]
    assert short == 0


@pytest.mark.parametrize("prompt_format", ["raw", "bos"])
def test_conversations_outside_chat_are_an_error(prompt_format: PromptFormat) -> None:
    conversation = Document("joined", (("user", "a"), ("assistant", "b")))
    with pytest.raises(DocumentError, match="conversations can only be laid out in format 'chat'"):
        lay_out([conversation], BosTokenizer(), prompt_format, max_tokens=32)


def test_formats_that_the_model_cannot_have_are_errors_that_name_another() -> None:
    with pytest.raises(PromptFormatError, match=r"start token.*use format 'raw'"):
        lay_out([Document(TEXT)], FakeTokenizer(), "bos", max_tokens=32)
    with pytest.raises(PromptFormatError, match=r"chat template.*use format 'raw'"):
        lay_out([Document(TEXT)], PlainTokenizer(), "chat", max_tokens=32)


def test_examples_beyond_the_context_are_left_out_by_document() -> None:
    examples = [Example((1,) * 4, (2,) * 4, 0), Example((1,) * 9, (2,) * 4, 1), Example((1,) * 10, (2,) * 4, 1)]
    assert within_context(examples, 8) == (examples[:1], 1)
    assert within_context(examples, 14) == (examples, 0)


def test_the_default_anchor_follows_the_format() -> None:
    assert [default_anchor(prompt_format) for prompt_format in ("raw", "bos", "chat")] == [
        "sequence",
        "sequence",
        "turn",
    ]
