"""Where LangChain's defaults would mix domains, block the loop or lose tokens; each once went wrong elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.runnables import RunnableParallel
from langgraph.graph import START, MessagesState, StateGraph

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset, OffsetLLM
from offset_runtime.errors import InvalidRequestError

DOMAINS = ("law", "news", None)


@pytest.fixture
def llm_cache() -> Iterator[None]:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


@pytest.fixture
def solo(law: ChatOffset) -> dict[str | None, str]:
    """The reply of each domain, run alone and without a cache."""
    return {domain: str(law.for_domain(domain).invoke("hello").content) for domain in DOMAINS}


@pytest.mark.usefixtures("solo", "llm_cache")
async def test_the_cache_never_gives_one_domain_the_answer_of_another(
    law: ChatOffset, solo: dict[str | None, str]
) -> None:
    for _ in range(2):
        for domain in DOMAINS:
            assert law.for_domain(domain).invoke("hello").content == solo[domain]
            assert law.invoke("hello", domain=domain).content == solo[domain]
            assert (await law.ainvoke("hello", domain=domain)).content == solo[domain]


@pytest.mark.usefixtures("llm_cache")
def test_the_cache_answers_the_same_call_again(law: ChatOffset, monkeypatch: pytest.MonkeyPatch) -> None:
    first = law.invoke("hello")
    monkeypatch.setattr(law.load_runtime().engine, "submit", lambda *request: pytest.fail("ran again"))

    assert law.invoke("hello").content == first.content
    assert law.for_domain("news").for_domain("law").invoke("hello").content == first.content


@pytest.mark.usefixtures("loads", "llm_cache")
def test_the_cache_forgets_a_domain_that_was_trained_anew(store: Path) -> None:
    before = ChatOffset(model="fake", domain="law", store=store, max_tokens=8).invoke("hello")
    replaced = store / "news.safetensors"
    after = ChatOffset(model="fake", domain="law", domains={"law": replaced}, max_tokens=8).invoke("hello")

    assert before.content != after.content


@pytest.mark.usefixtures("loads", "llm_cache")
def test_the_cache_tells_offsets_apart_that_calls_name_alike(store: Path) -> None:
    replies = [
        ChatOffset(model="fake", domains={"x": store / file}, max_tokens=8).invoke("hello", domain="x").content
        for file in ("law.safetensors", "news.safetensors")
    ]

    assert replies[0] != replies[1]


@pytest.mark.parametrize(
    "fields", [{"strength": 0.5}, {"stop": ["x"]}, {"seed": 1}, {"logprobs": True}, {"max_tokens": 3}, {"min_p": 0.1}]
)
def test_whatever_decides_a_reply_is_part_of_the_cache_key(law: ChatOffset, fields: dict[str, Any]) -> None:
    changed = ChatOffset(**{**{"model": "fake", "domain": "law", "runtime": law.runtime, "max_tokens": 12}, **fields})

    assert changed._get_llm_string(stop=None) != law._get_llm_string(stop=None)
    call = {name: value for name, value in fields.items() if name != "stop"}
    assert law._get_llm_string(stop=fields.get("stop"), **call) != law._get_llm_string(stop=None)


def test_domain_and_model_are_in_the_tracing_parameters(law: ChatOffset) -> None:
    assert law._get_ls_params(stop=["x"], model="fake#news", temperature=0.5) == {
        "ls_provider": "offset-runtime",
        "ls_model_name": "fake#news",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 12,
        "ls_stop": ["x"],
        "domain": "news",
    }
    assert OffsetLLM(model="fake")._get_ls_params()["ls_model_type"] == "llm"


def test_parallel_threads_in_different_domains_equal_solo_runs(law: ChatOffset, solo: dict[str | None, str]) -> None:
    together = RunnableParallel({str(domain): law.for_domain(domain) for domain in DOMAINS})

    for replies in together.batch(["hello"] * 4):
        assert {name: reply.content for name, reply in replies.items()} == {str(d): t for d, t in solo.items()}


def test_streams_read_by_parallel_threads_equal_solo_runs(law: ChatOffset, solo: dict[str | None, str]) -> None:
    def read(domain: str | None) -> str:
        return "".join(str(chunk.content) for chunk in law.for_domain(domain).stream("hello"))

    domains = list(DOMAINS) * 4
    with ThreadPoolExecutor(len(domains)) as pool:
        assert list(pool.map(read, domains)) == [solo[domain] for domain in domains]


async def test_streaming_takes_no_pool_thread_for_its_tokens(law: ChatOffset, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    hops: list[Any] = []
    run = loop.run_in_executor

    def counted(executor: Any, function: Any, *arguments: Any) -> Any:
        hops.append(function)
        return run(executor, function, *arguments)

    monkeypatch.setattr(loop, "run_in_executor", counted)
    chunks = {tokens: [c async for c in law.astream("hello", max_tokens=tokens)] for tokens in (2, 40)}

    assert len(chunks[40]) > len(chunks[2])
    assert len(hops) == 2


async def test_an_instance_made_from_another_event_loop_works_in_this_one(law: ChatOffset) -> None:
    elsewhere = await asyncio.to_thread(lambda: asyncio.run(law.ainvoke("hello")))

    assert (await law.ainvoke("hello")).content == elsewhere.content


def _graph(model: ChatOffset) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_edge(START, "agent")
    return builder.compile()


def _streamed_tokens(model: ChatOffset) -> list[str]:
    parts = _graph(model).stream({"messages": [("user", "hello")]}, stream_mode="messages")
    return [str(message.content) for message, _ in parts if message.content]


@pytest.mark.parametrize("fields", [{}, {"streaming": True}])
def test_tokens_stream_through_a_graph_whatever_the_flag(law: ChatOffset, fields: dict[str, Any]) -> None:
    model = ChatOffset(model="fake", domain="law", runtime=law.runtime, max_tokens=12, **fields)

    assert len(_streamed_tokens(model)) == len(_streamed_tokens(model.for_domain("news"))) == 12


def test_an_explicit_false_switches_token_streaming_off(law: ChatOffset) -> None:
    model = ChatOffset(model="fake", domain="law", runtime=law.runtime, max_tokens=12, streaming=False)

    assert _streamed_tokens(model) == [model.invoke("hello").content]


def test_streaming_inside_invoke_gives_the_same_reply(law: ChatOffset) -> None:
    model = ChatOffset(model="fake", domain="law", runtime=law.runtime, max_tokens=12, streaming=True)
    # Read once before, so that both find the prompt in the cache.
    law.invoke("hello")
    reply, plain = model.invoke("hello"), law.invoke("hello")

    assert (reply.content, reply.usage_metadata) == (plain.content, plain.usage_metadata)
    assert model.invoke("hello", stream=False).content == plain.content


def test_an_agent_keeps_the_domain_of_its_model(law: ChatOffset) -> None:
    agent = create_agent(law, tools=[])

    reply = agent.invoke({"messages": [("user", "hello")]})["messages"][-1]

    assert reply.response_metadata["domain"] == "law"


def test_middleware_can_choose_the_domain_of_a_call(law: ChatOffset) -> None:
    @wrap_model_call
    def in_news(request: Any, handler: Any) -> Any:
        return handler(request.override(model_settings={"domain": "news"}))

    agent = create_agent(law, tools=[], middleware=[in_news])

    assert agent.invoke({"messages": [("user", "hello")]})["messages"][-1].response_metadata["domain"] == "news"


def test_text_that_is_no_valid_unicode_is_refused_by_name(law: ChatOffset) -> None:
    with pytest.raises(InvalidRequestError, match="no valid Unicode"):
        law.invoke("x\ud800")
    with pytest.raises(InvalidRequestError, match="no valid Unicode"):
        law.get_token_ids("x\ud800")


def test_two_bases_under_one_name_have_different_cache_keys(law: ChatOffset, fake_runtime: OffsetRuntime) -> None:
    named = ChatOffset(model="fake", domain="law", max_tokens=12)

    assert named._identifying_params["base_digest"] != law._identifying_params["base_digest"]
