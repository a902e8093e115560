"""OffsetLLM: continuing plain text in a domain of format raw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache

from offset_runtime import EngineSettings, OffsetRuntime
from offset_runtime.agents import OffsetLLM
from offset_runtime.errors import InvalidRequestError, PromptFormatError

PROMPTS = [f"once upon a time {i}" for i in range(6)]


@pytest.fixture
def prose(fake_runtime: OffsetRuntime, make_offset: Any) -> OffsetLLM:
    """A text model in the domain `prose`, on a base that knows `verse` too."""
    for seed, domain in enumerate(["prose", "verse"]):
        offset = make_offset(fake_runtime.backend.identity, domain, anchor="sequence", prompt_format="raw", seed=seed)
        fake_runtime.register(offset)
    return OffsetLLM(model="fake", domain="prose", runtime=fake_runtime, max_tokens=8)


@pytest.fixture
def llm_cache() -> Iterator[None]:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


def test_the_reply_is_the_runtimes_own(prose: OffsetLLM) -> None:
    runtime = prose.load_runtime()
    request = runtime.text_request("once", domain="prose", sampling=prose.sampling())

    assert prose.invoke("once") == runtime.run(request).text


async def test_every_way_of_calling_gives_the_same_reply(prose: OffsetLLM) -> None:
    expected = [prose.invoke(prompt) for prompt in PROMPTS]

    assert ["".join(prose.stream(prompt)) for prompt in PROMPTS] == expected
    assert prose.batch(PROMPTS) == expected
    assert [await prose.ainvoke(prompt) for prompt in PROMPTS] == expected
    assert ["".join([text async for text in prose.astream(prompt)]) for prompt in PROMPTS] == expected
    assert await prose.abatch(PROMPTS) == expected


def test_prompts_given_at_once_run_in_one_batch_of_the_engine(watched: Any) -> None:
    runtime = watched(expected=len(PROMPTS))

    OffsetLLM(model="fake", runtime=runtime, max_tokens=4).batch(PROMPTS)

    assert max(runtime.backend.batch_sizes) == len(PROMPTS)


async def test_prompts_given_at_once_run_in_one_batch_from_the_event_loop_too(watched: Any) -> None:
    runtime = watched(expected=len(PROMPTS))

    await OffsetLLM(model="fake", runtime=runtime, max_tokens=4).abatch(PROMPTS)

    assert max(runtime.backend.batch_sizes) == len(PROMPTS)


async def test_more_prompts_than_the_queue_holds_run_through_in_order(watched: Any) -> None:
    runtime = watched(settings=EngineSettings(max_running=1, max_waiting=1))
    model = OffsetLLM(model="fake", runtime=runtime, max_tokens=4, max_retries=0)
    expected = [model.invoke(prompt) for prompt in PROMPTS]

    assert model.batch(PROMPTS) == expected
    assert await model.abatch(PROMPTS) == expected


async def test_one_prompt_that_cannot_run_fails_the_batch_and_frees_the_others(prose: OffsetLLM) -> None:
    prompts = ["short", "long " * 2000]

    with pytest.raises(Exception, match="exceeds the context"):
        prose.batch(prompts)
    with pytest.raises(Exception, match="exceeds the context"):
        await prose.abatch(prompts)
    assert prose.invoke("short")


def test_generation_info_says_where_a_reply_comes_from(prose: OffsetLLM) -> None:
    info = prose.generate(["once"]).generations[0][0].generation_info
    assert info is not None
    timings = info.pop("timings")

    assert info == {
        "model_name": "fake#prose",
        "domain": "prose",
        "offset_digest": prose.load_runtime().offsets["prose"].digest,
        "strength": 1.0,
        "finish_reason": "length",
        "cache": {
            "hit_tokens": 0,
            "entries": 1,
            "bytes": prose.load_runtime().engine.cache_figures.bytes,
            "evictions": 0,
        },
        "usage_metadata": {
            "input_tokens": 4,
            "output_tokens": 8,
            "total_tokens": 12,
            "input_token_details": {"cache_read": 0},
        },
    }
    assert set(timings) == {"queue_s", "prefill_s", "decode_s"}


def test_streamed_chunks_merge_to_the_whole_generation(prose: OffsetLLM) -> None:
    prose = prose.configured({"logprobs": True})
    # Read once before, so that both find the prompt in the cache.
    prose.generate(["once"])
    chunks = list(prose._stream("once"))
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged += chunk
    whole = prose.generate(["once"]).generations[0][0]

    assert merged.text == whole.text
    assert {**(merged.generation_info or {}), "timings": 0} == {**(whole.generation_info or {}), "timings": 0}


def test_arguments_of_a_call_override_fields(prose: OffsetLLM) -> None:
    verse = prose.for_domain("verse").invoke("once")

    assert prose.invoke("once", domain="verse") == verse != prose.invoke("once")
    assert "".join(prose.stream("once", domain="verse")) == verse
    assert prose.batch(["once"], domain="verse") == [verse]
    with pytest.raises(InvalidRequestError, match="did you mean 'domain'"):
        prose.invoke("once", domian="verse")


def test_a_chat_offset_is_refused(prose: OffsetLLM, make_offset: Any) -> None:
    runtime = prose.load_runtime()
    runtime.register(make_offset(runtime.backend.identity, "talk"))

    with pytest.raises(PromptFormatError, match="talk"):
        prose.invoke("once", domain="talk")


@pytest.mark.usefixtures("llm_cache")
async def test_langchains_cache_never_mixes_the_arguments_of_calls(prose: OffsetLLM) -> None:
    solo = {domain: prose.for_domain(domain).invoke("once") for domain in ("prose", "verse", None)}

    for domain, expected in solo.items():
        assert prose.invoke("once", domain=domain) == expected
        assert await prose.ainvoke("once", domain=domain) == expected
    assert len(prose.invoke("once", max_tokens=3)) < len(prose.invoke("once"))


@pytest.mark.usefixtures("llm_cache")
def test_langchains_cache_answers_the_same_call_again(prose: OffsetLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prose.invoke("once")
    monkeypatch.setattr(prose.load_runtime().engine, "submit", lambda *request: pytest.fail("ran again"))

    assert prose.invoke("once") == first
