"""What the offline engine sets that a server does not."""

import dataclasses

from msgspec.structs import replace

from atom.engine.llm_engine import _sum, _without_mixed_limit
from atom.shared.config.scheduler import SchedulerConfig
from atom.shared.messages.engine import CoreStats, HeapUse, KVTierStats
from tests.helpers.checkpoints.tiny_models import engine_config


def test_only_the_user_limits_mixed_steps() -> None:
    config = engine_config(block_size=16)
    for given, wanted in ((None, 4096), (512, 512)):
        scheduler = SchedulerConfig(max_num_batched_tokens=4096, max_num_mixed_tokens=given)
        found = _without_mixed_limit(dataclasses.replace(config, scheduler=scheduler))
        assert found.scheduler == dataclasses.replace(scheduler, max_num_mixed_tokens=wanted)


def test_counters_of_engines_are_added() -> None:
    """Those that have no drafts or tiers yet add nothing to the lists."""
    plain = CoreStats(*range(13))
    tier = KVTierStats("CPU", *range(6))
    heaps = [HeapUse(7, 1), HeapUse(5, 2), HeapUse(6, 3)]
    first = replace(plain, num_accepted_tokens_per_pos=[4, 1], worker_heaps=heaps[:2])
    second = replace(plain, kv_tiers=[tier], worker_heaps=heaps[2:])
    found = _sum([first, second, second])
    assert found.running == 3 * plain.running and found.num_accepted_tokens_per_pos == [4, 1]
    assert found.kv_tiers == [KVTierStats("CPU", *range(0, 12, 2))]
    assert found.worker_heaps == [*heaps, heaps[2]]
