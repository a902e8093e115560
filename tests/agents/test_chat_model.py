"""ChatOffset: replies, streams, batches, and what they say about themselves."""

from __future__ import annotations

import asyncio
import functools
import operator
import time
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.runnables import ConfigurableField

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset
from offset_runtime.agents.reply import logprobs_metadata
from offset_runtime.backends.fake import FakeTokenizer
from offset_runtime.errors import DeadlineExceededError, InvalidRequestError, PromptFormatError, QueueFullError
from offset_runtime.request import TokenLogprob


def merged(chunks: list[Any]) -> AIMessageChunk:
    return functools.reduce(operator.add, chunks)


def without_timings(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != "timings"}


def usage_of(message: Any) -> dict[str, Any]:
    return dict(message.usage_metadata)


async def becomes_idle(runtime: OffsetRuntime) -> bool:
    """Whether the engine, let go on token by token, soon has no open sequence but the cached ones."""
    for _ in range(500):
        if runtime.backend.open_sequences == runtime.engine.cache_figures.entries:
            return True
        runtime.backend.consume()
        await asyncio.sleep(0.01)
    return False


def test_the_reply_is_the_runtimes_own(law: ChatOffset) -> None:
    runtime = law.load_runtime()
    request = runtime.chat_request([{"role": "user", "content": "hello"}], domain="law", sampling=law.sampling())

    assert law.invoke("hello").content == runtime.run(request).text


async def test_every_way_of_calling_gives_the_same_reply(law: ChatOffset) -> None:
    expected = law.invoke("hello").content

    assert merged(list(law.stream("hello"))).content == expected
    assert [reply.content for reply in law.batch(["hello", "hello"])] == [expected] * 2
    assert (await law.ainvoke("hello")).content == expected
    assert merged([chunk async for chunk in law.astream("hello")]).content == expected
    assert [reply.content for reply in await law.abatch(["hello", "hello"])] == [expected] * 2


def test_tokens_come_one_by_one(law: ChatOffset) -> None:
    texts = [chunk.content for chunk in law.stream("hello") if chunk.content]

    assert len(texts) == 12


def test_a_domain_changes_the_reply_and_none_is_the_plain_base(law: ChatOffset) -> None:
    replies = {str(law.for_domain(domain).invoke("hello").content) for domain in ("law", "news", None)}
    plain = ChatOffset(model="fake", runtime=law.runtime, max_tokens=12)

    assert len(replies) == 3
    assert plain.invoke("hello").content == law.for_domain(None).invoke("hello").content


def test_strength_scales_the_offset_and_zero_is_the_plain_base(law: ChatOffset) -> None:
    plain = law.for_domain(None).invoke("hello").content

    assert law.invoke("hello", strength=0.0).content == plain
    assert law.invoke("hello", strength=0.5).content not in (plain, law.invoke("hello").content)


def test_a_reply_says_where_it_comes_from(law: ChatOffset) -> None:
    reply = law.invoke("hello", strength=0.5)
    timings = reply.response_metadata["timings"]
    held = law.load_runtime().engine.cache_figures

    assert held.bytes > 0
    assert without_timings(reply.response_metadata) == {
        "model_name": "fake#law",
        "domain": "law",
        "offset_digest": law.load_runtime().offsets["law"].digest,
        "strength": 0.5,
        "finish_reason": "length",
        "cache": {"hit_tokens": 0, "entries": 1, "bytes": held.bytes, "evictions": 0},
    }
    assert set(timings) == {"queue_s", "prefill_s", "decode_s"}
    assert all(seconds >= 0 for seconds in timings.values())


def test_the_plain_base_has_no_domain_in_its_metadata(law: ChatOffset) -> None:
    metadata = law.for_domain(None).invoke("hello").response_metadata

    assert (metadata["model_name"], metadata["domain"], metadata["offset_digest"]) == ("fake", None, None)


def test_usage_counts_prompt_and_reply_tokens(law: ChatOffset) -> None:
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"

    assert law.invoke("hello").usage_metadata == {
        "input_tokens": law.get_num_tokens(prompt),
        "output_tokens": 12,
        "total_tokens": law.get_num_tokens(prompt) + 12,
        "input_token_details": {"cache_read": 0},
    }


def test_usage_and_model_name_are_on_one_chunk_and_survive_merging(law: ChatOffset) -> None:
    # Read once before, so that both find the prompt in the cache.
    prompt_tokens = usage_of(law.invoke("hello"))["input_tokens"]
    chunks = list(law.stream("hello"))
    whole = law.invoke("hello")

    assert usage_of(whole)["input_token_details"] == {"cache_read": prompt_tokens - 1}
    assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
    assert sum("model_name" in chunk.response_metadata for chunk in chunks) == 1
    assert merged(chunks).usage_metadata == whole.usage_metadata
    assert without_timings(merged(chunks).response_metadata) == without_timings(whole.response_metadata)


