"""From loaded workers to a sized KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from atom.shared.config.cache import CacheConfig
from atom.shared.config.checkpoint import ImageSettings
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.engine import ID_BYTES
from atom.shared.messages.kv_tiers import DISK, HOST_MEMORY, REMOTE, TierSlots
from atom.shared.messages.worker import KVSpec, Loaded, RecurrentStateSpec
from atom.shared.utils.sizes import size_text
from engine_core.kv_cache.kv_plan import cache_tokens, longest_sequence, plan_blocks, plan_slots, unit_bytes
from engine_core.kv_tiers.file_space import LEAST_UNIT
from engine_core.requests.images import ImageRegistry
from engine_core.scheduler import Limits

_REMEDY = "--kv-cache-memory-bytes or --gpu-memory-utilization"
# Most tokens of a step in which requests decode, as measured (docs/measurements/steps.md). With the first
# two, 99 % of the intervals between tokens are below 100 ms on an H200, at no more than 3 % less throughput.
_MIXED_TOKENS = 2048
_MIXED_TOKENS_OF_SMALL = 4096
_MIXED_TOKENS_ON_CPU = 512
_SMALL_WEIGHTS = 2 << 30
_FILE_BYTES = 64
"""Most bytes of a block's file besides the block and its token ids."""
_KEY_BYTES = 128
"""A key, and what a server keeps with it."""


class StartupError(RuntimeError):
    """The engine cannot start; the text is one line a user can act on."""


@dataclass(frozen=True)
class CachePlan:
    """The KV cache of one engine."""

    specs: list[KVSpec]
    num_blocks: list[int]
    max_model_len: int
    """Longest sequence that is accepted."""
    kv_tokens: int
    tiers: list[TierSlots]
    """Where blocks are kept after the cache has evicted them."""


def limits_of(config: EngineConfig, loaded: Sequence[Loaded]) -> Limits:
    """The scheduler's limits. Raises StartupError where the configuration was not resolved."""
    scheduler = config.scheduler
    if scheduler.max_num_seqs is None or scheduler.max_num_batched_tokens is None:
        raise StartupError("max_num_seqs and max_num_batched_tokens must have values before the core starts")
    return Limits(
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        policy=scheduler.scheduling_policy,
        delay_factor=scheduler.scheduler_delay_factor,
        num_drafts=config.speculative.num_speculative_tokens,
        max_num_mixed_tokens=scheduler.max_num_mixed_tokens or _mixed_tokens(config, loaded),
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        fair_share=scheduler.fair_share,
        adapts_width=config.adapts_draft_width,
        lookahead=config.speculative.lookahead,
        sends_next_ids=config.speculative.reads_next_ids,
    )


def _mixed_tokens(config: EngineConfig, loaded: Sequence[Loaded]) -> int:
    scheduler = config.scheduler
    assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
    return default_mixed_tokens(
        config.device.device == "cpu",
        max(rank.weight_bytes for rank in loaded),
        scheduler.max_num_seqs * (1 + config.speculative.num_speculative_tokens),
        scheduler.max_num_batched_tokens,
    )


def default_mixed_tokens(on_cpu: bool, weight_bytes: int, decodes: int, max_num_batched_tokens: int) -> int:
    """Most tokens of a mixed step, by the device and a worker's weights; at least half are for prompts.

    `decodes` are the tokens of all sequences that may generate.
    """
    if on_cpu:
        wanted = _MIXED_TOKENS_ON_CPU
    elif weight_bytes <= _SMALL_WEIGHTS:
        wanted = _MIXED_TOKENS_OF_SMALL
    else:
        wanted = _MIXED_TOKENS
    return min(max(wanted, 2 * decodes), max_num_batched_tokens)


def image_registry(loaded: Sequence[Loaded], settings: ImageSettings | None) -> ImageRegistry:
    """What counts the images that every rank can hold; where the ranks hold none, it takes none."""
    if settings is None:
        return ImageRegistry()
    most = min(one.image_tokens for one in loaded)
    return ImageRegistry(most, settings.token_bytes, settings.sees_ahead)


