"""From chat messages to prompt tokens: what is refused, and templates that know no system role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from offset_runtime.backends.fake import FakeTokenizer
from offset_runtime.backends.torch_tokenizer import TorchTokenizer
from offset_runtime.chat import chat_prompt, chat_turns
from offset_runtime.errors import InvalidRequestError, PromptFormatError
from offset_runtime.runtime import OffsetRuntime

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

USER = {"role": "user", "content": "news"}
SYSTEM = {"role": "system", "content": "be brief"}
ASSISTANT = {"role": "assistant", "content": "yes"}

NO_SYSTEM_ROLE = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


@pytest.fixture
def without_system_role(make_tokenizer: MakeTokenizer) -> TorchTokenizer:
    """The tokenizer of a model whose template refuses system messages, as Gemma's does."""
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = NO_SYSTEM_ROLE + str(tokenizer.chat_template)
    return TorchTokenizer(tokenizer, {0})


def test_the_prompt_ends_where_the_reply_begins() -> None:
    tokenizer = FakeTokenizer()
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nnews<|im_end|>\n<|im_start|>assistant\n"
    assert chat_prompt(tokenizer, [SYSTEM, USER]) == tokenizer.encode(expected)


def test_a_model_without_a_template_names_a_way_that_exists(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(PromptFormatError, match=r"no chat template.*OffsetRuntime\.text_request"):
        chat_prompt(TorchTokenizer(make_tokenizer(), {0}), [USER])
    assert callable(OffsetRuntime.text_request)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"content": "news"}, "unknown message role None in message 2; expected one of assistant, system, tool, user"),
        ({"role": "narrator", "content": "news"}, "unknown message role 'narrator' in message 2"),
        ({"role": ["user"], "content": "news"}, r"unknown message role \['user'\] in message 2"),
        ({"role": "user"}, r"message 2 \(user\) has no content; expected a string"),
        ({"role": "assistant", "content": None}, r"message 2 \(assistant\) has content of type NoneType; .*tool_calls"),
        (
            {"role": "user", "content": [{"type": "text", "text": "news"}]},
            "has content of type list; expected a string",
        ),
        ({"role": "user", "content": b"news"}, "has content of type bytes"),
    ],
)
def test_a_message_without_a_known_role_and_text_is_named(message: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        chat_prompt(FakeTokenizer(), [USER, message])


def test_a_conversation_needs_a_message() -> None:
    with pytest.raises(InvalidRequestError, match="no messages"):
        chat_prompt(FakeTokenizer(), [])


def test_a_message_of_tool_calls_alone_may_have_empty_content() -> None:
    calls = [{"type": "function", "function": {"name": "look_up", "arguments": {}}}]
    prompt = chat_prompt(FakeTokenizer(), [USER, {"role": "assistant", "content": "", "tool_calls": calls}])
    call = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
    assert FakeTokenizer().decode(prompt) == f"user\nnews\nassistant\n{call}\nassistant\n"


def test_without_a_system_role_its_text_opens_the_users_message(without_system_role: TorchTokenizer) -> None:
    merged = {"role": "user", "content": "be brief\n\nnews"}
    found = chat_prompt(without_system_role, [SYSTEM, USER, ASSISTANT, USER])
    assert found == chat_prompt(without_system_role, [merged, ASSISTANT, USER])


def test_without_a_system_role_and_with_no_user_after_it_becomes_a_users_message(
    without_system_role: TorchTokenizer,
) -> None:
    found = chat_prompt(without_system_role, [SYSTEM, ASSISTANT])
    assert found == chat_prompt(without_system_role, [{"role": "user", "content": "be brief"}, ASSISTANT])


def test_what_the_template_refuses_for_good_is_the_templates_own_error(without_system_role: TorchTokenizer) -> None:
    with pytest.raises(PromptFormatError, match=r"System role not supported.*Roles found: system"):
        chat_prompt(without_system_role, [SYSTEM])


def test_an_earlier_reply_stands_as_it_was_generated_and_is_found_by_position() -> None:
    tokenizer = FakeTokenizer()
    messages = [SYSTEM, USER, {"role": "assistant", "content": " yes\n"}, USER]

    ids, positions = chat_turns(tokenizer, messages, [2])

    assert ids == chat_prompt(tokenizer, messages)
    assert positions == {2: len(chat_prompt(tokenizer, messages[:2]))}
    assert tokenizer.decode(ids[positions[2] :]).startswith(" yes\n")


def test_a_reply_goes_on_from_the_tokens_of_its_prompt_whatever_the_tokenizer_would_join(
    make_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = TorchTokenizer(make_tokenizer(chat=True), {0})
    reply = {"role": "assistant", "content": "\n\nyes"}

    ids, positions = chat_turns(tokenizer, [USER, reply, USER], [1])

    prompt = chat_prompt(tokenizer, [USER])
    assert ids[: positions[1]] == prompt
    assert ids[positions[1] :][: len(tokenizer.encode("\n\nyes"))] == tokenizer.encode("\n\nyes")


def test_a_reply_that_the_template_leaves_out_or_repeats_has_no_position(make_tokenizer: MakeTokenizer) -> None:
    made = make_tokenizer(chat=True)
    made.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'system' %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    )
    made.chat_template += "{{ messages[0]['content'] }}"
    tokenizer = TorchTokenizer(made, {0})
    messages = [ASSISTANT, {"role": "system", "content": "news"}, ASSISTANT]

    ids, positions = chat_turns(tokenizer, messages, [0, 1, 2])

    assert list(positions) == [2]
    assert tokenizer.decode(ids) == tokenizer.decode(chat_prompt(tokenizer, messages))


def test_a_reply_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="expected a string"):
        chat_turns(FakeTokenizer(), [USER, {"role": "assistant", "content": None}, USER], [1])
