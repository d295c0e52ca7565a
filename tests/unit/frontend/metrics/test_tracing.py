"""Traces of requests. The spans need OpenTelemetry, which only `make test-tracing` installs."""

import importlib.util
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from frontend.metrics.tracing import RequestTrace, TraceContext, Tracing, check_installed
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, Client, running_frontend

TOKENIZER = tiny_tokenizer.tokenizer()
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def is_installed() -> bool:
    try:
        check_installed()
    except ValueError:
        return False
    return True


needs_opentelemetry = pytest.mark.skipif(
    not is_installed(), reason="OpenTelemetry is not installed: make test-tracing"
)


def script(request: AddRequest) -> Script:
    if "silence" in TOKENIZER.decode(unpack_ids(request.prompt_ids)):
        return Script([], reason=None)
    return Script([70] * 5, FinishReason.MAX_TOKENS)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with (
        FakeCore(tmp_path, script) as core,
        running_frontend(core, tiny_tokenizer.checkpoint(tmp_path)) as client,
    ):
        yield client


def test_without_the_packages_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'atom-serve\[otel\]'"):
        check_installed()
    with pytest.raises(ValueError, match="otel"):
        Tracing("http://127.0.0.1:1/v1/traces")


def test_responses_say_where_their_time_went(client: Client) -> None:
    _, _, headers = client.exchange("POST", "/v1/completions", {"prompt": "x"})
    phases = dict(part.split(";dur=") for part in headers["server-timing"].split(", "))
    assert list(phases) == ["queue", "prefill", "decode"]
    assert all(0 <= float(milliseconds) < 1000 * DEADLINE_S for milliseconds in phases.values())
    assert float(phases["decode"]) > 0


def test_trace_headers_are_accepted_without_tracing(client: Client) -> None:
    for value in (PARENT, "nonsense", "", "00-" + "0" * 32):
        headers = {"traceparent": value}
        assert client.exchange("POST", "/v1/completions", {"prompt": "x"}, headers=headers)[0] == 200


def recorded(*traces: RequestTrace) -> dict[str, Any]:
    """The exported spans by name, and the root last."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing("unused", exporter)
    for trace in traces:
        tracing.record(trace)
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def trace(**changes: Any) -> RequestTrace:
    now = time.monotonic()
    values: dict[str, Any] = {
        "id": "chatcmpl-1",
        "model": "m",
        "operation": "chat",
        "context": TraceContext(PARENT, "vendor=1"),
        "started_at": now - 10,
        "ended_at": now,
        "queue_s": 2.0,
        "prefill_s": 3.0,
        "first_token_at": now - 4,
        "last_token_at": now - 1,
        "input_tokens": 7,
        "output_tokens": 9,
        "finish_reasons": ["eos"],
    }
    return RequestTrace(**(values | changes))


@needs_opentelemetry
def test_spans_are_the_phases_of_the_callers_trace() -> None:
    spans = recorded(trace())
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    root = spans["llm_request"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert root.context.trace_state.get("vendor") == "1"
    phases = [span for name, span in spans.items() if name != "llm_request"]
    assert {span.parent.span_id for span in phases} == {root.context.span_id}
    seconds = {name: round((span.end_time - span.start_time) / 1e9, 3) for name, span in spans.items()}
    assert seconds == {"llm_request": 10, "queue": 2, "prefill": 3, "decode": 3}
    assert abs(root.end_time / 1e9 - time.time()) < DEADLINE_S
    assert root.attributes["gen_ai.usage.input_tokens"] == 7
    assert root.attributes["gen_ai.usage.output_tokens"] == 9
    assert root.attributes["gen_ai.response.finish_reasons"] == ("eos",)
    assert root.resource.attributes["service.name"] == "atom"


@needs_opentelemetry
def test_requests_without_a_token_or_a_parent() -> None:
    spans = recorded(trace(first_token_at=0.0, last_token_at=0.0, error="the engine is gone", context=None))
    assert list(spans) == ["llm_request"]
    assert spans["llm_request"].status.description == "the engine is gone"
    assert spans["llm_request"].parent is None
    assert recorded(trace(context=TraceContext("nonsense")))["llm_request"].parent is None
    assert recorded(trace(context=TraceContext(PARENT[:-1] + "0"))) == {}  # the caller does not sample it


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    bodies: list[bytes] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@needs_opentelemetry
def test_a_server_exports_to_a_collector(tmp_path: Path) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
        with (
            FakeCore(tmp_path, script) as core,
            running_frontend(
                core, tiny_tokenizer.checkpoint(tmp_path), ServerConfig(otlp_traces_endpoint=endpoint)
            ) as client,
        ):
            for stream in (False, True):
                body = {"prompt": "x", "stream": stream}
                client.exchange("POST", "/v1/completions", body, headers={"traceparent": PARENT})
            assert client.post("/v1/completions", prompt="silence", timeout=0.1)[0] == 408
        collector.shutdown()
    spans = []
    for data in Collector.bodies:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    names = [span.name for span in spans]
    assert names.count("llm_request") == 3 and names.count("decode") == 2
    assert sum(span.trace_id.hex() == TRACE for span in spans) == 8
    (failed,) = [span for span in spans if span.status.code]
    assert "timeout" in failed.status.message
