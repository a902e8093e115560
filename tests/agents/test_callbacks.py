"""What LangChain's callbacks, events and tracers get to see of a call."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.tracers import LangChainTracer
from langgraph.graph import END, START, MessagesState, StateGraph
from langsmith import Client

from offset_runtime.agents import ChatOffset, OffsetLLM, agent_node
from offset_runtime.errors import ContextOverflowError

WAYS = ["invoke", "stream", "ainvoke", "astream"]
STREAMS = ["stream", "astream"]


class Recorder(BaseCallbackHandler):
    """Notes the events of each call, and what they came with."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tokens: list[str] = []
        self.metadata: dict[str, Any] = {}
        self.prompts: list[Any] = []
        self.results: list[LLMResult] = []
        self.errors: list[BaseException] = []

    def on_llm_start(self, serialized: Any, prompts: list[str], **kwargs: Any) -> None:
        self.events.append("llm_start")
        self.prompts, self.metadata = list(prompts), kwargs["metadata"]

    def on_chat_model_start(self, serialized: Any, messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        self.events.append("chat_model_start")
        self.prompts, self.metadata = [message.content for message in messages[0]], kwargs["metadata"]

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.events.append("token")
        # LangChain itself hands on the chunk too, which is where tool calls and metadata are.
        assert kwargs["chunk"].text == token
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.events.append("end")
        self.results.append(response)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.events.append("error")
        self.errors.append(error)


async def call(model: Any, way: str, question: str, recorder: BaseCallbackHandler, **kwargs: Any) -> None:
    run = getattr(model, way)(question, {"callbacks": [recorder]}, **kwargs)
    if way == "stream":
        list(run)
    elif way == "ainvoke":
        await run
    elif way == "astream":
        assert [chunk async for chunk in run]


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_is_a_start_its_tokens_where_it_streams_and_an_end(law: ChatOffset, way: str) -> None:
    recorder = Recorder()

    await call(law, way, "hello", recorder)

    [result] = recorder.results
    reply: Any = result.generations[0][0]
    assert recorder.events == ["chat_model_start", *["token"] * len(recorder.tokens), "end"]
    assert recorder.prompts == ["hello"]
    assert "".join(recorder.tokens) == (reply.text if way in STREAMS else "")
    assert reply.message.usage_metadata["output_tokens"] == 12
    assert reply.generation_info["finish_reason"] == "length"


@pytest.mark.parametrize("way", WAYS)
async def test_an_llm_is_seen_likewise(law: ChatOffset, way: str) -> None:
    recorder = Recorder()
    prose = OffsetLLM(model="fake", runtime=law.runtime, max_tokens=12)

    await call(prose, way, "Once", recorder)

    assert recorder.events == ["llm_start", *["token"] * len(recorder.tokens), "end"]
    assert recorder.prompts == ["Once"]
    assert bool(recorder.tokens) == (way in STREAMS)
    assert recorder.metadata["ls_model_type"] == "llm"


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_that_fails_is_an_error_and_no_end(law: ChatOffset, way: str) -> None:
    recorder = Recorder()

    with pytest.raises(ContextOverflowError):
        await call(law, way, "hello " * 2000, recorder)

    assert recorder.events == ["chat_model_start", "error"]
    assert [type(error) for error in recorder.errors] == [ContextOverflowError]


async def test_the_events_of_a_graph_say_which_agent_speaks_in_which_domain(law: ChatOffset) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("lawyer", agent_node("lawyer", law))
    builder.add_node("reporter", agent_node("reporter", law.for_domain("news")))
    builder.add_edge(START, "lawyer")
    builder.add_edge("lawyer", "reporter")
    builder.add_edge("reporter", END)
    graph = builder.compile()

    seen: list[tuple[str, str, str]] = []
    texts: dict[str, str] = {"lawyer": "", "reporter": ""}
    async for event in graph.astream_events({"messages": [("user", "hello")]}, version="v2"):
        if event["name"] != "ChatOffset":
            continue
        metadata = event["metadata"]
        assert metadata["langgraph_node"] == metadata["agent"]
        seen.append((event["event"], metadata["agent"], metadata["domain"]))
        if event["event"] == "on_chat_model_stream":
            texts[metadata["agent"]] += event["data"]["chunk"].text
        elif event["event"] == "on_chat_model_end":
            assert texts[metadata["agent"]] == event["data"]["output"].text != ""

    names = ("on_chat_model_start", "on_chat_model_stream", "on_chat_model_end")
    assert list(dict.fromkeys(seen)) == [
        *((name, "lawyer", "law") for name in names),
        *((name, "reporter", "news") for name in names),
    ]
    assert seen.count(("on_chat_model_stream", "reporter", "news")) > 5


@pytest.fixture
def langsmith() -> Callable[[], tuple[LangChainTracer, list[dict[str, Any]]]]:
    """Return the function that makes LangSmith's tracer, and a list of what it would send."""

    def make() -> tuple[LangChainTracer, list[dict[str, Any]]]:
        session, sent = MagicMock(), []

        def request(method: str, url: str, **kwargs: Any) -> MagicMock:
            sent.append(json.loads(kwargs["data"]))
            return MagicMock(status_code=200)

        session.request = request
        client = Client(api_url="http://nowhere.invalid", api_key="none", session=session, auto_batch_tracing=False)
        return LangChainTracer(client=client), sent

    return make


@pytest.mark.parametrize("way", WAYS)
async def test_langsmith_is_told_provider_model_domain_and_tokens(law: ChatOffset, langsmith: Any, way: str) -> None:
    tracer, sent = langsmith()

    await call(law, way, "hello", tracer, domain="news", temperature=0.5)

    begun, ended = sent
    expected = {
        "ls_provider": "offset-runtime",
        "ls_model_name": "fake#news",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 12,
        "domain": "news",
    }
    assert expected.items() <= begun["extra"]["metadata"].items()
    assert begun["run_type"] == "llm"
    assert begun["extra"]["invocation_params"]["domain"] == "news"
    assert ended["extra"]["metadata"]["usage_metadata"]["output_tokens"] == 12
