"""What people call: domains by name, requests laid out, scores, and one base model a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from waiting import until

from offset_runtime import DomainOffset, EngineSettings, OffsetRuntime, OffsetStore, Request, SamplingParams
from offset_runtime.backends.fake import FakeBackend, FakeTokenizer
from offset_runtime.errors import (
    BaseModelMismatchError,
    ContextOverflowError,
    EngineClosedError,
    InvalidRequestError,
    ModelNotFoundError,
    OffsetFileError,
    PromptFormatError,
    QueueFullError,
    UnknownDomainError,
)
from offset_runtime.identity import BaseIdentity
from offset_runtime.offset import Anchor
from offset_runtime.placement import Placement

MakeOffset = Callable[..., DomainOffset]

IDENTITY = FakeBackend().identity
HELLO = [{"role": "user", "content": "hello"}]


class StartingTokenizer(FakeTokenizer):
    bos_token_id: int | None = 256
    adds_bos = True


def foreign(identity: BaseIdentity) -> BaseIdentity:
    return identity.model_copy(update={"architecture": "mamba"})


# Domains


def test_an_unknown_domain_is_an_error_and_never_the_base(fake_runtime: OffsetRuntime, make_offset: MakeOffset) -> None:
    fake_runtime.register(make_offset(IDENTITY, domain="legal"))
    for ask in (
        lambda: fake_runtime.chat_request(HELLO, domain="leagl"),
        lambda: fake_runtime.text_request("hello", domain="leagl"),
        lambda: fake_runtime.score("hello there", ["legal", "leagl"]),
        lambda: fake_runtime.chat_request(HELLO, domain=""),
    ):
        with pytest.raises(UnknownDomainError, match="known domains: legal"):
            ask()


def test_an_offset_of_another_model_is_an_error_by_name_and_as_a_value(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    offset = make_offset(foreign(IDENTITY), domain="legal")
    with pytest.raises(BaseModelMismatchError, match=r"'legal' was made for another base model: architecture mamba"):
        fake_runtime.register(offset)
    with pytest.raises(BaseModelMismatchError):
        fake_runtime.chat_request(HELLO, domain=offset)
    assert dict(fake_runtime.offsets) == {}


def test_the_same_numbers_made_for_another_model_are_refused_even_after_they_were_accepted(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    fake_runtime.register(make_offset(IDENTITY, domain="legal"))
    with pytest.raises(BaseModelMismatchError):
        fake_runtime.register(make_offset(foreign(IDENTITY), domain="legal"))


def test_registering_a_domain_again_takes_effect_for_later_requests(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    first, second = make_offset(IDENTITY, domain="legal"), make_offset(IDENTITY, domain="legal", seed=1)
    fake_runtime.register(first)
    before = fake_runtime.chat_request(HELLO, domain="legal")
    fake_runtime.register(second)
    after = fake_runtime.chat_request(HELLO, domain="legal")
    assert [r.placements[0].offset for r in (before, after)] == [first, second]
    assert fake_runtime.run(before).text != fake_runtime.run(after).text


def test_the_registered_offsets_cannot_be_changed_from_outside(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    with pytest.raises(TypeError):
        fake_runtime.offsets["legal"] = make_offset(IDENTITY)  # type: ignore[index]


def test_load_registers_the_offsets_of_a_store(tmp_path: Path, make_offset: MakeOffset) -> None:
    store = OffsetStore(tmp_path)
    for seed, domain in enumerate(["legal", "news"]):
        store.put(make_offset(IDENTITY, domain=domain, seed=seed))
    for given in (store, tmp_path, str(tmp_path)):
        with OffsetRuntime.load("fake", store=given) as runtime:
            assert sorted(runtime.offsets) == ["legal", "news"]


def test_load_leaves_no_thread_behind_when_an_offset_does_not_fit(tmp_path: Path, make_offset: MakeOffset) -> None:
    OffsetStore(tmp_path).put(make_offset(foreign(IDENTITY), domain="legal"))
    before = set(threading.enumerate())
    with pytest.raises(BaseModelMismatchError):
        OffsetRuntime.load("fake", store=tmp_path)
    (tmp_path / "legal.safetensors").write_bytes(b"part")
    with pytest.raises(OffsetFileError):
        OffsetRuntime.load("fake", store=tmp_path)
    assert set(threading.enumerate()) == before


# Requests


def test_a_chat_request_is_laid_out_by_the_template_with_the_offset_before_the_reply(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    offset = make_offset(IDENTITY, domain="legal", positions=3)
    fake_runtime.register(offset)
    request = fake_runtime.chat_request(HELLO, domain="legal", timeout_s=5)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert list(request.prompt_ids) == fake_runtime.backend.tokenizer.encode(text)
    assert request.placements == (Placement(len(request.prompt_ids) - 3, offset, 3),)
    assert request.timeout_s == 5


def test_a_domain_changes_the_reply_and_none_is_the_plain_base(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    fake_runtime.register(make_offset(IDENTITY, domain="legal"))
    plain, legal = (fake_runtime.chat_request(HELLO, domain=domain) for domain in (None, "legal"))
    assert plain.placements == ()
    assert fake_runtime.run(plain).text != fake_runtime.run(legal).text
    assert fake_runtime.run(plain).text == fake_runtime.run(fake_runtime.chat_request(HELLO)).text


def test_strength_scales_the_offset_and_zero_leaves_it_out(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    offset = make_offset(IDENTITY, domain="legal")
    assert fake_runtime.chat_request(HELLO, domain=offset, strength=0).placements == ()
    half = fake_runtime.chat_request(HELLO, domain=offset, strength=0.5).placements[0].offset
    assert half == offset.scaled(0.5)
    assert half.digest != offset.digest


def test_an_offset_is_used_in_the_format_it_was_trained_in(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    chat, raw, bos = (make_offset(IDENTITY, domain="legal", prompt_format=kind) for kind in ("chat", "raw", "bos"))
    assert fake_runtime.chat_request(HELLO, domain=chat).placements
    assert fake_runtime.text_request("hello", domain=raw).placements
    with pytest.raises(PromptFormatError, match=r"'chat', but this request is laid out as raw or bos; train it with"):
        fake_runtime.text_request("hello", domain=chat)
    for offset in (raw, bos):
        with pytest.raises(PromptFormatError, match=f"'legal' was trained in prompt format '{offset.prompt_format}'"):
            fake_runtime.chat_request(HELLO, domain=offset)


def test_text_begins_with_the_start_token_but_for_an_offset_trained_without_one(make_offset: MakeOffset) -> None:
    backend = FakeBackend()
    backend.tokenizer = StartingTokenizer()
    with OffsetRuntime(backend) as runtime:
        raw, bos = (make_offset(IDENTITY, prompt_format=kind, anchor="sequence") for kind in ("raw", "bos"))
        assert runtime.text_request("hi", domain=raw).prompt_ids == (104, 105)
        assert runtime.text_request("hi", domain=bos).prompt_ids == (256, 104, 105)
        assert runtime.text_request("").prompt_ids == (256,)
        assert runtime.text_request("hi").prompt_ids == (256, 104, 105)
        assert runtime.text_request("<|im_start|>hi").prompt_ids == (256, 104, 105)


LONE = "a text with half a character: x\ud800"


def test_text_that_is_no_valid_unicode_is_refused_before_the_tokenizer(fake_runtime: OffsetRuntime) -> None:
    for ask in (
        lambda: fake_runtime.chat_request([{"role": "user", "content": LONE}]),
        lambda: fake_runtime.text_request(LONE),
        lambda: fake_runtime.score(LONE, [None]),
    ):
        with pytest.raises(InvalidRequestError, match=r"no valid Unicode .*'\\ud800' at position .* give the text in"):
            ask()


@pytest.mark.parametrize("messages", ["hello", b"hello", 5, None, {"role": "user", "content": "hello"}, ["hello"]])
def test_what_is_no_list_of_messages_is_refused(fake_runtime: OffsetRuntime, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="expected a list of messages with role and content"):
        fake_runtime.chat_request(messages)


def test_a_domain_a_strength_and_a_text_of_another_type_are_refused(fake_runtime: OffsetRuntime) -> None:
    wrong: Any = "2"
    for strength in (wrong, None):
        with pytest.raises(InvalidRequestError, match=r"strength .* expected a number"):
            fake_runtime.chat_request(HELLO, strength=strength)
    for domain in (5, ["legal"]):
        with pytest.raises(InvalidRequestError, match=r"domain .* expected the name of a domain"):
            fake_runtime.text_request("hello", domain=cast(Any, domain))
    with pytest.raises(InvalidRequestError, match=r"the text is 5 of type int; expected a string"):
        fake_runtime.text_request(cast(Any, 5))


def test_an_empty_text_without_a_start_token_is_refused(fake_runtime: OffsetRuntime) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        fake_runtime.run(fake_runtime.text_request(""))


def test_a_chat_longer_than_the_context_is_refused_with_figures() -> None:
    with OffsetRuntime(FakeBackend(context_tokens=64)) as runtime:
        request = runtime.chat_request(HELLO, sampling=SamplingParams(max_tokens=60))
        with pytest.raises(ContextOverflowError, match=r"exceeds the context of 64 tokens"):
            runtime.run(request)


# Scores


def test_scores_are_the_log_likelihood_of_the_text_under_each_domain(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    fake_runtime.register(make_offset(IDENTITY, domain="legal"))
    other = make_offset(IDENTITY, domain="news", seed=1)
    text = "the court held"
    base, legal, news = fake_runtime.score(text, [None, "legal", other])
    assert [score.domain for score in (base, legal, news)] == [None, "legal", "news"]
    assert {score.tokens for score in (base, legal, news)} == {len(text)}
    assert len({score.logprob for score in (base, legal, news)}) == 3
    assert base.logprob < 0
    assert base.logprob_per_token == pytest.approx(base.logprob / len(text))
    assert fake_runtime.score(text, ["legal"])[0].logprob == pytest.approx(legal.logprob)


def test_a_raw_score_leaves_out_the_first_token_which_nothing_predicts(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    raw = make_offset(IDENTITY, prompt_format="raw", anchor="sequence")
    [score] = fake_runtime.score("the court held", [raw])
    assert (score.prompt_format, score.tokens) == ("raw", len("the court held") - 1)


def test_a_text_too_short_to_score_is_refused(fake_runtime: OffsetRuntime) -> None:
    with pytest.raises(InvalidRequestError, match="too short to score"):
        fake_runtime.score("", [None])


# Life and death


def test_a_closed_runtime_says_so(fake_runtime: OffsetRuntime) -> None:
    request = fake_runtime.text_request("hello")
    fake_runtime.close()
    fake_runtime.close()
    with pytest.raises(EngineClosedError, match="load the model again"):
        fake_runtime.run(request)


def test_a_model_that_is_nowhere_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match="no model 'nowhere'"):
        OffsetRuntime.load("nowhere")


def test_replies_are_deterministic_by_default(fake_runtime: OffsetRuntime) -> None:
    texts = {fake_runtime.run(fake_runtime.chat_request(HELLO)).text for _ in range(3)}
    assert len(texts) == 1


# Offsets of earlier turns


TURNS = [*HELLO, {"role": "assistant", "content": "good day"}, {"role": "user", "content": "and?"}]


def test_an_authors_offset_lies_before_its_reply_where_it_lay_when_that_was_written(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    legal, news = (make_offset(IDENTITY, domain=name, positions=3, seed=i) for i, name in enumerate(["legal", "news"]))
    first = fake_runtime.chat_request(HELLO, domain=legal)

    request = fake_runtime.chat_request(TURNS, domain=news, turn_offsets={1: legal})

    assert request.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert request.placements == (*first.placements, Placement(len(request.prompt_ids) - 3, news, 3))
    plain = fake_runtime.chat_request(TURNS, turn_offsets={1: None})
    assert plain.placements == ()
    assert plain.prompt_ids == request.prompt_ids


def test_an_authors_offset_that_would_reach_into_a_later_one_is_left_out(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset
) -> None:
    long, short = make_offset(IDENTITY, domain="long", positions=40), make_offset(IDENTITY, domain="short", positions=3)
    author = make_offset(IDENTITY, domain="author", positions=3, seed=3)

    assert len(fake_runtime.chat_request(TURNS, domain=long, turn_offsets={1: author}).placements) == 1
    assert len(fake_runtime.chat_request(TURNS, domain=short, turn_offsets={1: author}).placements) == 2


def test_an_authors_offset_without_a_turn_is_refused(fake_runtime: OffsetRuntime, make_offset: MakeOffset) -> None:
    offset = make_offset(IDENTITY, domain="legal", positions=3)
    with pytest.raises(InvalidRequestError, match="names message 3 of 3"):
        fake_runtime.chat_request(TURNS, turn_offsets={3: offset})
    with pytest.raises(InvalidRequestError, match="sequence-anchored offset of domain 'legal'"):
        fake_runtime.chat_request(TURNS, turn_offsets={1: make_offset(IDENTITY, domain="legal", anchor="sequence")})
    other = make_offset(foreign(IDENTITY), domain="legal", positions=3)
    with pytest.raises(BaseModelMismatchError):
        fake_runtime.chat_request(TURNS, turn_offsets={1: other})


# Reading ahead


SYSTEM = [{"role": "system", "content": "Answer as a lawyer would, and cite the law."}]


@pytest.mark.parametrize("anchor", ["turn", "sequence"])
def test_a_system_prompt_that_was_read_ahead_is_not_read_again(
    fake_runtime: OffsetRuntime, make_offset: MakeOffset, anchor: Anchor
) -> None:
    offset = make_offset(IDENTITY, domain="legal", positions=3, anchor=anchor)
    with OffsetRuntime(FakeBackend(), settings=EngineSettings(cache_bytes=0)) as cold:
        expected = cold.run(cold.chat_request([*SYSTEM, *HELLO], domain=offset)).text

    tokens = fake_runtime.warm(SYSTEM, domain=offset)
    until(lambda: fake_runtime.engine.cache_figures.entries == 1)
    reply = fake_runtime.run(fake_runtime.chat_request([*SYSTEM, *HELLO], domain=offset))

    assert tokens > len(SYSTEM[0]["content"])
    assert reply.usage.cached_tokens == tokens
    assert reply.text == expected


def test_prompts_to_read_ahead_take_no_place_in_the_queue() -> None:
    with OffsetRuntime(FakeBackend(), settings=EngineSettings(max_waiting=2)) as runtime:
        long = runtime.stream(runtime.chat_request(HELLO, sampling=SamplingParams(max_tokens=2000)))
        next(iter_of_long := iter(long))
        for _ in range(2):
            runtime.warm(SYSTEM)
        with pytest.raises(QueueFullError, match="queue in the background is full: 2 requests wait"):
            runtime.warm(SYSTEM)
        assert runtime.run(runtime.chat_request(HELLO, sampling=SamplingParams(max_tokens=2))).text
        assert next(iter_of_long) is not None
        long.cancel()


def test_without_messages_the_templates_own_first_words_are_read_ahead(fake_runtime: OffsetRuntime) -> None:
    assert fake_runtime.warm([]) == len(fake_runtime.backend.tokenizer.encode("<|im_start|>user\n"))


def test_a_reply_says_what_the_cache_holds_and_what_gave_way(make_offset: MakeOffset) -> None:
    with OffsetRuntime(FakeBackend(), settings=EngineSettings(cache_bytes=2500)) as runtime:
        for text in ("first", "second", "third"):
            request = runtime.chat_request([{"role": "user", "content": text}], sampling=SamplingParams(max_tokens=4))
            reply = runtime.run(request)
        assert reply.cache.entries == runtime.engine.cache_figures.entries == 1
        assert reply.cache.bytes == runtime.engine.cache_figures.bytes
        assert reply.cache.evictions == 1
        assert runtime.engine.cache_figures.evictions == 2


def test_a_file_damaged_between_two_runs_is_saved_anew(tmp_path: Path) -> None:
    request = Request(tuple(b"a prompt of some length"), (), SamplingParams(max_tokens=2))
    for restored in (None, 0, 1):
        with OffsetRuntime(FakeBackend()) as runtime:
            if restored is not None:
                assert runtime.restore_state(tmp_path) == restored
            runtime.run(request)
            assert runtime.save_state(tmp_path) == 1
        [path] = tmp_path.iterdir()
        if restored is None:
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_there_is_nothing_to_restore_from_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with OffsetRuntime(FakeBackend()) as runtime:
        assert runtime.restore_state(tmp_path / "typo") == 0
    assert not (tmp_path / "typo").exists()


def test_saving_with_a_smaller_limit_makes_the_folder_smaller(tmp_path: Path) -> None:
    with OffsetRuntime(FakeBackend()) as runtime:
        for text in (b"one prompt of some length", b"and another one of some length"):
            runtime.run(Request(tuple(text), (), SamplingParams(max_tokens=2)))
        runtime.save_state(tmp_path)
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert runtime.save_state(tmp_path, max_bytes=size - 1) == 1
        assert runtime.save_state(tmp_path, max_bytes=10) == 0
        runtime.save_state(tmp_path, max_bytes=size - 1)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < size
