"""How vLLM is told the layout of ATOM's KV cache, and how its tensors become ATOM's.

ATOM stores a token's keys, then its values, of all heads (`KVLayer`), or its latent (`LatentLayer`).

    vLLM            the layout is said by                             a layer gets
    0.26            the backend's get_kv_cache_shape                  a tensor of that shape
    0.32, 0.33      the spec: one slot for all heads, of so many      [blocks, 1, block size, numbers]
                    bytes, and layouts whose layers are contiguous

Versions between those are read as the one whose fields they have.
"""

from dataclasses import fields
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from atom_ops import KVLayer, LatentLayer
from workers.layers.attention.attention import KVGroup
from workers.layers.attention.cache_groups import LatentGroup

_SAID_BY_SPEC = "num_head_slots" in {field.name for field in fields(FullAttentionSpec)}


def kv_spec(group: KVGroup | LatentGroup, block_size: int, dtype: torch.dtype) -> Any:
    """What vLLM needs to know of the cache of one layer of the group."""
    if isinstance(group, LatentGroup):
        width = group.latent_width + group.rope_width
        packed = _packed(width * dtype.itemsize)
        return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=width, dtype=dtype, **packed)
    common = {
        "block_size": block_size,
        "num_kv_heads": group.kv_heads,
        "head_size": group.head_dim,
        "dtype": dtype,
        **packed_heads(group.kv_heads, group.head_dim, dtype),
    }
    if group.window:
        return SlidingWindowSpec(**common, sliding_window=group.window)
    return FullAttentionSpec(**common)


def packed_heads(kv_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """The fields of a spec that put keys and values of all heads side by side; none where a shape says it."""
    return _packed(2 * kv_heads * head_dim * dtype.itemsize)


def _packed(token_bytes: int) -> dict[str, int]:
    return {"num_head_slots": 1, "state_content_bytes": token_bytes} if _SAID_BY_SPEC else {}


def contiguous_layouts() -> tuple[Any, ...]:
    """vLLM's layouts in which a layer's blocks follow each other."""
    from vllm.v1.kv_cache_interface import KVCacheLayout  # absent in 0.26

    return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)


def kv_layer(cache: torch.Tensor, block_size: int, kv_heads: int, head_dim: int) -> KVLayer:
    """vLLM's cache of one layer as ATOM's keys and values, the same memory.

    Raises RuntimeError for a cache of another size.
    """
    return KVLayer(cache.view(cache.shape[0], block_size, 2, kv_heads, head_dim))


def latent_layer(cache: torch.Tensor, block_size: int, group: LatentGroup) -> LatentLayer:
    """vLLM's cache of one layer as ATOM's latents, the same memory.

    Raises RuntimeError for a cache of another size.
    """
    width = group.latent_width + group.rope_width
    return LatentLayer(cache.view(cache.shape[0], block_size, width), group.latent_width)
