"""Retention is what an offset leaves of the base's own replies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from offset_runtime import DomainOffset
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.layout import Example
from offset_runtime.retention import (
    base_replies,
    greedy_replies,
    instruction_prompt,
    instructions,
    measure_retention,
    measure_retentions,
)
from offset_runtime.scoring import target_distributions

MakeOffset = Callable[..., DomainOffset]

REPLIES = [
    Example(tuple(b"Name three colours."), tuple(b"Red, green and blue.")),
    Example(tuple(b"What is 17 plus 25?"), tuple(b"42")),
]
END = 257


def test_no_instruction_and_no_system_prompt_is_in_two_splits() -> None:
    splits = [instructions(split) for split in ("train", "validation", "test")]
    for part in (0, 1):
        seen = [{pair[part] for pair in split} - {None} for split in splits]
        assert all(seen)
        assert len(set.union(*seen)) == sum(len(names) for names in seen)


def test_an_instruction_is_a_chat_turn_under_its_system_prompt() -> None:
    backend = FakeBackend()
    prompt = backend.tokenizer.decode(instruction_prompt(backend, "Name a bird.", "Be brief."))
    assert prompt == "system\nBe brief.\nuser\nName a bird.\nassistant\n"


def test_an_instruction_is_plain_text_where_there_is_no_chat_template() -> None:
    backend = FakeBackend()
    backend.tokenizer.has_chat_template = False
    assert bytes(instruction_prompt(backend, "Name a bird.")) == b"Name a bird.\n"
    assert bytes(instruction_prompt(backend, "Name a bird.", "Be brief.")) == b"Be brief.\nName a bird.\n"


@pytest.mark.parametrize("limits", [{"max_sequences": 1}, {"max_sequences": 2}, {"kv_capacity_tokens": 30}], ids=str)
def test_greedy_replies_are_the_same_where_few_fit_at_once(limits: dict[str, int]) -> None:
    prompts = [list(b"Name three colours."), list(b"Go on."), list(b"Yes?")]
    assert greedy_replies(FakeBackend(**limits), prompts, 8) == greedy_replies(FakeBackend(), prompts, 8)


def test_greedy_replies_end_with_the_end_token_or_at_the_limit() -> None:
    backend = FakeBackend(script=lambda prompt: "yes" if "short" in prompt else "a very long reply")
    prompts = [instruction_prompt(backend, text) for text in ("short", "long")]
    short, long = greedy_replies(backend, prompts, 8)
    assert short == [*b"yes", END]
    assert bytes(long) == b"a very l"
    assert backend.open_sequences == 0


def test_greedy_replies_in_a_batch_equal_each_alone() -> None:
    backend = FakeBackend()
    prompts = [instruction_prompt(backend, text) for text in ("one", "another one", "x")]
    assert greedy_replies(backend, prompts, 6) == [greedy_replies(backend, [p], 6)[0] for p in prompts]


def test_base_replies_answer_every_instruction_of_the_split() -> None:
    backend = FakeBackend()
    replies = base_replies(backend, "test", reply_tokens=4)
    assert len(replies) == len(instructions("test"))
    assert all(1 <= len(reply.reply_ids) <= 4 for reply in replies)
    assert backend.open_sequences == 0


def test_an_offset_of_strength_zero_keeps_everything_exactly(make_offset: MakeOffset) -> None:
    backend = FakeBackend()
    for anchor in ("turn", "sequence"):
        found = measure_retention(backend, REPLIES, make_offset(backend.identity, anchor=anchor).scaled(0))
        assert found.kl == 0.0
        assert found.reply_perplexity_with == found.reply_perplexity_without


def test_kl_and_perplexities_are_those_of_the_definition(make_offset: MakeOffset) -> None:
    backend = FakeBackend()
    offset = make_offset(backend.identity)
    found = measure_retention(backend, REPLIES, offset)
    base = np.concatenate(list(target_distributions(backend, REPLIES, None))).astype(np.float64)
    ours = np.concatenate(list(target_distributions(backend, REPLIES, offset))).astype(np.float64)
    targets = [token for reply in REPLIES for token in reply.targets]
    rows = np.arange(len(targets))
    assert found.kl == pytest.approx((np.exp(base) * (base - ours)).sum(axis=1).mean(), rel=1e-4)
    assert found.kl > 0
    assert found.reply_perplexity_without == pytest.approx(np.exp(-base[rows, targets].mean()), rel=1e-5)
    assert found.reply_perplexity_with == pytest.approx(np.exp(-ours[rows, targets].mean()), rel=1e-5)


def test_several_offsets_at_once_give_what_each_gives_alone(make_offset: MakeOffset) -> None:
    backend = FakeBackend()
    offsets = [
        make_offset(backend.identity, seed=1),
        make_offset(backend.identity, seed=2, anchor="sequence", prompt_format="raw"),
        make_offset(backend.identity, seed=3, positions=5),
    ]
    steps: list[int] = []
    found = measure_retentions(backend, REPLIES, offsets, progress=steps.append)
    assert found == [measure_retention(backend, REPLIES, offset) for offset in offsets]
    assert sum(steps) == len(REPLIES) * (1 + len(offsets))


def test_json_holds_the_three_figures(make_offset: MakeOffset) -> None:
    backend = FakeBackend()
    found = measure_retention(backend, REPLIES, make_offset(backend.identity))
    assert list(found.as_json()) == ["kl", "reply_perplexity_without", "reply_perplexity_with"]
