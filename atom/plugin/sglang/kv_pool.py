"""SGLang's KV pools in the layout of ATOM's ops.

A slot of `KVLayer` has a token's keys, then its values. SGLang keeps them in two lists of tensors, which here
are views of one tensor a layer:

    atom_kv      [slots, 2, K, E]     store_dtype of the pool
    k_buffer     atom_kv[:, 0]
    v_buffer     atom_kv[:, 1]
    atom_scales  [slots, 2, K]        float32, of an FP8 pool only: a scale for each token and head

A pool of latents stays as it is, and an FP8 one gets atom_scales [slots].
"""

from collections.abc import Callable
from typing import Any

import torch

from atom.plugin.sglang.host_config import uses_own_attention
from atom_ops import KVLayer, LatentLayer
from atom_ops.ops.attention.kv_cache import FP8

Create = Callable[[Any], None]


def create_kv(create: Create, pool: Any) -> None:
    """Allocate the buffers of a pool of keys and values; `create` is SGLang's own function."""
    if not uses_own_attention():
        create(pool)
        return
    if pool.head_dim != pool.v_head_dim or pool.kv_cache_layout != "nhd":
        raise ValueError(
            "ATOM's attention in SGLang has keys and values of one size, in the layout nhd: use another one"
        )
    shape = (_slots(pool), 2, pool.head_num, pool.head_dim)
    kv = [torch.zeros(shape, dtype=pool.store_dtype, device=pool.device) for _ in range(pool.layer_num)]
    pool.atom_kv = kv
    pool.atom_scales = _scales(pool, shape[:3])
    rows = pool.size + pool.page_size
    pool.k_buffer = [each[:rows, 0] for each in kv]
    pool.v_buffer = [each[:rows, 1] for each in kv]


def create_latents(create: Create, pool: Any) -> None:
    """Allocate the buffers of a pool of latents; `create` is SGLang's own function."""
    create(pool)
    if uses_own_attention():
        pool.atom_scales = _scales(pool, (pool.size + pool.page_size,))


def _scales(pool: Any, shape: tuple[int, ...]) -> list[torch.Tensor | None]:
    if pool.dtype not in (FP8, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"--kv-cache-dtype {pool.dtype}: ATOM's attention in SGLang stores fp8_e4m3 or the compute dtype"
        )
    fp8 = pool.dtype == FP8
    return [
        torch.zeros(shape, dtype=torch.float32, device=pool.device) if fp8 else None
        for _ in range(pool.layer_num)
    ]


def _slots(pool: Any) -> int:
    """Slots of whole pages; the first page is for padding."""
    pages: int = -(-pool.size // pool.page_size) + 1
    return pages * int(pool.page_size)


def kv_layer(pool: Any, layer: int) -> KVLayer:
    """The pool's keys and values of a layer, in its dtype. Raises ValueError for a pool of another layout."""
    part, number = _part(pool, layer)
    if not hasattr(part, "atom_kv"):
        raise ValueError(_unknown(part))
    scale = part.atom_scales[number]
    kv = _paged(part.atom_kv[number].view(part.dtype), part)
    return KVLayer(kv, None if scale is None else _paged(scale, part))


def latent_layer(pool: Any, layer: int, latent_width: int) -> LatentLayer:
    """The pool's latents of a layer, in its dtype. Raises ValueError for a pool of another layout."""
    if not hasattr(pool, "atom_scales"):
        raise ValueError(_unknown(pool))
    number = layer - pool.start_layer
    whole = pool.size // pool.page_size * pool.page_size + pool.page_size
    scale = pool.atom_scales[number]
    rows = _paged(pool.kv_buffer[number].view(pool.dtype).squeeze(1)[:whole], pool)
    return LatentLayer(rows, latent_width, None if scale is None else _paged(scale[:whole], pool))


def _unknown(pool: Any) -> str:
    return f"ATOM's attention in SGLang does not read a {type(pool).__name__}: use another backend"


def windowed_slots(pool: Any) -> torch.Tensor | None:
    """Slot of the pool of all tokens -> slot of the pool of windows; None: there is one pool."""
    found: torch.Tensor | None = getattr(pool, "full_to_swa_index_mapping", None)
    return found


def _part(pool: Any, layer: int) -> tuple[Any, int]:
    """The pool that has the layer, which may be one of two, and the layer's number in it."""
    if not hasattr(pool, "layers_mapping"):
        return pool, layer - pool.start_layer
    number, windowed = pool.layers_mapping[layer]
    return pool.swa_kv_pool if windowed else pool.full_kv_pool, number


def _paged(slots: torch.Tensor, pool: Any) -> torch.Tensor:
    return slots.view(-1, pool.page_size, *slots.shape[1:])