def test_a_reply_that_ends_by_itself_says_stop(scripted: Any) -> None:
    reply = scripted(lambda prompt: "done").invoke("hello")

    assert (reply.content, reply.response_metadata["finish_reason"]) == ("done", "stop")


def test_logprobs_have_the_shape_of_openais_api(law: ChatOffset) -> None:
    reply = law.invoke("hello", logprobs=True, top_logprobs=2)
    content = reply.response_metadata["logprobs"]["content"]

    assert "".join(entry["token"] for entry in content) == reply.content
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        best = entry["top_logprobs"][0]
        assert (best["token"], best["logprob"]) == (entry["token"], entry["logprob"])


def test_streamed_logprobs_merge_to_those_of_the_whole_reply(law: ChatOffset) -> None:
    chunks = list(law.stream("hello", logprobs=True))

    assert all(len(c.response_metadata["logprobs"]["content"]) == 1 for c in chunks if c.content)
    assert (
        merged(chunks).response_metadata["logprobs"] == law.invoke("hello", logprobs=True).response_metadata["logprobs"]
    )


def test_a_token_that_is_part_of_a_character_has_no_bytes(scripted: Any) -> None:
    reply = scripted(lambda prompt: "é").invoke("hello", logprobs=True)
    content = reply.response_metadata["logprobs"]["content"]

    assert reply.content == "é"
    assert [entry["bytes"] for entry in content] == [None, None, []]


