"""The paged cache of keys and values of one layer.

Slot s is offset s % block_size of block s // block_size. It holds a token's K keys, then its K
values, so that one index addresses both:

    kv      [num_blocks, block_size, 2, K, E]     compute dtype, bfloat16 or float8_e4m3fn
    scale   [num_blocks, block_size, 2, K]        float32, for float8_e4m3fn only
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import EXACT

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
_LARGEST_SCALE = 255.0  # `read_kv` multiplies scales by 2**120


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's cache; with scales a value is stored value * scale."""

    kv: Tensor
    scale: Tensor | None = None


def make_kv_layer(
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVLayer:
    """An empty cache; with float8_e4m3fn one scale per token and head."""

    shape = (num_blocks, block_size, 2, kv_heads)
    scale = zeros(shape, torch.float32, device) if dtype == FP8 else None
    return KVLayer(zeros((*shape, head_dim), dtype, device), scale)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory for a cache."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Unlike torch.zeros, numpy.zeros takes no memory before it is written to.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


def kv_bytes_per_block(block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block of one layer: keys, values and their scales."""
    scale_bytes = torch.float32.itemsize if dtype == FP8 else 0
    return 2 * block_size * kv_heads * (head_dim * dtype.itemsize + scale_bytes)


def _case(kv_heads: int, head_dim: int, fp8: bool) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, KVLayer, Tensor]:
        heads = torch.randn(7, 2 * kv_heads + 1, head_dim, generator=generator).to(dtype)
        _, k, v = heads.split([1, kv_heads, kv_heads], 1)
        cache = make_kv_layer(5, 4, kv_heads, head_dim, FP8 if fp8 else dtype, torch.device("cpu"))
        return k, v, cache, torch.randperm(20, generator=generator)[:7]

    return Case(f"{kv_heads}x{head_dim}{'-fp8' if fp8 else ''}", make)


@op(
    [_case(3, 64, False), _case(1, 16, False), _case(8, 128, False), _case(2, 32, True), _case(9, 80, True)],
    EXACT,
)
def write_kv(k_TKE: Tensor, v_TKE: Tensor, cache: KVLayer, slots_T: Tensor) -> None:
    """Store each token's keys and values in its slot (int64).

    Only the last dimension of `k_TKE` and `v_TKE` must be contiguous. The float8 scale maps a
    head's largest magnitude to the largest float8; magnitudes over 114240 saturate. Nothing is
    stored for a negative slot: padding, which comes after all other tokens.
    """
    for half, x_TKE in enumerate((k_TKE, v_TKE)):
        numbers = cache.kv.flatten(0, 1).select(1, half)
        if cache.scale is not None:
            x_TKE, scale_TK = float8_codes(x_TKE)
            store(cache.scale.flatten(0, 1).select(1, half), slots_T, scale_TK)
            numbers = numbers.view(torch.uint8)
        store(numbers, slots_T, x_TKE.to(numbers.dtype))


def store(stored: Tensor, slots_T: Tensor, new: Tensor) -> None:
    """stored[slots] = new; negative slots, which come last, are skipped."""
    if len(slots_T) and (slots_T.is_cuda or slots_T.numpy()[-1] < 0):
        slots_T, new = without_padding_rows(stored, slots_T, new)
    stored.index_copy_(0, slots_T, new)


def without_padding_rows(stored: Tensor, slots_T: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Slots and values that store the same without negative slots; does not synchronise.

    A padding row repeats the write of another row. If all rows are padding, they write back what
    slot 0 already holds.
    """
    rows_T = torch.arange(len(slots_T), device=slots_T.device)
    rows_T = torch.where(slots_T < 0, slots_T.argmax(), rows_T)
    new = torch.where(slots_T.amax() < 0, stored[:1], new.index_select(0, rows_T))
    return slots_T.index_select(0, rows_T).clamp_(min=0), new


def float8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8 codes of [..., E] as uint8, which index_copy_ supports, and their scales [...]."""
    x = x.float()
    scale = x.abs().amax(-1).div_(FP8_MAX).clamp_(2.0**-100, _LARGEST_SCALE)
    scaled = (x * scale.reciprocal()[..., None]).clamp_(-FP8_MAX, FP8_MAX)
    return scaled.to(FP8).view(torch.uint8), scale


def read_kv(cache: KVLayer, slots_S: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values of the slots (int64) as `dtype`, [S, 2, K, E]."""
    if cache.scale is None:
        return cache.kv.flatten(0, 1).index_select(0, slots_S).to(dtype)
    codes = cache.kv.view(torch.int8).flatten(0, 1).index_select(0, slots_S)
    return float8_numbers(codes, cache.scale.flatten(0, 1).index_select(0, slots_S), dtype)


def float8_numbers(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of float8_e4m3fn codes (int8, [..., E]); changes `scale` [...] in place."""
    # A float8_e4m3 code's bits, moved to the top of a float32 (sign, four exponent bits, mantissa),
    # are the value times 2**-120, subnormals included: ten times as fast as torch's conversion.
    # Widening repeats the sign bit; the mask clears the copies.
    bits = codes.to(torch.int32).bitwise_left_shift_(20).bitwise_and_(-0x78100000)
    return bits.view(torch.float32).mul_(scale.mul_(2.0**120)[..., None]).to(dtype)
