"""OpenTelemetry spans of requests, and what is logged of them."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from langgraph.graph import START, MessagesState, StateGraph
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from offset_runtime import EngineSettings, OffsetRuntime, SamplingParams
from offset_runtime.agents import ChatOffset, OffsetLLM
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import ContextOverflowError, DeadlineExceededError, OffsetError
from offset_runtime.tracing import Tracing

USER = [{"role": "user", "content": "a secret question"}]


@pytest.fixture
def provider() -> TracerProvider:
    return TracerProvider()


@pytest.fixture
def spans(provider: TracerProvider, monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What was recorded in engines that are made from now on."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(
        "offset_runtime.engine.tracing", lambda model: Tracing(provider.get_tracer("offset_runtime"), model)
    )
    return exporter


@pytest.fixture
def runtime(spans: InMemorySpanExporter, make_offset: Any) -> Iterator[OffsetRuntime]:
    with OffsetRuntime(FakeBackend(), model="a-base") as runtime:
        runtime.register(make_offset(runtime.backend.identity, "law"))
        yield runtime


def request_spans(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == "generate_content a-base"]


def test_a_request_is_a_span_with_its_phases_one_after_the_other(
    runtime: OffsetRuntime, spans: InMemorySpanExporter
) -> None:
    request = runtime.chat_request(USER, domain="law", sampling=SamplingParams(max_tokens=5, seed=3))
    done = runtime.run(request)

    [span] = request_spans(spans)
    phases = [s for s in spans.get_finished_spans() if s.parent and s.parent.span_id == span.context.span_id]
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    ends = [phase.end_time for phase in phases]
    assert [phase.start_time for phase in phases] == [phases[0].start_time, *ends[:-1]]
    assert (phases[-1].end_time - phases[0].start_time) / 1e9 == pytest.approx(
        done.timings.queue_s + done.timings.prefill_s + done.timings.decode_s, abs=1e-6
    )
    assert span.attributes == {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "offset_runtime",
        "gen_ai.request.model": "a-base",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": done.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "offset_runtime.background": False,
        "offset_runtime.constrained": False,
        "offset_runtime.domain": "law",
        "offset_runtime.offset_digest": runtime.offsets["law"].digest,
    }


def test_no_text_of_prompts_or_replies_is_recorded(runtime: OffsetRuntime, spans: InMemorySpanExporter) -> None:
    reply = runtime.run(runtime.chat_request(USER, sampling=SamplingParams(max_tokens=20))).text

    written = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "secret" not in written
    assert reply not in written


async def test_each_way_to_call_is_a_span_under_the_callers(
    runtime: OffsetRuntime, spans: InMemorySpanExporter, provider: TracerProvider
) -> None:
    chat = ChatOffset(model="fake", runtime=runtime, max_tokens=3)
    tracer = provider.get_tracer("application")

    with tracer.start_as_current_span("caller") as caller:
        chat.invoke("a")
        list(chat.stream("a"))
        await chat.ainvoke("a")
        assert [chunk async for chunk in chat.astream("a")]
        OffsetLLM(model="fake", runtime=runtime, max_tokens=3).invoke("a")
        await runtime.arun(runtime.text_request("a", sampling=SamplingParams(max_tokens=3)))
        runtime.score("a text to score", [None])

    found = request_spans(spans)
    assert len(found) == 7
    assert {span.parent.span_id for span in found if span.parent} == {caller.get_span_context().span_id}


def test_agents_in_threads_of_a_graph_are_under_the_callers_span(
    runtime: OffsetRuntime, spans: InMemorySpanExporter, provider: TracerProvider
) -> None:
    chat = ChatOffset(model="fake", runtime=runtime, max_tokens=3)
    graph = StateGraph(MessagesState)
    for name in ("one", "two"):
        graph.add_node(name, lambda state: {"messages": [chat.invoke(state["messages"], domain="law")]})
        graph.add_edge(START, name)

    with provider.get_tracer("application").start_as_current_span("caller") as caller:
        graph.compile().invoke({"messages": [("user", "a")]})

    assert [span.parent and span.parent.span_id for span in request_spans(spans)] == [
        caller.get_span_context().span_id
    ] * 2


@pytest.mark.parametrize(("domain", "anchor"), [(None, None), ("tax", "sequence"), ("tax", "turn")])
def test_a_request_is_told_apart_from_the_earlier_turns_it_reads(
    runtime: OffsetRuntime, spans: InMemorySpanExporter, make_offset: Any, domain: str | None, anchor: Any
) -> None:
    if domain is not None:
        runtime.register(make_offset(runtime.backend.identity, domain, anchor=anchor))
    said = [*USER, {"role": "assistant", "content": "a reply in law"}, *USER]

    runtime.run(runtime.chat_request(said, domain=domain, turn_offsets={1: runtime.offsets["law"]}))

    [span] = request_spans(spans)
    assert span.attributes
    assert span.attributes.get("offset_runtime.domain") == domain


def test_a_text_is_scored_in_a_span_for_each_domain(runtime: OffsetRuntime, spans: InMemorySpanExporter) -> None:
    runtime.score("a text to score", ["law", None])

    found = [span.attributes.get("offset_runtime.domain") for span in request_spans(spans) if span.attributes]
    assert found == ["law", None]


@pytest.mark.parametrize("at", ["on_start", "on_end"])
def test_a_span_processor_that_fails_leaves_the_reply_and_the_error_alone(
    runtime: OffsetRuntime,
    spans: InMemorySpanExporter,
    provider: TracerProvider,
    caplog: pytest.LogCaptureFixture,
    at: str,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    broken = SpanProcessor()
    setattr(broken, at, fail)
    provider.add_span_processor(broken)

    assert runtime.run(runtime.chat_request(USER, sampling=SamplingParams(max_tokens=3))).usage.output_tokens == 3
    with pytest.raises(ContextOverflowError):
        runtime.run(runtime.chat_request([{"role": "user", "content": "a" * 5000}]))
    warned = [record.levelno for record in caplog.records if record.name == "offset_runtime.tracing"]
    assert warned == [logging.WARNING] * 2


@pytest.mark.parametrize("fails_at", ["submit", "deadline"])
def test_an_error_is_recorded_with_its_type(runtime: OffsetRuntime, spans: InMemorySpanExporter, fails_at: str) -> None:
    too_long = runtime.chat_request([{"role": "user", "content": "a" * 5000}])
    too_late = runtime.chat_request(USER, timeout_s=1e-9)

    with pytest.raises(OffsetError):
        runtime.run(too_long if fails_at == "submit" else too_late)

    [span] = request_spans(spans)
    expected = ContextOverflowError if fails_at == "submit" else DeadlineExceededError
    assert span.attributes
    assert span.attributes["error.type"] == expected.__name__
    assert span.status.status_code == StatusCode.ERROR
    assert [event.name for event in span.events] == ["exception"]


def test_a_cancelled_request_is_no_error(spans: InMemorySpanExporter) -> None:
    with OffsetRuntime(FakeBackend(), model="a-base") as runtime:
        request = runtime.chat_request(USER, sampling=SamplingParams(max_tokens=2000))
        for _ in runtime.stream(request):
            break
        # The engine has let go of the first before its next step.
        runtime.run(runtime.chat_request(USER, sampling=SamplingParams(max_tokens=1)))

    span = request_spans(spans)[0]
    assert span.attributes
    assert span.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert span.status.status_code == StatusCode.UNSET


def test_spans_go_to_the_provider_that_the_application_sets(make_offset: Any) -> None:
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from offset_runtime.agents import ChatOffset
model = ChatOffset(model="fake", max_tokens=3)
model.invoke("no provider yet")
exporter = InMemorySpanExporter()
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
model.invoke("a")
print([span.name for span in exporter.get_finished_spans()])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "['queue', 'prefill', 'decode', 'generate_content fake']\n"


def test_without_opentelemetry_requests_run_as_ever() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = sys.modules["opentelemetry.trace"] = None
from offset_runtime import OffsetRuntime, SamplingParams
from offset_runtime.backends.fake import FakeBackend
with OffsetRuntime(FakeBackend()) as runtime:
    print(len(runtime.run(runtime.text_request("a", sampling=SamplingParams(max_tokens=3))).token_ids))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "3\n"


def test_the_end_of_each_request_is_logged_without_its_text(caplog: pytest.LogCaptureFixture, make_offset: Any) -> None:
    with caplog.at_level(logging.DEBUG, logger="offset_runtime"), OffsetRuntime(FakeBackend()) as runtime:
        runtime.register(make_offset(runtime.backend.identity, "law"))
        runtime.run(runtime.chat_request(USER, domain="law", sampling=SamplingParams(max_tokens=4)))
        with pytest.raises(DeadlineExceededError):
            runtime.run(runtime.chat_request(USER, timeout_s=1e-9))

    ended = [record for record in caplog.records if record.name == "offset_runtime.engine"]
    assert [record.levelno for record in ended] == [logging.DEBUG] * 2
    assert "domain law" in ended[0].getMessage()
    assert "4 written, ended by length" in ended[0].getMessage()
    assert "ended by DeadlineExceededError" in ended[1].getMessage()
    assert "secret" not in caplog.text


def test_loading_a_model_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="offset_runtime"):
        OffsetRuntime.load("fake", settings=EngineSettings()).close()

    assert [record.levelname for record in caplog.records if "loaded fake on fake in" in record.getMessage()] == [
        "INFO"
    ]
