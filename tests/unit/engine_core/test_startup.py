import dataclasses
import operator
from typing import Literal

import pytest

from atom.shared.config.cache import CacheConfig
from atom.shared.config.device import DeviceConfig
from atom.shared.config.engine import EngineConfig
from atom.shared.config.model import ModelConfig
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.scheduler import SchedulerConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.worker import FullAttentionSpec, Loaded, RecurrentStateSpec, SlidingWindowSpec
from engine_core.startup import StartupError, limits_of, plan_cache

FULL = FullAttentionSpec(block_size=16, bytes_per_block=1000)


def config(max_model_len: int | None = None, num_kv_blocks: int | None = None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(num_kv_blocks=num_kv_blocks),
        scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4),
    )


def test_the_rank_with_the_least_memory_determines_the_size() -> None:
    smaller = FullAttentionSpec(block_size=16, bytes_per_block=500)
    loaded = [Loaded(0, [FULL], 90_000, 7), Loaded(1, [smaller], 40_000, 7)]
    plan = plan_cache(config(), 1024, loaded)
    assert (plan.num_blocks, plan.kv_tokens, plan.max_model_len) == ([80], 1280, 1024)


def test_an_exact_number_overrides_memory() -> None:
    plan = plan_cache(config(num_kv_blocks=7), 64, [Loaded(0, [FULL, FULL], 1, 7)])
    assert plan.num_blocks == [7, 7]


def test_a_small_cache_shortens_the_context() -> None:
    assert plan_cache(config(), 1024, [Loaded(0, [FULL], 10_500, 7)]).max_model_len == 160


def test_a_requested_context_is_not_shortened() -> None:
    with pytest.raises(
        StartupError, match="max_model_len 1024 does not fit the KV cache of 160 tokens: lower"
    ):
        plan_cache(config(max_model_len=1024), 4096, [Loaded(0, [FULL], 10_500, 7)])
    assert plan_cache(config(max_model_len=160), 4096, [Loaded(0, [FULL], 10_500, 7)]).max_model_len == 160


def test_no_room_for_one_block() -> None:
    with pytest.raises(
        StartupError, match="worker 1 has 999 bytes for the KV cache, and one block takes 1000"
    ):
        plan_cache(config(), 64, [Loaded(0, [FULL], 5000, 7), Loaded(1, [FULL], 999, 7)])


def test_ranks_must_agree() -> None:
    window = SlidingWindowSpec(block_size=16, bytes_per_block=1000, window=8)
    with pytest.raises(StartupError, match="workers 0 and 1 have different"):
        plan_cache(config(), 64, [Loaded(0, [FULL], 5000, 7), Loaded(1, [window], 5000, 7)])


def test_unresolved_defaults_are_refused() -> None:
    with pytest.raises(StartupError, match="must have values before the core starts"):
        limits_of(EngineConfig(), [Loaded(0, [FULL], 1, 7)])


GIB = 1 << 30


@pytest.mark.parametrize(
    ("device", "weights", "scheduler", "drafts", "mixed"),
    [
        ("cpu", [7 * GIB], SchedulerConfig(2048, max_num_seqs=256), 0, 512),
        ("cpu", [7 * GIB], SchedulerConfig(2048, max_num_seqs=512), 0, 1024),
        ("cuda", [2 * GIB, GIB], SchedulerConfig(16384, max_num_seqs=512), 0, 4096),
        ("cuda", [GIB, 2 * GIB + 1], SchedulerConfig(16384, max_num_seqs=512), 0, 2048),
        ("cuda", [7 * GIB], SchedulerConfig(16384, max_num_seqs=512), 3, 4096),  # half of it is for prompts
        ("cuda", [7 * GIB], SchedulerConfig(1024, max_num_seqs=512), 0, 1024),
        ("cuda", [7 * GIB], SchedulerConfig(16384, 16384, max_num_seqs=512), 0, 16384),
    ],
)
def test_the_default_of_mixed_steps_goes_by_the_weights(
    device: Literal["cpu", "cuda"],
    weights: list[int],
    scheduler: SchedulerConfig,
    drafts: int,
    mixed: int,
) -> None:
    config = EngineConfig(
        scheduler=scheduler,
        device=DeviceConfig(device=device),
        speculative=SpeculativeConfig(num_speculative_tokens=drafts),
    )
    loaded = [Loaded(rank, [FULL], 1, weight_bytes) for rank, weight_bytes in enumerate(weights)]
    assert limits_of(config, loaded).max_num_mixed_tokens == mixed


