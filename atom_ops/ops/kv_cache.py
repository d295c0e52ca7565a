"""The paged cache of keys and values of one layer.

Slot s of the cache is offset s % block_size of block s // block_size:

    k, v               [num_blocks, block_size, K, E]     compute dtype, bfloat16 or float8_e4m3fn
    k_scale, v_scale   [num_blocks, block_size, K]        float32, for float8_e4m3fn only
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import EXACT

FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max
_LARGEST_SCALE = 255.0  # `read_kv` multiplies scales by 2**120


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's cache; a stored number x stands for x * scale where there are scales."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def make_kv_layer(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVLayer:
    """An empty cache. `dtype` float8_e4m3fn keeps one scale for each token and head."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return _zeros((num_blocks, block_size, kv_heads, *shape), dtype, device)

    k, v = empty(head_dim, dtype=dtype), empty(head_dim, dtype=dtype)
    if dtype != FP8:
        return KVLayer(k, v)
    return KVLayer(k, v, empty(dtype=torch.float32), empty(dtype=torch.float32))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Unlike torch's, numpy's zeros take no memory before they are written to.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


def kv_bytes_per_block(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block of one layer: keys, values and their scales."""
    scale_bytes = torch.float32.itemsize if dtype == FP8 else 0
    return 2 * block_size * kv_heads * (head_dim * dtype.itemsize + scale_bytes)


def _case(kv_heads: int, head_dim: int, fp8: bool) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, KVLayer, Tensor]:
        k, v = torch.randn(2, 7, kv_heads, head_dim, generator=generator).to(dtype)
        cache = make_kv_layer(5, 4, kv_heads, head_dim, FP8 if fp8 else dtype, torch.device("cpu"))
        slots = torch.randperm(20, generator=generator)[:7]
        slots[3] = -1
        return k, v, cache, slots

    return Case(f"{kv_heads}x{head_dim}{'-fp8' if fp8 else ''}", make)


@op([_case(3, 64, False), _case(1, 16, False), _case(2, 32, True)], EXACT)
def write_kv(k_TKE: Tensor, v_TKE: Tensor, cache: KVLayer, slots_T: Tensor) -> None:
    """Store each token's key and value in its slot (int64); slot -1 stores nothing.

    `k_TKE` and `v_TKE` need a contiguous last dimension only. The float8 scale makes a head's
    largest magnitude the largest float8; magnitudes over 114240 saturate. Looking for slots of
    -1 waits for the device.
    """
    stored = slots_T >= 0
    if not stored.all():
        k_TKE, v_TKE, slots_T = k_TKE[stored], v_TKE[stored], slots_T[stored]
    _store(k_TKE, cache.k, cache.k_scale, slots_T)
    _store(v_TKE, cache.v, cache.v_scale, slots_T)


def _store(x_TKE: Tensor, cache: Tensor, scales: Tensor | None, slots_T: Tensor) -> None:
    if scales is not None:
        x_TKE = x_TKE.float()
        scale_TK = x_TKE.abs().amax(-1).div_(_FP8_MAX).clamp_(2.0**-100, _LARGEST_SCALE)
        scales.flatten(0, 1).index_copy_(0, slots_T, scale_TK)
        scaled = (x_TKE / scale_TK[..., None]).clamp_(-_FP8_MAX, _FP8_MAX)
        x_TKE, cache = scaled.to(FP8).view(torch.uint8), cache.view(torch.uint8)
    cache.flatten(0, 1).index_copy_(0, slots_T, x_TKE.to(cache.dtype))


def read_kv(cache: KVLayer, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of the slots (int64 [S]) as `dtype`, [S, K, E] each."""
    return _load(cache.k, cache.k_scale, slots, dtype), _load(cache.v, cache.v_scale, slots, dtype)


def _load(cache: Tensor, scales: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return cache.flatten(0, 1).index_select(0, slots).to(dtype)
    codes = cache.view(torch.int8).flatten(0, 1).index_select(0, slots)
    scale = scales.flatten(0, 1).index_select(0, slots)
    # A float8_e4m3 code moved to the top of a float32 (sign, four exponent bits, mantissa) is
    # the number times 2**-120, subnormals included: ten times as fast as torch's conversion.
    # Widening repeats the sign bit; the mask takes the copies out again.
    bits = codes.to(torch.int32).bitwise_left_shift_(20).bitwise_and_(-0x78100000)
    return bits.view(torch.float32).mul_(scale.mul_(2.0**120)[..., None]).to(dtype)
