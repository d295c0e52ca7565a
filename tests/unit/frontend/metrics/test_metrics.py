"""Counters, histograms and their Prometheus text."""

import asyncio
import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from atom.benchmarks.agentic.cache_hits import CacheHits
from atom.benchmarks.serving.speculation import Speculation
from atom.shared.messages.engine import CoreStats, FirstToken, HeapUse, KVTierStats
from frontend.http.loop_lag import watch_loop
from frontend.metrics.exposition import Snapshot, expose
from frontend.metrics.metrics import Histogram, Metrics, Progress

STATS = CoreStats(
    steps=9,
    running=2,
    waiting=3,
    kv_blocks_used=25,
    kv_blocks_total=100,
    preemptions=4,
    prefill_preemptions=1,
    prefix_queries=70,
    prefix_hits=50,
    chunked_prefills=6,
    overlapped_steps=8,
    prompt_tokens=1,
    generated_tokens=1,
)

Samples = dict[tuple[str, tuple[str, ...]], float]


def scrape(metrics: Metrics, engine: CoreStats | None) -> Samples:
    """Values by sample name and by the labels that distinguish samples of one name."""
    engines = {} if engine is None else {0: engine}
    text = expose(Snapshot("tiny", metrics, engines, {0: engine is not None}, {0: 3}, live=5)).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name.startswith(("atom:", "vllm:")) and "status" not in labels:
                assert (labels.pop("model_name"), labels.pop("engine", "0")) == ("tiny", "0")
            found[sample.name, tuple(labels.values())] = sample.value
    return found


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum) == ([2, 2, 1], 7.5)


def test_the_metrics_of_one_sequence() -> None:
    metrics = Metrics()
    progress = Progress(arrived_at=10.0, prompt_tokens=30)
    metrics.engine(0).admitted(FirstToken(1, 0, queued_s=0.25, prefill_s=0.5))
    metrics.engine(0).advanced(progress, 1, now=11.0)
    metrics.engine(0).advanced(progress, 1, now=11.1)
    metrics.engine(0).advanced(progress, 2, now=11.5)  # two tokens in one step
    metrics.engine(0).finished(progress, "max_tokens", now=12.0)
    metrics.engine(0).aborted()
    metrics.engine(0).failed(3)
    found = scrape(metrics, None)
    for prefix in ("atom:", "vllm:"):
        assert found[f"{prefix}prompt_tokens_total", ()] == 30
        assert found[f"{prefix}generation_tokens_total", ()] == 4
        assert found[f"{prefix}request_success_total", ("length",)] == 1
        assert found[f"{prefix}request_success_total", ("abort",)] == 1
        assert found[f"{prefix}request_success_total", ("error",)] == 3
        sums = {
            name: found[f"{prefix}{name}_seconds_sum", ()]
            for name in (
                "time_to_first_token",
                "inter_token_latency",
                "e2e_request_latency",
                "request_queue_time",
                "request_prefill_time",
                "request_decode_time",
            )
        }
        assert list(sums.values()) == pytest.approx([1.0, 0.5, 2.0, 0.25, 0.5, 1.0])
        assert found[f"{prefix}inter_token_latency_seconds_count", ()] == 3
        assert found[f"{prefix}inter_token_latency_seconds_bucket", ("0.15",)] == 1
        assert found[f"{prefix}inter_token_latency_seconds_bucket", ("0.3",)] == 3
        assert found[f"{prefix}inter_token_latency_seconds_bucket", ("+Inf",)] == 3
        assert found[f"{prefix}request_prompt_tokens_bucket", ("20.0",)] == 0
        assert found[f"{prefix}request_prompt_tokens_bucket", ("50.0",)] == 1


@pytest.mark.parametrize(
    ("raw", "label"),
    [
        ("eos", "stop"),
        ("stop_7", "stop"),
        ("stop_sequence", "stop"),
        ("aborted", "abort"),
        ("error", "error"),
    ],
)
def test_finish_reason_labels_equal_vllms(raw: str, label: str) -> None:
    metrics = Metrics()
    metrics.engine(0).finished(Progress(0.0, 1), raw, now=1.0)
    assert scrape(metrics, None)["vllm:request_success_total", (label,)] == 1


def test_engine_metrics() -> None:
    metrics = Metrics()
    metrics.responses[429] += 1
    metrics.refused = 7
    found = scrape(metrics, STATS)
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 70,
        "prefix_cache_hits_total": 50,
        "num_preemptions_total": 4,
    }
    for name, value in expected.items():
        assert found[f"atom:{name}", ()] == found[f"vllm:{name}", ()] == value
    assert found["atom:engine_steps_total", ()] == 9
    assert found["atom:engine_up", ()] == 1
    assert found["atom:engine_restarts_total", ()] == 3
    assert found["atom:choices_live", ()] == 5
    assert found["atom:requests_refused_total", ()] == 7
    assert found["atom:http_responses_total", ("429",)] == 1
    assert found["process_resident_memory_bytes", ()] > 1 << 20


