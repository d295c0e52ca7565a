"""Traces of requests for OpenTelemetry: where each one's time went, as spans of its caller's trace.

    llm_request   from the arrival of the body to the last token
      queue       until its first sequence was admitted
      prefill     until its first token
      decode      until its last token

Spans are made once, at the end of a request, and exported by a thread of the SDK.
"""

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["RequestTrace", "TraceContext", "Tracing", "check_installed"]

_SDK = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_FLUSH_S = 2.0
_NS = 1_000_000_000


@dataclass(frozen=True)
class TraceContext:
    """The W3C headers of a request, as they were sent."""

    traceparent: str
    tracestate: str = ""


@dataclass(frozen=True, kw_only=True)
class RequestTrace:
    """One finished request; times are monotonic, in seconds."""

    id: str
    model: str
    operation: str
    """chat or text_completion, as OpenTelemetry names them."""
    context: TraceContext | None
    started_at: float
    ended_at: float
    queue_s: float
    prefill_s: float
    first_token_at: float
    """Time of the first token; 0: there was none."""
    last_token_at: float
    input_tokens: int
    output_tokens: int
    finish_reasons: Sequence[str] = field(default_factory=list)
    error: str = ""


def check_installed() -> None:
    """Raises ValueError without the packages of the extra `otel`."""
    for name in _SDK:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ValueError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'atom-serve[otel]'")


class Tracing:
    """Exports spans to `endpoint`, the URL of an OTLP collector's HTTP port; tests give an exporter."""

    def __init__(self, endpoint: str, exporter: "SpanExporter | None" = None):
        """Raises ValueError without OpenTelemetry."""
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()  # from OTEL_SERVICE_NAME and the like
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "atom"}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("atom")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, trace: RequestTrace) -> None:
        """Queue the spans of a request; never waits. A full queue drops them."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        offset = time.time() - time.monotonic()
        span = self._tracer.start_span(
            "llm_request",
            context=self._parent(trace.context),
            kind=SpanKind.SERVER,
            attributes=_attributes(trace),
            start_time=_nanoseconds(trace.started_at + offset),
        )
        if trace.error:
            span.set_status(Status(StatusCode.ERROR, trace.error))
        inside = set_span_in_context(span)
        for name, begun_at, ended_at in _phases(trace):
            child = self._tracer.start_span(name, context=inside, start_time=_nanoseconds(begun_at + offset))
            child.end(_nanoseconds(ended_at + offset))
        span.end(_nanoseconds(trace.ended_at + offset))

    def close(self) -> None:
        """Export what is queued, for a bounded time; blocks."""
        self._provider.force_flush(int(_FLUSH_S * 1000))
        self._provider.shutdown()

    def _parent(self, context: TraceContext | None) -> Any:
        """A root for a request without a valid traceparent."""
        headers = {}
        if context is not None:
            headers = {"traceparent": context.traceparent, "tracestate": context.tracestate}
        return self._propagator.extract(headers)


def _attributes(trace: RequestTrace) -> dict[str, Any]:
    """OpenTelemetry's names for generative AI; the latencies as vLLM names them."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.id": trace.id,
        "gen_ai.response.finish_reasons": list(trace.finish_reasons),
        "gen_ai.usage.input_tokens": trace.input_tokens,
        "gen_ai.usage.output_tokens": trace.output_tokens,
        "gen_ai.latency.e2e": trace.ended_at - trace.started_at,
    }
    if trace.first_token_at:
        attributes["gen_ai.latency.time_in_queue"] = trace.queue_s
        attributes["gen_ai.latency.time_to_first_token"] = trace.first_token_at - trace.started_at
    return attributes


def _phases(trace: RequestTrace) -> list[tuple[str, float, float]]:
    """(name, begin, end) of each phase; none for a request without a token."""
    if not trace.first_token_at:
        return []
    admitted_at = trace.first_token_at - trace.prefill_s
    return [
        ("queue", max(admitted_at - trace.queue_s, trace.started_at), admitted_at),
        ("prefill", admitted_at, trace.first_token_at),
        ("decode", trace.first_token_at, trace.last_token_at),
    ]


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NS)
