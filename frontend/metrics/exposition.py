"""Prometheus text of the metrics of all frontends and engines.

Metrics with the same meaning as in vLLM are exported as both `atom:*` and `vllm:*`, so that existing
dashboards, autoscalers and gateways work. As there, the label `engine` is the data-parallel rank.
"""

from collections.abc import Iterable, Iterator, Mapping
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

from atom.shared.messages.engine import CoreStats
from frontend.metrics.metrics import EngineMetrics, Histogram, Metrics

__all__ = ["CONTENT_TYPE", "Snapshot", "expose"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LABELS = ["model_name", "engine"]
_process = ProcessCollector(registry=None)
_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


@dataclass(frozen=True)
class Snapshot:
    """The values of one scrape."""

    model: str
    metrics: Metrics
    """Sum over all frontends."""
    engines: dict[int, CoreStats]
    """Statistics by rank, without ranks that do not respond."""
    engine_up: dict[int, bool]
    """Whether each rank can generate tokens; has all ranks."""
    engine_restarts: dict[int, int]
    """Restarts of each rank since the start of the server."""
    live: int
    """Unfinished sequences of all frontends."""
    block_size: int = 0
    """Tokens of a KV block; 0: unknown."""
    forced_length: float | None = None
    """Mean tokens of a step whose acceptance is forced; None: drafts are verified."""
    frontend: int | None = None
    """The number of this frontend, where there are several: the label of its process's metrics."""


def expose(snapshot: Snapshot) -> bytes:
    """The body of GET /metrics, of type CONTENT_TYPE."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshot))
    registry.register(_process if snapshot.frontend is None else _LabelledProcess(snapshot.frontend))
    return generate_latest(registry)


class _LabelledProcess(Collector):
    """The metrics of this process, with the number of the frontend."""

    def __init__(self, frontend: int):
        self._labels = {"frontend": str(frontend)}

    def collect(self) -> Iterator[Metric]:
        for metric in _process.collect():
            metric.samples = [sample._replace(labels=self._labels) for sample in metric.samples]
            yield metric


class _Collector(Collector):
    def __init__(self, snapshot: Snapshot):
        self._snapshot = snapshot
        self._model = snapshot.model
        ranks = snapshot.engine_up.keys() | snapshot.metrics.engines.keys()
        self._figures = {
            rank: snapshot.metrics.engines.get(rank) or EngineMetrics() for rank in sorted(ranks)
        }

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._times()
        yield from self._server()
        yield from self._engines(self._snapshot.engines)

    def _requests(self) -> Iterator[Metric]:
        figures = self._figures
        prompt_tokens = {rank: figure.prompt_tokens for rank, figure in figures.items()}
        yield from self._counter("prompt_tokens", "Prompt tokens of started requests", prompt_tokens)
        generated_tokens = {rank: figure.generated_tokens for rank, figure in figures.items()}
        yield from self._counter("generation_tokens", "Generated tokens", generated_tokens)
        for name in _both("request_success"):
            family = CounterMetricFamily(
                name, "Finished sequences by reason", labels=[*_LABELS, "finished_reason"]
            )
            for rank, figure in figures.items():
                for reason, count in sorted(figure.finish_reasons.items()):
                    family.add_metric([self._model, str(rank), reason], count)
            yield family
        lengths = {rank: figure.prompt_lengths for rank, figure in figures.items()}
        yield from self._histogram("request_prompt_tokens", "Prompt tokens per sequence", lengths)
        lengths = {rank: figure.generation_lengths for rank, figure in figures.items()}
        yield from self._histogram("request_generation_tokens", "Generated tokens per sequence", lengths)

    def _times(self) -> Iterator[Metric]:
        for name, text, field in (
            ("time_to_first_token", "Time from arrival to the first token", "time_to_first_token"),
            ("inter_token_latency", "Time between two tokens of a sequence", "inter_token"),
            ("e2e_request_latency", "Time from arrival to the end of a sequence", "latency"),
            ("request_queue_time", "Time in the waiting queue", "queue_time"),
            ("request_prefill_time", "Time from scheduling to the first token", "prefill_time"),
            ("request_decode_time", "Time from the first token to the last", "decode_time"),
        ):
            histograms = {rank: getattr(figure, field) for rank, figure in self._figures.items()}
            yield from self._histogram(f"{name}_seconds", f"{text}, in seconds", histograms)

    def _server(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        metrics = snapshot.metrics
        up = {rank: float(up) for rank, up in snapshot.engine_up.items()}
        yield self._family(GaugeMetricFamily, "atom:engine_up", "Whether the engine can generate tokens", up)
        restarts = dict(snapshot.engine_restarts)
        yield self._family(CounterMetricFamily, "atom:engine_restarts", "Restarts of the engine", restarts)
        replayed = {rank: figure.replayed for rank, figure in self._figures.items()}
        text = "Sequences started again after the end of the engine"
        yield self._family(CounterMetricFamily, "atom:request_replays", text, replayed)
        handed_over = {rank: figure.handed_over for rank, figure in self._figures.items()}
        text = "Sequences that another engine went on with after their first token"
        yield self._family(CounterMetricFamily, "atom:request_handovers", text, handed_over)
        for name, text in (
            ("session_hits", "Requests sent to the engine of their session's last one"),
            ("session_moves", "Requests sent to another engine than their session's last one"),
        ):
            counts = {rank: getattr(figure, name) for rank, figure in self._figures.items()}
            yield self._family(CounterMetricFamily, f"atom:{name}", text, counts)
        live = GaugeMetricFamily("atom:choices_live", "Unfinished sequences", labels=["model_name"])
        live.add_metric([self._model], snapshot.live)
        yield live
        for name, text, count in (
            ("requests_refused", "Requests refused with 429", metrics.refused),
            (
                "client_disconnects",
                "Clients that disconnected before their response was complete",
                metrics.disconnects,
            ),
            (
                "stalled_clients",
                "Clients disconnected because they did not read their response",
                metrics.stalled,
            ),
            (
                "requests_output_limited",
                "Requests ended because too much of their output waited to be sent",
                metrics.output_limited,
            ),
            ("streams_resumed", "Streams that a client has resumed on another connection", metrics.resumed),
            (
                "streams_expired",
                "Streams that were ended since no client had resumed them in time",
                metrics.expired,
            ),
            ("frontend_restarts", "Restarts of frontend processes", metrics.restarts),
        ):
            family = CounterMetricFamily(f"atom:{name}", text, labels=["model_name"])
            family.add_metric([self._model], count)
            yield family
        lag = HistogramMetricFamily(
            "atom:event_loop_lag_seconds",
            "Lateness of the event loop's timers, in seconds",
            labels=["model_name"],
        )
        lag.add_metric([self._model], *_buckets(metrics.event_loop_lag))
        yield lag
        responses = CounterMetricFamily("atom:http_responses", "HTTP responses by status", labels=["status"])
        for status, count in sorted(metrics.responses.items()):
            responses.add_metric([str(status)], count)
        yield responses

    def _engines(self, engines: dict[int, CoreStats]) -> Iterator[Metric]:
        if not engines:
            return

        def values(field: str) -> dict[int, float]:
            return {rank: getattr(stats, field) for rank, stats in engines.items()}

        usage = {r: stats.kv_blocks_used / max(stats.kv_blocks_total, 1) for r, stats in engines.items()}
        yield from self._gauge("num_requests_running", "Running sequences", values("running"))
        yield from self._gauge("num_requests_waiting", "Waiting sequences", values("waiting"))
        yield from self._gauge("kv_cache_usage_perc", "Fraction of the KV cache in use", usage)
        for name, text, field in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "prefix_queries"),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", "prefix_hits"),
            ("num_preemptions", "Preempted sequences", "preemptions"),
        ):
            yield from self._counter(name, text, values(field))
        for name, text, field in (
            ("engine_steps", "Engine steps", "steps"),
            ("overlapped_steps", "Steps launched before the previous one finished", "overlapped_steps"),
            ("chunked_prefills", "Steps with a partial prefill", "chunked_prefills"),
            ("prefill_preemptions", "Preemptions during prefill", "prefill_preemptions"),
            ("prefill_tokens", "Tokens computed by prefills", "prefill_tokens"),
            ("orphans_expired", "Sequences ended since no frontend had claimed them", "orphans_expired"),
        ):
            yield self._family(CounterMetricFamily, f"atom:{name}", text, values(field))
        for name, text, field in (
            ("kv_blocks_used", "KV blocks in use", "kv_blocks_used"),
            ("kv_blocks_cached", "Free KV blocks in the prefix cache", "kv_blocks_cached"),
            ("kv_blocks", "KV blocks in total", "kv_blocks_total"),
            ("orphans", "Unfinished sequences that have lost their frontend", "orphans"),
        ):
            yield self._family(GaugeMetricFamily, f"atom:{name}", text, values(field))
        if self._snapshot.block_size:
            yield self._cache_config(engines)
        yield from self._speculation({r: s for r, s in engines.items() if s.num_accepted_tokens_per_pos})
        yield from self._experts({r: s for r, s in engines.items() if s.expert_imbalance})
        yield from self._tiers({r: s for r, s in engines.items() if s.kv_tiers})
        yield self._heaps(engines)

    def _heaps(self, engines: dict[int, CoreStats]) -> Metric:
        text = "Memory that malloc has in a worker, in bytes: allocated, or free and kept for later"
        family = GaugeMetricFamily("atom:worker_heap_bytes", text, labels=[*_LABELS, "worker", "state"])
        for rank, stats in engines.items():
            for worker, heap in enumerate(stats.worker_heaps):
                for state, size in (("allocated", heap.allocated), ("free", heap.free)):
                    family.add_metric([self._model, str(rank), str(worker), state], size)
        return family

    def _cache_config(self, engines: dict[int, CoreStats]) -> Metric:
        """What a gateway reads to know the prefixes that an engine can hold."""
        labels = [*_LABELS, "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("vllm:cache_config_info", "KV cache: sizes, as labels", labels=labels)
        size = str(self._snapshot.block_size)
        for rank, stats in engines.items():
            family.add_metric([self._model, str(rank), size, str(stats.kv_blocks_total)], 1)
        return family

    def _experts(self, engines: dict[int, CoreStats]) -> Iterator[Metric]:
        """Metrics of the engines that report how evenly their ranks share experts."""
        if not engines:
            return
        moved: dict[int, float] = {rank: stats.experts_moved for rank, stats in engines.items()}
        text = "Experts moved to another rank or replicated, since the start"
        yield self._family(CounterMetricFamily, "atom:experts_moved", text, moved)
        text = "Tokens of the fullest rank's experts over the mean of the ranks, in the last window"
        family = GaugeMetricFamily("atom:expert_load_imbalance", text, labels=[*_LABELS, "layer"])
        for rank, stats in engines.items():
            for layer, imbalance in enumerate(stats.expert_imbalance):
                family.add_metric([self._model, str(rank), str(layer)], imbalance)
        yield family

    def _tiers(self, engines: dict[int, CoreStats]) -> Iterator[Metric]:
        """Metrics of the engines that keep blocks in KV tiers."""
        if not engines:
            return
        for kind, name, text, field in (
            (CounterMetricFamily, "kv_tier_hits", "Prefix cache hits that came from a KV tier", "hits"),
            (CounterMetricFamily, "kv_tier_stored_blocks", "Blocks copied to a KV tier", "stored"),
            (CounterMetricFamily, "kv_tier_loaded_blocks", "Blocks copied back from a KV tier", "loaded"),
            (CounterMetricFamily, "kv_tier_failed_blocks", "Copies of blocks that failed", "failed"),
            (GaugeMetricFamily, "kv_tier_blocks_used", "Blocks that a KV tier has", "blocks_used"),
            (GaugeMetricFamily, "kv_tier_blocks", "Blocks that a KV tier can have", "blocks_total"),
        ):
            family = kind(f"atom:{name}", text, labels=[*_LABELS, "tier"])
            for rank, stats in engines.items():
                for tier in stats.kv_tiers:
                    family.add_metric([self._model, str(rank), tier.medium], getattr(tier, field))
            yield family

    def _speculation(self, engines: dict[int, CoreStats]) -> Iterator[Metric]:
        """Metrics of the engines that verify draft tokens."""
        if not engines:
            return
        accepted = {rank: sum(stats.num_accepted_tokens_per_pos) for rank, stats in engines.items()}
        drafts = {rank: stats.num_drafts for rank, stats in engines.items()}
        tokens = {rank: stats.num_draft_tokens for rank, stats in engines.items()}
        yield from self._counter("spec_decode_num_drafts", "Verified drafts", drafts)
        yield from self._counter("spec_decode_num_draft_tokens", "Verified draft tokens", tokens)
        yield from self._counter("spec_decode_num_accepted_tokens", "Accepted draft tokens", accepted)
        if (forced := self._snapshot.forced_length) is not None:
            text = "Mean tokens of a step whose acceptance is forced: figures of a benchmark"
            lengths = dict.fromkeys(engines, forced)
            yield self._family(GaugeMetricFamily, "atom:spec_decode_forced_length", text, lengths)
        text = "Accepted draft tokens by their place in the draft"
        for name in _both("spec_decode_num_accepted_tokens_per_pos"):
            family = CounterMetricFamily(name, text, labels=[*_LABELS, "position"])
            for rank, stats in engines.items():
                for place, count in enumerate(stats.num_accepted_tokens_per_pos):
                    family.add_metric([self._model, str(rank), str(place)], count)
            yield family

    def _gauge(self, name: str, text: str, values: Mapping[int, float]) -> Iterator[Metric]:
        return (self._family(GaugeMetricFamily, each, text, values) for each in _both(name))

    def _counter(self, name: str, text: str, values: Mapping[int, float]) -> Iterator[Metric]:
        return (self._family(CounterMetricFamily, each, text, values) for each in _both(name))

    def _family(self, family: _Family, name: str, text: str, values: Mapping[int, float]) -> Metric:
        """One sample for each rank."""
        metric = family(name, text, labels=_LABELS)
        for rank, value in values.items():
            metric.add_metric([self._model, str(rank)], value)
        return metric

    def _histogram(self, name: str, text: str, histograms: Mapping[int, Histogram]) -> Iterator[Metric]:
        for each in _both(name):
            family = HistogramMetricFamily(each, text, labels=_LABELS)
            for rank, histogram in histograms.items():
                family.add_metric([self._model, str(rank)], *_buckets(histogram))
            yield family


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, int]], float]:
    """(cumulative count by upper bound, sum)."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum


def _both(name: str) -> Iterable[str]:
    return f"atom:{name}", f"vllm:{name}"