def test_states_are_as_many_as_requests() -> None:
    state = RecurrentStateSpec(bytes_per_slot=700)
    assert plan_cache(config(num_kv_blocks=7), 64, [Loaded(0, [FULL, state], 1, 7)]).num_blocks == [7, 4]
    richer = [Loaded(0, [FULL, state], 12_000, 7), Loaded(1, [FULL, state], 90_000, 7)]
    assert plan_cache(config(), 64, richer).num_blocks == [9, 4]
    with pytest.raises(StartupError, match="500 bytes for the KV cache, and one block takes 1700"):
        plan_cache(config(), 64, [Loaded(0, [FULL, state], 500, 7)])


def test_a_cache_beyond_memory_is_refused() -> None:
    loaded = [Loaded(0, [FULL], 5000, 7, 5000), Loaded(1, [FULL], 5000, 7, 4000)]
    with pytest.raises(StartupError, match="takes 4.9 KiB on rank 1, and .* leave 3.9 KiB: lower"):
        plan_cache(config(), 64, loaded)
    with pytest.raises(StartupError, match="--num-kv-blocks"):
        plan_cache(config(num_kv_blocks=9), 64, [Loaded(0, [FULL], 5000, 7, 5000)])
    # The blocks that an engine had before its restart, and a device that refuses too much itself.
    assert plan_cache(config(), 64, loaded, [5]).num_blocks == [5]
    assert plan_cache(config(), 64, [Loaded(0, [FULL], 5000, 7)]).num_blocks == [5]


def offloading(memory: int | None, disk: int | None, remote: int | None = None) -> EngineConfig:
    cache = CacheConfig(
        num_kv_blocks=30, kv_offload_memory=memory, kv_offload_disk=disk, kv_offload_remote=remote
    )
    return dataclasses.replace(config(), cache=cache)


def test_tiers_are_divided_as_the_cache_is_and_fit_every_rank() -> None:
    state = RecurrentStateSpec(bytes_per_slot=5000)
    larger = FullAttentionSpec(block_size=16, bytes_per_block=2000)
    ranks = [Loaded(0, [FULL, state], 1, 7), Loaded(1, [larger, state], 1, 7)]
    plan = plan_cache(offloading(800_000, 801_000, 500_000), 64, ranks, disk_unit=512)
    assert plan.num_blocks == [30, 4]
    memory, disk, remote = plan.tiers
    assert (memory.medium, disk.medium, disk.by_content) == ("CPU", "STORAGE", True)
    assert (remote.medium, remote.by_content) == ("REMOTE", True)
    assert memory.num_slots == [300, 40]  # 60,000 + 20,000 bytes of a cache on rank 1
    sizes = [size + 64 + 16 * 4 for size in (2000, 5000)]  # with the head of the file
    assert 750_000 < sum(map(operator.mul, disk.num_slots, [5 * 512, 11 * 512])) <= 801_000
    assert sum(map(operator.mul, remote.num_slots, [size + 128 for size in sizes])) <= 500_000
    assert plan_cache(offloading(None, None), 64, ranks).tiers == []


def test_files_have_the_ids_of_a_block_of_all_ranks() -> None:
    spec = FullAttentionSpec(block_size=128, bytes_per_block=4096 - 64 - 16 * 4)
    for ranks, slots in ((1, 10), (8, 5)):
        parallel = ParallelConfig(tensor_parallel_size=ranks, decode_context_parallel_size=ranks)
        shared = dataclasses.replace(offloading(None, 10 * 4096), parallel=parallel)
        (disk,) = plan_cache(shared, 64, [Loaded(0, [spec], 1, 7)], disk_unit=4096).tiers
        assert disk.num_slots == [slots]


def test_tiers_too_small_for_a_block_are_refused() -> None:
    for options, flag in (
        ((999, 10_000), "--kv-offload-memory"),
        ((10_000, 999), "--kv-offload-disk"),
        ((None, None, 999), "--kv-offload-remote"),
    ):
        with pytest.raises(StartupError, match=f"{flag} .* does not hold a KV block"):
            plan_cache(offloading(*options), 64, [Loaded(0, [FULL], 1, 7)])