def test_a_gateway_finds_the_size_of_the_kv_cache() -> None:
    stats = CoreStats(1, 0, 0, 0, 500, *[0] * 8)
    snapshot = Snapshot("tiny", Metrics(), {3: stats}, {3: True}, {3: 0}, live=0, block_size=16)
    line = 'vllm:cache_config_info{block_size="16",engine="3",model_name="tiny",num_gpu_blocks="500"} 1.0'
    assert line in expose(snapshot).decode().splitlines()


def test_metrics_of_drafts_have_vllms_names() -> None:
    assert not any("spec_decode" in name for name, _ in scrape(Metrics(), STATS))
    drafts = {"num_drafts": 20, "num_draft_tokens": 60, "num_accepted_tokens_per_pos": [17, 9, 4]}
    stats = msgspec.structs.replace(STATS, **drafts)
    found = scrape(Metrics(), stats)
    for prefix in ("atom:", "vllm:"):
        assert found[f"{prefix}spec_decode_num_drafts_total", ()] == 20
        assert found[f"{prefix}spec_decode_num_draft_tokens_total", ()] == 60
        assert found[f"{prefix}spec_decode_num_accepted_tokens_total", ()] == 30
        by_place = [
            found[f"{prefix}spec_decode_num_accepted_tokens_per_pos_total", (str(place),)]
            for place in range(3)
        ]
        assert by_place == [17, 9, 4]
    engines = {0: stats, 1: stats}
    page = expose(Snapshot("tiny", Metrics(), engines, {0: True, 1: True}, {0: 0, 1: 0}, live=0)).decode()
    assert Speculation.parse(page) == Speculation(40, 120, 60)
    snapshot = Snapshot("tiny", Metrics(), engines, {0: True, 1: True}, {0: 0, 1: 0}, 0, forced_length=2.5)
    assert Speculation.parse(expose(snapshot).decode()) == Speculation(40, 120, 60, 2.5)


def test_hits_are_shown_by_tier() -> None:
    assert not any("kv_tier" in name for name, _ in scrape(Metrics(), STATS))
    tiers = [KVTierStats("CPU", 100, 60, 32, 70, 8, 1), KVTierStats("STORAGE", 500, 300, 16, 310, 5, 0)]
    found = scrape(Metrics(), msgspec.structs.replace(STATS, kv_tiers=tiers))
    assert found["atom:kv_tier_hits_total", ("CPU",)] == 32
    assert found["atom:kv_tier_hits_total", ("STORAGE",)] == 16
    assert found["atom:kv_tier_stored_blocks_total", ("CPU",)] == 70
    assert found["atom:kv_tier_loaded_blocks_total", ("STORAGE",)] == 5
    assert found["atom:kv_tier_failed_blocks_total", ("CPU",)] == 1
    assert found["atom:kv_tier_blocks_used", ("CPU",)] == 60
    assert found["atom:kv_tier_blocks", ("STORAGE",)] == 500
    engines = {rank: msgspec.structs.replace(STATS, kv_tiers=tiers) for rank in (0, 1)}
    page = expose(Snapshot("tiny", Metrics(), engines, {0: True, 1: True}, {0: 0, 1: 0}, live=0)).decode()
    assert CacheHits.parse(page) == CacheHits(140, 100, {"CPU": 64, "STORAGE": 32})


def test_the_heaps_of_workers_are_shown() -> None:
    found = scrape(Metrics(), msgspec.structs.replace(STATS, worker_heaps=[HeapUse(7, 5), HeapUse(2, 3)]))
    assert found["atom:worker_heap_bytes", ("allocated", "0")] == 7
    assert found["atom:worker_heap_bytes", ("free", "1")] == 3


def test_the_balance_of_experts_is_shown_by_layer() -> None:
    assert not any("expert" in name for name, _ in scrape(Metrics(), STATS))
    stats = msgspec.structs.replace(STATS, expert_imbalance=[1.5, 1.25], experts_moved=7)
    found = scrape(Metrics(), stats)
    assert found["atom:experts_moved_total", ()] == 7
    assert [found["atom:expert_load_imbalance", (str(layer),)] for layer in range(2)] == [1.5, 1.25]


def test_a_held_event_loop_is_observed() -> None:
    lags: list[float] = []

    async def run() -> None:
        watch = asyncio.create_task(watch_loop(lags.append, interval_s=0.01))
        while not lags:
            await asyncio.sleep(0.01)
        time.sleep(0.2)
        before = len(lags)
        while len(lags) == before:
            await asyncio.sleep(0.01)
        watch.cancel()

    asyncio.run(run())
    assert max(lags) >= 0.15
    metrics = Metrics()
    metrics.event_loop_lag.observe(max(lags))
    found = scrape(metrics, None)
    assert found["atom:event_loop_lag_seconds_count", ()] == 1
    assert found["atom:event_loop_lag_seconds_bucket", ("0.1",)] == 0


def test_without_an_engine_frontend_metrics_remain() -> None:
    found = scrape(Metrics(), None)
    assert found["atom:engine_up", ()] == 0
    assert ("vllm:num_requests_running", ()) not in found
    assert found["vllm:prompt_tokens_total", ()] == 0
