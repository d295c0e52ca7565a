"""Prometheus' text: this process's counts and the engine's, under our names and vLLM's.

The boards, scalers and gateways that exist read `vllm:*`, so what means the same has both names.
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
    """What one scrape shows; `engine` is None while the engine does not answer."""

    model: str
    metrics: Metrics
    engine: CoreStats | None
    engine_up: bool
    live: int
    """Choices of this process that have not ended."""
    refused: int
    """Requests that were answered 429."""


def expose(snapshot: Snapshot) -> bytes:
    """The body of an answer to GET /metrics, of type CONTENT_TYPE."""
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
        yield from self._counter("prompt_tokens", "Prompt tokens of begun requests", metrics.prompt_tokens)
        yield from self._counter("generation_tokens", "Generated tokens", metrics.generated_tokens)
        labels = [*self._labels, "finished_reason"]
        for name in _both("request_success"):
            family = CounterMetricFamily(name, "Ended choices by how they ended", labels=labels)
            for reason, count in sorted(metrics.ended.items()):
                family.add_metric([*self._labels.values(), reason], count)
            yield family
        yield from self._histogram("request_prompt_tokens", "Tokens of a prompt", metrics.prompt_lengths)
        yield from self._histogram("request_generation_tokens", "Tokens of an answer", metrics.answer_lengths)

    def _times(self, metrics: Metrics) -> Iterator[Metric]:
        for name, text, histogram in (
            (
                "time_to_first_token",
                "From arrival to the first token",
                metrics.time_to_first_token,
            ),
            ("inter_token_latency", "Between two tokens of a choice", metrics.inter_token),
            ("e2e_request_latency", "From arrival to a choice's end", metrics.latency),
            ("request_queue_time", "Waiting in the engine", metrics.queue_time),
            ("request_prefill_time", "From leaving the queue to the first token", metrics.prefill_time),
            ("request_decode_time", "From the first token to the last", metrics.decode_time),
        ):
            yield from self._histogram(f"{name}_seconds", f"{text}, in seconds", histogram)

    def _server(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield self._one(GaugeMetricFamily, "atom:engine_up", "Whether tokens can be made", snapshot.engine_up)
        yield self._one(GaugeMetricFamily, "atom:choices_live", "Choices that have not ended", snapshot.live)
        yield self._one(
            CounterMetricFamily,
            "atom:requests_refused",
            "Requests answered 429",
            snapshot.refused,
        )
        yield self._one(
            CounterMetricFamily,
            "atom:client_disconnects",
            "Clients that left before their answer was complete",
            snapshot.metrics.disconnects,
        )
        yield self._one(
            CounterMetricFamily,
            "atom:stalled_clients",
            "Clients cut off because they did not read their answer",
            snapshot.metrics.stalled,
        )
        responses = CounterMetricFamily("atom:http_responses", "HTTP answers by status", labels=["status"])
        for status, count in sorted(snapshot.metrics.responses.items()):
            responses.add_metric([str(status)], count)
        yield responses

    def _engine(self, stats: CoreStats) -> Iterator[Metric]:
        usage = stats.kv_blocks_used / max(stats.kv_blocks_total, 1)
        yield from self._gauge("num_requests_running", "Choices being computed", stats.running)
        yield from self._gauge("num_requests_waiting", "Choices that wait for room", stats.waiting)
        yield from self._gauge("kv_cache_usage_perc", "Part of the KV cache in use, 1 is full", usage)
        yield from self._counter("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_queries)
        yield from self._counter("prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_hits)
        yield from self._counter("num_preemptions", "Choices put back to make room", stats.preemptions)
        for name, text, count in (
            ("engine_steps", "Steps of the engine", stats.steps),
            ("overlapped_steps", "Steps begun before the one before was done", stats.overlapped_steps),
            ("chunked_prefills", "Steps that computed a part of a prompt", stats.chunked_prefills),
            ("prefill_preemptions", "Preemptions of choices in prefill", stats.prefill_preemptions),
        ):
            yield self._one(CounterMetricFamily, f"atom:{name}", text, count)
        yield self._one(GaugeMetricFamily, "atom:kv_blocks_used", "Blocks in use", stats.kv_blocks_used)
        yield self._one(GaugeMetricFamily, "atom:kv_blocks", "Blocks of the KV cache", stats.kv_blocks_total)

    def _gauge(self, name: str, text: str, value: float) -> Iterator[Metric]:
        return (self._one(GaugeMetricFamily, each, text, value) for each in _both(name))

    def _counter(self, name: str, text: str, value: float) -> Iterator[Metric]:
        return (self._one(CounterMetricFamily, each, text, value) for each in _both(name))

    def _one(self, family: _Family, name: str, text: str, value: float) -> Metric:
        metric = family(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Iterator[Metric]:
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        for each in _both(name):
            family = HistogramMetricFamily(each, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, histogram.sum)
            yield family


def _both(name: str) -> Iterable[str]:
    return f"atom:{name}", f"vllm:{name}"
