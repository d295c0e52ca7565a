"""Head norms, RoPE and the KV cache write from a QKV projection, in one launch.

A program computes several consecutive heads of a token, of any kind:

    token of the projection   q0 q1 … | k0 k1 … | v0 v1 …      H + 2K heads
                              └ queries └──────── a slot of the cache, in its order

It holds each head as two halves, which RoPE pairs feature by feature. With a partial rotary
dimension the other features are split over both halves and get angle 0:

    head      t0 t1 | u0 u1 | r0 r1 r2 | s0 s1 s2
    halves    t0 t1 r0 r1 r2      u0 u1 s0 s1 s2
"""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.kv_cache import KVLayer
from atom_ops.ops.attention.qkv import HeadNorms, rotate_and_write_kv
from atom_ops.triton_impl.attention.kv_cache import float8_numbers, float8_scale
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

# Block size and warps do not depend on the batch, for batch invariance.
_HEADS = 8
_WARPS = 4


@triton.jit
def _normed(
    low, high, q_weight_ptr, k_weight_ptr, eps, is_query, feature, at_low, at_high, HALF: tl.constexpr
):  # fmt: skip
    """RMS norm of both halves of the heads, with the weight of queries or keys."""
    inside = feature < HALF
    q_low = tl.load(q_weight_ptr + at_low, mask=inside, other=0.0).to(tl.float32)
    q_high = tl.load(q_weight_ptr + at_high, mask=inside, other=0.0).to(tl.float32)
    k_low = tl.load(k_weight_ptr + at_low, mask=inside, other=0.0).to(tl.float32)
    k_high = tl.load(k_weight_ptr + at_high, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / (2 * HALF) + eps)[:, None]
    low = low * scale * tl.where(is_query, q_low[None, :], k_low[None, :])
    high = high * scale * tl.where(is_query, q_high[None, :], k_high[None, :])
    return low, high


# Slots are a slice of a larger upload: their alignment changes and must not cause a recompilation.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rotate_and_write_kv(
    qkv_ptr,
    q_ptr,
    kv_ptr,
    scale_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    qkv_stride,
    cos_stride,
    sin_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    feature = tl.arange(0, BLOCK)
    if PAIRS == HALF:
        at_low = feature
        at_high = feature + HALF
    else:
        at_low = tl.where(feature < PAIRS, feature, feature + PAIRS)
        at_high = tl.where(feature < PAIRS, feature + PAIRS, feature + HALF)
    inside = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (feature < HALF)[None, :]
    low_within = head[:, None] * (2 * HALF) + at_low[None, :]
    high_within = head[:, None] * (2 * HALF) + at_high[None, :]
    slot = tl.load(slots_ptr + token)
    low_in = tl.load(qkv_ptr + token * qkv_stride + low_within, mask=inside, other=0.0)
    high_in = tl.load(qkv_ptr + token * qkv_stride + high_within, mask=inside, other=0.0)
    # Both halves share cosines; the second half's sines are not negated.
    rotary = feature < PAIRS
    cos = tl.load(cos_ptr + token * cos_stride + feature, mask=rotary, other=1.0)[None, :]
    sin = tl.load(sin_ptr + token * sin_stride + PAIRS + feature, mask=rotary, other=0.0)[None, :]

    is_query = (head < Q_HEADS)[:, None]
    is_value = (head >= Q_HEADS + KV_HEADS)[:, None]
    low, high = low_in.to(tl.float32), high_in.to(tl.float32)
    if q_weight_ptr is not None:
        low, high = _normed(
            low, high, q_weight_ptr, k_weight_ptr, eps, is_query, feature, at_low, at_high, HALF
        )
    low_out = tl.where(is_value, low_in, (low * cos - high * sin).to(low_in.dtype))
    high_out = tl.where(is_value, high_in, (high * cos + low * sin).to(low_in.dtype))

    q_out = q_ptr + token * (Q_HEADS * 2 * HALF)
    tl.store(q_out + low_within, low_out, mask=inside & is_query)
    tl.store(q_out + high_within, high_out, mask=inside & is_query)
    row = slot * (2 * KV_HEADS) + head - Q_HEADS
    stored = inside & (head >= Q_HEADS)[:, None] & (slot >= 0)
    if scale_ptr is not None:
        low_out, high_out = low_out.to(tl.float32), high_out.to(tl.float32)
        scale = float8_scale(tl.max(tl.maximum(tl.abs(low_out), tl.abs(high_out)), axis=1))
        held = (head >= Q_HEADS) & (head < Q_HEADS + 2 * KV_HEADS) & (slot >= 0)
        tl.store(scale_ptr + row, scale, mask=held)
        low_out, high_out = float8_numbers(low_out, scale), float8_numbers(high_out, scale)
    kv_out = kv_ptr + row[:, None] * (2 * HALF)
    tl.store(kv_out + at_low[None, :], low_out.to(kv_ptr.dtype.element_ty), mask=stored)
    tl.store(kv_out + at_high[None, :], high_out.to(kv_ptr.dtype.element_ty), mask=stored)


def _supports(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: KVLayer,
    slots_T: Tensor,
    norms: HeadNorms | None = None,
) -> bool:
    return (
        cos_T1R.shape[-1] <= cache.kv.shape[-1]
        and qkv_TO.stride(1) == cos_T1R.stride(2) == sin_T1R.stride(2) == slots_T.stride(0) == 1
        and cache.kv.is_contiguous()
    )


@rotate_and_write_kv.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _launch(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: KVLayer,
    slots_T: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    kv_heads, size = cache.kv.shape[3:]
    tokens = qkv_TO.shape[0]
    all_heads = qkv_TO.shape[1] // size
    q_THE = qkv_TO.new_empty((tokens, all_heads - 2 * kv_heads, size))
    if not tokens:
        return q_THE
    _rotate_and_write_kv[(tokens, triton.cdiv(all_heads, _HEADS))](
        qkv_TO,
        q_THE,
        cache.kv,
        cache.scale,
        slots_T,
        cos_T1R,
        sin_T1R,
        norms.q_weight_E if norms else None,
        norms.k_weight_E if norms else None,
        norms.eps if norms else 0.0,
        qkv_TO.stride(0),
        cos_T1R.stride(0),
        sin_T1R.stride(0),
        Q_HEADS=all_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=size // 2,
        PAIRS=cos_T1R.shape[-1] // 2,
        HEADS_BLOCK=_HEADS,
        BLOCK=triton.next_power_of_2(size // 2),
        num_warps=_WARPS,
        **launch_options(qkv_TO.device),
    )
    return q_THE
