"""The KV cache of one rank: specs, memory budget, allocation."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from atom.shared.config.cache import CacheConfig
from atom.shared.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec, SlidingWindowSpec
from atom.shared.utils.logger import get_logger
from atom_ops import (
    index_bytes_per_block,
    latent_bytes_per_block,
    make_index_keys,
    make_latent_layer,
    make_rows,
    make_state_layer,
    rows_of_block,
    write_latent,
)
from workers.layers.attention.attention import KVGroup
from workers.layers.attention.cache_groups import CacheGroup, LatentGroup, RowGroup, StateGroup
from workers.layers.context import CacheLayer

_CPU_LIMIT = 4 << 30
_CPU_SHARE = 4
"""The default KV cache on a CPU is this fraction (1 / 4) of the available memory."""
_SPARED = 0.02
"""Fraction of a GPU that stays free where several processes share it."""


def kv_dtype(cache: CacheConfig, compute: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache. Raises ValueError for an unknown name."""
    dtypes = {"auto": compute, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    if cache.kv_cache_dtype not in dtypes:
        raise ValueError(
            f"kv_cache_dtype {cache.kv_cache_dtype!r} is not supported; supported are: {', '.join(dtypes)}"
        )
    return dtypes[cache.kv_cache_dtype]


def kv_specs(groups: Sequence[CacheGroup], block_size: int, dtype: torch.dtype) -> list[KVSpec]:
    """The KV spec of each group, from which the engine core allocates blocks.

    `block_size` counts the tokens on one rank.
    """
    return [_spec(group, block_size, dtype) for group in groups]


def _spec(group: CacheGroup, block_size: int, dtype: torch.dtype) -> KVSpec:
    if isinstance(group, StateGroup):
        return RecurrentStateSpec(len(group.layers) * group.places * group.shape.bytes, group.places)
    if isinstance(group, LatentGroup):
        layer_bytes = latent_bytes_per_block(block_size, group.latent_width, group.rope_width, dtype)
        index_bytes = index_bytes_per_block(block_size, group.index_width, dtype)
        size = len(group.layers) * layer_bytes + len(group.indexed) * index_bytes
        return FullAttentionSpec(block_size * group.shard.ranks, size)
    if isinstance(group, RowGroup):
        numbers = sum(rows_of_block(block_size, shape.rate) * shape.width for shape in group.shapes)
        return _paged_spec(block_size, numbers * dtype.itemsize, group.window)
    layer_bytes = group.backend.bytes_per_block(block_size, group.kv_heads, group.head_dim, dtype)
    return _paged_spec(block_size, len(group.layers) * layer_bytes, group.window)


def _paged_spec(block_size: int, size: int, window: int) -> KVSpec:
    if window:
        return SlidingWindowSpec(block_size, size, window)
    return FullAttentionSpec(block_size, size)


def _make_layer(
    layer: int, group: CacheGroup, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> CacheLayer:
    if isinstance(group, StateGroup):
        return make_state_layer(num_blocks * group.places, group.shape, device)
    if isinstance(group, LatentGroup):
        empty = make_latent_layer(
            num_blocks, block_size, group.latent_width, group.rope_width, dtype, device, group.shard
        )
        made = write_latent.pack(empty)
        if layer not in group.indexed:
            return made
        return replace(made, index=make_index_keys(num_blocks, block_size, group.index_width, dtype, device))
    if isinstance(group, RowGroup):
        shape = group.shapes[group.layers.index(layer)]
        return make_rows(num_blocks, block_size, shape.width, shape.rate, dtype, device)
    return group.backend.allocate(num_blocks, block_size, group.kv_heads, group.head_dim, dtype, device)


def allocate_kv(
    groups: Sequence[CacheGroup],
    num_blocks: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[CacheLayer]:
    """The caches of all layers, by layer index. Raises ValueError for another number of groups."""
    if len(num_blocks) != len(groups):
        raise ValueError(f"the model has {len(groups)} KV groups, but {len(num_blocks)} were sized")
    caches = {
        layer: _make_layer(layer, group, blocks, block_size, dtype, device)
        for group, blocks in zip(groups, num_blocks, strict=True)
        for layer in group.layers
    }
    return [caches[layer] for layer in sorted(caches)]


def attention_backends(groups: Sequence[CacheGroup]) -> str:
    """The backend of each group of attention layers as text for the log; empty without such groups."""
    bound = [group for group in groups if isinstance(group, KVGroup)]
    return ", ".join(f"{group.backend.name} ({len(group.layers)} layers)" for group in bound)


def cpu_kv_bytes(cache: CacheConfig, workers: int, weight_bytes: int = 0) -> int:
    """Bytes of KV cache on each of `workers` CPU workers of this host.

    `weight_bytes` are those of all workers that are still to be loaded.
    """
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    available = max(available_memory() - weight_bytes, 0)
    return min(_CPU_LIMIT, available // _CPU_SHARE // workers)


def cuda_bytes_in_use(device: torch.device) -> int:
    """Bytes of a GPU that this process and others use."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def cuda_kv_bytes(cache: CacheConfig, device: torch.device, peak_bytes: int, used_before: int) -> int:
    """Bytes of `gpu_memory_utilization` that are left for the KV cache, as far as they are free.

    `peak_bytes` is torch's peak memory in the largest step. Memory that torch does not manage
    (collectives) is subtracted too, but not `used_before`: what was in use when this worker started,
    by other processes. Raises MemoryError if nothing is left.
    """
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    own_bytes = peak_bytes + max(total - free - reserved - used_before, 0)
    spared = int(min(_SPARED, 1 - cache.gpu_memory_utilization) * total)
    allowed = int(cache.gpu_memory_utilization * total) - own_bytes
    left = min(allowed, free + reserved - peak_bytes - spared)
    if left <= 0:
        raise MemoryError(
            f"no memory of {device} is left for the KV cache: of its {total >> 20} MiB, {used_before >> 20} "
            f"were in use when this worker started, weights, graphs and one step take {own_bytes >> 20}, and "
            f"--gpu-memory-utilization allows {cache.gpu_memory_utilization:.0%}: raise it, stop other "
            "processes on this GPU, lower --max-num-batched-tokens, or use more GPUs with -tp"
        )
    if left < allowed:
        get_logger().warning(
            "%s: the KV cache gets %d MiB; --gpu-memory-utilization %s allows %d, but %d MiB were in use "
            "when this worker started",
            device, left >> 20, cache.gpu_memory_utilization, allowed >> 20, used_before >> 20,
        )  # fmt: skip
    return left


def available_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still allocate: of the host, or of its control group's limit."""
    available = _available_on_host()
    limit = _read(group / "memory.max")
    if limit.isdigit():
        used = int(_read(group / "memory.current")) - _cached_files(group / "memory.stat")
        available = min(available, int(limit) - used)
    return max(available, 0)


def _cached_files(stat: Path) -> int:
    """Bytes of the page cache, which the group counts and frees before it runs out of memory."""
    fields = dict(line.split() for line in _read(stat).splitlines())
    return sum(int(fields.get(name, 0)) for name in ("active_file", "inactive_file"))


def _available_on_host() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
