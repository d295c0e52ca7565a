"""Writes keys and values to the paged cache: one program for some heads of a token's keys or values."""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.kv_cache import KVLayer, write_kv
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_HEADS = 8

_FP8_MAX = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(2.0**-100)
# `read_kv` multiplies scales by 2**120, which must stay finite in float32.
_LARGEST_SCALE = tl.constexpr(255.0)


@triton.jit
def float8_scale(largest):
    """The scale of a head, from its largest magnitude.

    Divisions are IEEE-rounded, so that every device finds the same codes.
    """
    scale = tl.div_rn(largest, _FP8_MAX)
    return tl.minimum(tl.maximum(scale, _SMALLEST_SCALE), _LARGEST_SCALE)


@triton.jit
def float8_numbers(x, scale):
    """Values before rounding to codes: heads x features, divided by one scale for each head."""
    return tl.minimum(tl.maximum(x * tl.div_rn(1.0, scale)[:, None], -_FP8_MAX), _FP8_MAX)


@triton.jit
def _store_heads(
    x_ptr, head_stride, kv_ptr, scale_ptr, row, head, wanted, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """`row` is the cache's row of head 0; a row is one head's key or value."""
    feature = tl.arange(0, BLOCK)
    inside = wanted[:, None] & (feature < SIZE)[None, :]
    x = tl.load(x_ptr + head[:, None] * head_stride + feature[None, :], mask=inside, other=0.0)
    if scale_ptr is not None:
        x = x.to(tl.float32)
        scale = float8_scale(tl.max(tl.abs(x), axis=1))
        tl.store(scale_ptr + row + head, scale, mask=wanted)
        x = float8_numbers(x, scale)
    out = kv_ptr + (row + head[:, None]) * SIZE + feature[None, :]
    tl.store(out, x.to(kv_ptr.dtype.element_ty), mask=inside)


# Slots are a slice of a larger upload: their alignment changes and must not cause a recompilation.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_kv(
    k_ptr,
    v_ptr,
    kv_ptr,
    scale_ptr,
    slots_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    slot = tl.load(slots_ptr + token)
    wanted = (head < HEADS) & (slot >= 0)
    row = slot * (2 * HEADS)
    if tl.program_id(2) == 0:
        k_ptr += token * k_token_stride
        _store_heads(k_ptr, k_head_stride, kv_ptr, scale_ptr, row, head, wanted, SIZE, BLOCK)
    else:
        v_ptr += token * v_token_stride
        _store_heads(v_ptr, v_head_stride, kv_ptr, scale_ptr, row + HEADS, head, wanted, SIZE, BLOCK)


def _supports(k_TKE: Tensor, v_TKE: Tensor, cache: KVLayer, slots_T: Tensor) -> bool:
    return k_TKE.stride(2) == v_TKE.stride(2) == slots_T.stride(0) == 1 and cache.kv.is_contiguous()


@write_kv.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _launch(k_TKE: Tensor, v_TKE: Tensor, cache: KVLayer, slots_T: Tensor) -> None:
    tokens, heads, size = k_TKE.shape
    if not tokens:
        return
    heads_block = min(triton.next_power_of_2(heads), _HEADS)
    _write_kv[(tokens, triton.cdiv(heads, heads_block), 2)](
        k_TKE,
        v_TKE,
        cache.kv,
        cache.scale,
        slots_T,
        k_TKE.stride(0),
        k_TKE.stride(1),
        v_TKE.stride(0),
        v_TKE.stride(1),
        HEADS=heads,
        SIZE=size,
        HEADS_BLOCK=heads_block,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4,
        **launch_options(k_TKE.device),
    )
