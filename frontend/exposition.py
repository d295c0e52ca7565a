"""Prometheus text of this process's and the engine's metrics.

Metrics with the same meaning as in vLLM are exported as both `atom:*` and `vllm:*`, so that existing
dashboards, autoscalers and gateways work.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from atom.messages.engine import CoreStats
from frontend.metrics import Histogram, Metrics

__all__ = ["CONTENT_TYPE", "Snapshot", "expose"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

_process = ProcessCollector(registry=None)
_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


@dataclass(frozen=True)
class Snapshot:
    """The values of one scrape; `engine` is None while the engine does not respond."""

    model: str
    metrics: Metrics
    engine: CoreStats | None
    engine_up: bool
    live: int
    """Unfinished sequences of this process."""
    refused: int
    """Requests refused with 429."""


def expose(snapshot: Snapshot) -> bytes:
    """The body of GET /metrics, of type CONTENT_TYPE."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshot))
    registry.register(_process)
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, snapshot: Snapshot):
        self._snapshot = snapshot
        self._labels = {"model_name": snapshot.model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        yield from self._requests(self._snapshot.metrics)
        yield from self._times(self._snapshot.metrics)
        yield from self._server()
        if self._snapshot.engine is not None:
            yield from self._engine(self._snapshot.engine)

    def _requests(self, metrics: Metrics) -> Iterator[Metric]:
        yield from self._counter("prompt_tokens", "Prompt tokens of started requests", metrics.prompt_tokens)
        yield from self._counter("generation_tokens", "Generated tokens", metrics.generated_tokens)
        labels = [*self._labels, "finished_reason"]
        for name in _both("request_success"):
            family = CounterMetricFamily(name, "Finished sequences by reason", labels=labels)
            for reason, count in sorted(metrics.finish_reasons.items()):
                family.add_metric([*self._labels.values(), reason], count)
            yield family
        yield from self._histogram(
            "request_prompt_tokens", "Prompt tokens per sequence", metrics.prompt_lengths
        )
        yield from self._histogram(
            "request_generation_tokens", "Generated tokens per sequence", metrics.generation_lengths
        )

    def _times(self, metrics: Metrics) -> Iterator[Metric]:
        for name, text, histogram in (
            (
                "time_to_first_token",
                "Time from arrival to the first token",
                metrics.time_to_first_token,
            ),
            ("inter_token_latency", "Time between two tokens of a sequence", metrics.inter_token),
            ("e2e_request_latency", "Time from arrival to the end of a sequence", metrics.latency),
            ("request_queue_time", "Time in the waiting queue", metrics.queue_time),
            ("request_prefill_time", "Time from scheduling to the first token", metrics.prefill_time),
            ("request_decode_time", "Time from the first token to the last", metrics.decode_time),
        ):
            yield from self._histogram(f"{name}_seconds", f"{text}, in seconds", histogram)

    def _server(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield self._one(
            GaugeMetricFamily, "atom:engine_up", "Whether the engine can generate tokens", snapshot.engine_up
        )
        yield self._one(GaugeMetricFamily, "atom:choices_live", "Unfinished sequences", snapshot.live)
        yield self._one(
            CounterMetricFamily,
            "atom:requests_refused",
            "Requests refused with 429",
            snapshot.refused,
        )
        yield self._one(
            CounterMetricFamily,
            "atom:client_disconnects",
            "Clients that disconnected before their response was complete",
            snapshot.metrics.disconnects,
        )
        yield self._one(
            CounterMetricFamily,
            "atom:stalled_clients",
            "Clients disconnected because they did not read their response",
            snapshot.metrics.stalled,
        )
        lag = snapshot.metrics.event_loop_lag
        text = "Lateness of the event loop's timers, in seconds"
        yield self._buckets("atom:event_loop_lag_seconds", text, lag)
        responses = CounterMetricFamily("atom:http_responses", "HTTP responses by status", labels=["status"])
        for status, count in sorted(snapshot.metrics.responses.items()):
            responses.add_metric([str(status)], count)
        yield responses

    def _engine(self, stats: CoreStats) -> Iterator[Metric]:
        usage = stats.kv_blocks_used / max(stats.kv_blocks_total, 1)
        yield from self._gauge("num_requests_running", "Running sequences", stats.running)
        yield from self._gauge("num_requests_waiting", "Waiting sequences", stats.waiting)
        yield from self._gauge("kv_cache_usage_perc", "Fraction of the KV cache in use", usage)
        yield from self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries
        )
        yield from self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits
        )
        yield from self._counter("num_preemptions", "Preempted sequences", stats.preemptions)
        for name, text, count in (
            ("engine_steps", "Engine steps", stats.steps),
            ("overlapped_steps", "Steps launched before the previous one finished", stats.overlapped_steps),
            ("chunked_prefills", "Steps with a partial prefill", stats.chunked_prefills),
            ("prefill_preemptions", "Preemptions during prefill", stats.prefill_preemptions),
        ):
            yield self._one(CounterMetricFamily, f"atom:{name}", text, count)
        yield self._one(GaugeMetricFamily, "atom:kv_blocks_used", "KV blocks in use", stats.kv_blocks_used)
        yield self._one(GaugeMetricFamily, "atom:kv_blocks", "KV blocks in total", stats.kv_blocks_total)

    def _gauge(self, name: str, text: str, value: float) -> Iterator[Metric]:
        return (self._one(GaugeMetricFamily, each, text, value) for each in _both(name))

    def _counter(self, name: str, text: str, value: float) -> Iterator[Metric]:
        return (self._one(CounterMetricFamily, each, text, value) for each in _both(name))

    def _one(self, family: _Family, name: str, text: str, value: float) -> Metric:
        metric = family(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Iterator[Metric]:
        return (self._buckets(each, text, histogram) for each in _both(name))

    def _buckets(self, name: str, text: str, histogram: Histogram) -> Metric:
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family


def _both(name: str) -> Iterable[str]:
    return f"atom:{name}", f"vllm:{name}"
