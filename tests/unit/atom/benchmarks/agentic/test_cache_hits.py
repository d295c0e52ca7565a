"""Hits of the prefix cache by tier, from Prometheus text."""

from atom.benchmarks.agentic.cache_hits import CacheHits

PAGE = """# HELP vllm:prefix_cache_queries_total x
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_queries_total{engine="1"} 50.0
vllm:prefix_cache_hits_total{engine="0"} 60.0
vllm:prefix_cache_hits_total{engine="1"} 20.0
atom:kv_tier_hits_total{engine="0",tier="CPU"} 25.0
atom:kv_tier_hits_total{engine="1",tier="CPU"} 5.0
"""


def test_hits_are_summed_over_engines() -> None:
    found = CacheHits.parse(PAGE)
    assert found == CacheHits(150, 80, {"CPU": 30})
    assert found.rates == {"GPU": 50 / 150, "CPU": 30 / 150}


def test_a_run_is_the_difference() -> None:
    found = CacheHits(150, 80, {"CPU": 30}) - CacheHits(50, 30, {"CPU": 10})
    assert found == CacheHits(100, 50, {"CPU": 20})


def test_servers_without_tiers_or_counters() -> None:
    assert CacheHits.parse(
        "vllm:prefix_cache_queries_total 8\nvllm:prefix_cache_hits_total 4\n"
    ) == CacheHits(8, 4)
    assert CacheHits.parse("x 1") is None
    assert CacheHits(0, 0).rates == {}
