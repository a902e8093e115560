"""OpenTelemetry spans of requests, where opentelemetry-api is installed (the extra `otel`).

Each request is a span with a child each for its time in the queue, in prefill and in decode. Attributes are those of
OpenTelemetry's conventions for generative AI, and what is ours under ``offset_runtime.``; no text of prompts or replies
is among them. Where spans go is the application's choice; without a tracer provider of its own none are made.
https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from offset_runtime.errors import RequestCancelledError
from offset_runtime.request import Completion, Delta, Event, Request, Sink

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_log = logging.getLogger(__name__)

_OPERATION = "generate_content"
_NS = 1_000_000_000


class Tracing:
    """Makes the spans of one engine. `model`: the base model's name."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def begin(self, request: Request) -> RequestSpan | None:
        """Start the span of a request, under the caller's current one; None where nobody records it."""
        known = {"gen_ai.operation.name": _OPERATION, "gen_ai.request.model": self._model}
        try:
            span = self._tracer.start_span(f"{_OPERATION} {self._model}", attributes=known)
            if not span.is_recording():
                return None
            span.set_attributes({"gen_ai.provider.name": "offset_runtime", **_asked(request)})
        except Exception:
            # The application's samplers and span processors run here, and in `end`: one that fails costs its span,
            # not the request.
            _log.warning("the span of a request could not be started", exc_info=True)
            return None
        return RequestSpan(self._tracer, span)


class RequestSpan:
    """The span of one request, which ends with it."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._started_ns = time.time_ns()

    def follow(self, sink: Sink) -> Sink:
        """Return `sink`, with an eye on how the request ends."""

        def watched(event: Event) -> None:
            if not isinstance(event, Delta):
                self.end(event)
            sink(event)

        return watched

    def end(self, outcome: Completion | Exception) -> None:
        """End the span with the reply's figures or with what went wrong; to be cancelled by the caller is no error."""
        try:
            if isinstance(outcome, Completion):
                self._complete(outcome)
            else:
                self._fail(outcome)
        except Exception:
            _log.warning("the span of a request could not be ended", exc_info=True)

    def _fail(self, error: Exception) -> None:
        from opentelemetry.trace import Status, StatusCode

        if isinstance(error, RequestCancelledError):
            self._span.set_attribute("gen_ai.response.finish_reasons", ["cancelled"])
        else:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()

    def _complete(self, completion: Completion) -> None:
        usage, timings = completion.usage, completion.timings
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [completion.finish_reason],
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
        )
        at = self._started_ns
        for name, seconds in (("queue", timings.queue_s), ("prefill", timings.prefill_s), ("decode", timings.decode_s)):
            at = self._phase(name, at, at + round(seconds * _NS))
        self._span.end(at)

    def _phase(self, name: str, start_ns: int, stop_ns: int) -> int:
        from opentelemetry.trace import set_span_in_context

        child = self._tracer.start_span(name, context=set_span_in_context(self._span), start_time=start_ns)
        child.end(stop_ns)
        return stop_ns


def tracing(model: str) -> Tracing | None:
    """The tracing of an engine; None where opentelemetry-api is not installed."""
    try:
        from opentelemetry.trace import get_tracer
    except ImportError:
        return None
    return Tracing(get_tracer("offset_runtime"), model)


def log_end(log: logging.Logger, request: Request, outcome: Event, written: int) -> None:
    """Log at DEBUG how a request ended after `written` tokens, without any text of it."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    offset = request.offset
    domain = None if offset is None else offset.domain
    if isinstance(outcome, Completion):
        usage, timings = outcome.usage, outcome.timings
        log.debug(
            "domain %s: %d tokens read (%d from the cache), %d written, ended by %s; queue %.3f s, prefill %.3f s, "
            "decode %.3f s",
            domain,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            outcome.finish_reason,
            timings.queue_s,
            timings.prefill_s,
            timings.decode_s,
        )
    else:
        log.debug("domain %s: ended by %s after %d tokens", domain, type(outcome).__name__, written)


def _asked(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    asked: dict[str, Any] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "offset_runtime.background": request.background,
        "offset_runtime.constrained": request.constraint is not None,
    }
    if sampling.seed is not None:
        asked["gen_ai.request.seed"] = sampling.seed
    if (offset := request.offset) is not None:
        asked |= {"offset_runtime.domain": offset.domain, "offset_runtime.offset_digest": offset.digest}
    return asked