def test_a_token_keeps_its_leading_space_where_the_tokenizer_drops_it_at_the_start() -> None:
    class Spaced(FakeTokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            return super().decode(token_ids).removeprefix(" ")

    metadata = logprobs_metadata(Spaced(), [TokenLogprob(ord(" "), -1.0)])

    assert metadata["logprobs"]["content"][0]["token"] == " "


def test_stop_of_the_call_adds_to_the_models_own(scripted: Any) -> None:
    model = scripted(lambda prompt: "one two three four", stop=["four"])

    assert model.invoke("count").content == "one two three "
    assert model.invoke("count", stop=["three"]).content == "one two "
    assert model.invoke("count", stop=["five"]).content == "one two three "


def test_a_stop_string_never_shows_in_a_stream(scripted: Any) -> None:
    texts = [chunk.content for chunk in scripted(lambda prompt: "one two three").stream("count", stop=["two"])]

    assert "".join(texts) == "one "


def test_arguments_of_a_call_override_fields(law: ChatOffset) -> None:
    news = law.for_domain("news").invoke("hello")

    assert law.invoke("hello", domain="news").content == news.content
    assert law.bind(domain="news").invoke("hello").content == news.content
    assert law.invoke("hello", max_tokens=3).usage_metadata["output_tokens"] == 3
    assert law.invoke("hello", domain=None).response_metadata["domain"] is None


def test_model_of_a_call_may_name_a_domain_and_is_echoed(law: ChatOffset) -> None:
    reply = law.invoke("hello", model="fake#news")

    assert reply.content == law.for_domain("news").invoke("hello").content
    assert reply.response_metadata["model_name"] == "fake#news"


def test_a_domain_can_be_chosen_through_langchains_configuration(law: ChatOffset) -> None:
    model = law.configurable_fields(domain=ConfigurableField(id="domain"))

    reply = model.with_config(configurable={"domain": "news"}).invoke("hello")

    assert reply.response_metadata["domain"] == "news"


def test_an_unknown_argument_is_refused_with_the_nearest_name(law: ChatOffset) -> None:
    with pytest.raises(InvalidRequestError, match="unknown argument 'domian'; did you mean 'domain'"):
        law.invoke("hello", domian="news")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 0}, "top_p=0"),
        ({"stop": [""]}, "stop string must not be empty"),
        ({"top_logprobs": 2}, "called with top_logprobs=2 needs logprobs=True"),
        ({"timeout": -1}, "timeout=-1"),
    ],
)
def test_a_value_out_of_range_is_named(law: ChatOffset, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        law.invoke("hello", **arguments)


def test_an_offset_of_another_format_is_refused(fake_runtime: OffsetRuntime, make_offset: Any) -> None:
    fake_runtime.register(make_offset(fake_runtime.backend.identity, "prose", prompt_format="raw"))

    with pytest.raises(PromptFormatError, match="prose"):
        ChatOffset(model="fake", domain="prose", runtime=fake_runtime).invoke("hello")


def test_a_seed_repeats_a_random_reply(law: ChatOffset) -> None:
    replies = [law.invoke("hello", temperature=2.0, seed=seed).content for seed in (1, 1, 2)]

    assert replies[0] == replies[1] != replies[2]


def test_a_stream_can_be_read_without_a_run_manager(law: ChatOffset) -> None:
    chunks = [chunk.message for chunk in law._stream([HumanMessage("hello")])]

    assert merged(chunks).content == law.invoke("hello").content


def test_a_call_past_its_timeout_fails(watched: Any) -> None:
    runtime = watched(in_step=True)
    model = ChatOffset(model="fake", runtime=runtime, timeout=0.05)

    def read_slowly() -> None:
        for _ in model.stream("hello"):
            time.sleep(0.1)
            runtime.backend.consume()

    with pytest.raises(DeadlineExceededError, match=r"within 0\.05 s"):
        read_slowly()


@pytest.mark.parametrize("failures", [0, 2])
async def test_a_full_queue_is_tried_again(law: ChatOffset, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    expected = law.invoke("hello").content
    attempts = _make_queue_full(law.load_runtime(), monkeypatch, failures)

    assert law.invoke("hello", max_retries=2).content == expected
    assert (await law.ainvoke("hello", max_retries=2)).content == expected
    assert len(attempts) == 2 * (failures + 1)


async def test_a_queue_that_stays_full_is_an_error(law: ChatOffset, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = _make_queue_full(law.load_runtime(), monkeypatch, failures=3)

    with pytest.raises(QueueFullError):
        law.invoke("hello", max_retries=1)
    with pytest.raises(QueueFullError):
        await law.ainvoke("hello", max_retries=0)
    assert len(attempts) == 3


def test_other_errors_are_not_tried_again(law: ChatOffset, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = _make_queue_full(law.load_runtime(), monkeypatch, failures=5, error=InvalidRequestError)

    with pytest.raises(InvalidRequestError):
        law.invoke("hello", max_retries=3)
    assert len(attempts) == 1


def _make_queue_full(
    runtime: OffsetRuntime, monkeypatch: pytest.MonkeyPatch, failures: int, error: type[Exception] = QueueFullError
) -> list[int]:
    """Let `failures` of every `failures` + 1 submissions fail; return the list that counts them."""
    attempts: list[int] = []
    submit = runtime.engine.submit

    def flaky(*request: Any) -> Any:
        attempts.append(1)
        if len(attempts) % (failures + 1):
            raise error("full")
        return submit(*request)

    monkeypatch.setattr(runtime.engine, "submit", flaky)
    monkeypatch.setattr("offset_runtime.agents.submission._FIRST_WAIT_S", 0.001)
    return attempts


def test_a_batch_runs_as_one_batch_of_the_engine(watched: Any) -> None:
    runtime = watched(expected=8)
    model = ChatOffset(model="fake", runtime=runtime, max_tokens=6)

    model.batch([f"question {i}" for i in range(8)])

    assert max(runtime.backend.batch_sizes) == 8


async def test_an_async_batch_longer_than_the_queue_runs_through(law: ChatOffset) -> None:
    replies = await law.abatch([f"question {i % 3}" for i in range(300)], max_tokens=2)

    assert len({str(reply.content) for reply in replies}) == 3


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_leaving_a_stream_early_cancels_it_in_the_engine(watched: Any, asynchronous: bool) -> None:
    runtime = watched(in_step=True)
    model = ChatOffset(model="fake", runtime=runtime, max_tokens=3000)

    if asynchronous:
        async for _ in model.astream("hello"):
            break
    else:
        for _ in model.stream("hello"):
            break

    assert await becomes_idle(runtime)
    assert len(runtime.backend.batch_sizes) < 500


async def test_cancelling_a_task_cancels_its_request(watched: Any) -> None:
    runtime = watched(in_step=True)
    model = ChatOffset(model="fake", runtime=runtime, max_tokens=3000)
    task = asyncio.create_task(model.ainvoke("hello"))
    assert await asyncio.to_thread(runtime.backend.started.wait, 20)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await becomes_idle(runtime)
    assert len(runtime.backend.batch_sizes) < 500


def test_tokens_are_counted_by_the_bases_own_tokenizer(law: ChatOffset) -> None:
    assert law.get_token_ids("aé") == [97, 0xC3, 0xA9]
    assert law.get_num_tokens("aé") == 3


def test_a_counter_of_the_users_own_is_kept(law: ChatOffset) -> None:
    model = ChatOffset(model="fake", runtime=law.runtime, custom_get_token_ids=lambda text: [1])

    assert model.get_num_tokens("many words") == 1


def test_the_profile_tells_what_the_model_can_and_the_context_of_a_loaded_base(law: ChatOffset) -> None:
    can = {"tool_calling": True, "tool_choice": True, "structured_output": True}

    assert law.profile == {**can, "max_input_tokens": 4096}
    assert ChatOffset(model="fake").profile == can