def plan_cache(
    config: EngineConfig,
    model_max_len: int,
    loaded: Sequence[Loaded],
    earlier: Sequence[int] = (),
    disk_unit: int = LEAST_UNIT,
) -> CachePlan:
    """The KV cache that fits every rank. `model_max_len` is the checkpoint's own limit.

    `earlier` are the blocks of each group before a restart of the engine, whose limits stay. `disk_unit`:
    bytes in whose multiples files take space (`file_space.py`).

    Raises StartupError when the cache would be too small for the configuration.
    """
    specs = loaded[0].kv_specs
    for other in loaded[1:]:
        if _shapes(other.kv_specs) != _shapes(specs):
            raise StartupError(f"workers {loaded[0].rank} and {other.rank} have different KV cache layouts")
    limits = limits_of(config, loaded)
    max_model_len = config.model.max_model_len or model_max_len
    num_blocks = list(earlier) or _num_blocks(config.cache, limits, max_model_len, loaded)
    if not earlier:  # what an engine had before its restart it may have again
        _check_room(num_blocks, loaded)
    longest = longest_sequence(specs, num_blocks, limits.max_chunk)
    if longest is not None and longest < max_model_len:
        if config.model.max_model_len is not None:
            raise StartupError(
                f"max_model_len {max_model_len} does not fit the KV cache of {longest} tokens: "
                f"lower --max-model-len, or give the cache more memory with {_REMEDY}"
            )
        max_model_len = longest
    tiers = _tiers(config, num_blocks, loaded, disk_unit)
    return CachePlan(list(specs), num_blocks, max_model_len, cache_tokens(specs, num_blocks), tiers)


def _tiers(
    config: EngineConfig, num_blocks: Sequence[int], loaded: Sequence[Loaded], disk_unit: int
) -> list[TierSlots]:
    """Host memory, disk, remote. Raises StartupError for one that does not hold a block of each group."""
    tiers = []
    cache = config.cache
    named = _FILE_BYTES + config.block_tokens * ID_BYTES
    for medium, flag, size, extra, unit in (
        (HOST_MEMORY, "--kv-offload-memory", cache.kv_offload_memory, 0, 1),
        (DISK, "--kv-offload-disk", cache.kv_offload_disk, named, disk_unit),
        (REMOTE, "--kv-offload-remote", cache.kv_offload_remote, named + _KEY_BYTES, 1),
    ):
        if size is None:
            continue
        plans = [plan_slots(one.kv_specs, num_blocks, size, extra, unit) for one in loaded]
        slots = [min(counts) for counts in zip(*plans, strict=True)]
        if not all(slots):
            raise StartupError(
                f"{flag} {size_text(size)} does not hold a KV block of each kind that this model has, in the "
                "proportion of the KV cache: make it larger"
            )
        tiers.append(TierSlots(medium, slots))
    return tiers


def _num_blocks(
    cache: CacheConfig, limits: Limits, max_model_len: int, loaded: Sequence[Loaded]
) -> list[int]:
    override = cache.num_kv_blocks
    interval = cache.state_checkpoint_interval_tokens if cache.enable_prefix_caching else 0
    if override is not None:
        specs = loaded[0].kv_specs
        block_size = next(spec.block_size for spec in specs if not isinstance(spec, RecurrentStateSpec))
        slots = limits.max_num_seqs + (2 * override * block_size // interval if interval else 0)
        return [slots if isinstance(spec, RecurrentStateSpec) else override for spec in specs]
    plans = [
        plan_blocks(
            one.kv_specs,
            one.kv_bytes,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            max_model_len,
            limits.max_uncertain + limits.lookahead,
            interval,
        )
        for one in loaded
    ]
    for one, plan in zip(loaded, plans, strict=True):
        if min(plan) < 1:
            need = sum(map(unit_bytes, one.kv_specs))
            raise StartupError(
                f"worker {one.rank} has {one.kv_bytes} bytes for the KV cache, and one block takes {need}: "
                f"give the cache more memory with {_REMEDY}"
            )
    return [min(blocks) for blocks in zip(*plans, strict=True)]


def _check_room(num_blocks: Sequence[int], loaded: Sequence[Loaded]) -> None:
    """Raise StartupError for a cache that is larger than the memory of a rank."""
    for one in loaded:
        sizes = zip(one.kv_specs, num_blocks, strict=True)
        needed = sum(unit_bytes(spec) * blocks for spec, blocks in sizes)
        if 0 <= one.kv_room < needed:
            raise StartupError(
                f"the KV cache takes {size_text(needed)} on rank {one.rank}, and the weights leave "
                f"{size_text(one.kv_room)}: lower --kv-cache-memory-bytes or --num-kv-blocks"
            )


def _shapes(specs: Sequence[KVSpec]) -> list[tuple[type, int | None]]:
    """What must be equal on all ranks; bytes may differ, as ranks may have different numbers of heads."""
    return [(type(spec), None if isinstance(spec, RecurrentStateSpec) else spec.block_size) for spec in specs]
