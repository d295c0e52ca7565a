"""Norms of latents, RoPE of keys and the cache write, in one launch.

token of the projection   queries' latent | keys' latent | key      Q + C + R features
                          └── program 1    └── program 0 ───┴──► a row of the cache
"""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.latent.latent_cache import LatentLayer, LatentNorms, norm_and_write_latents, write_latent
from atom_ops.triton_impl.attention.kv_cache import float8_numbers, float8_scale
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_MOST_FEATURES = 16384


@triton.jit
def _normed(x_ptr, weight_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[1, BLOCK] in x's dtype."""
    feature = tl.arange(0, BLOCK)[None, :]
    inside = feature < SIZE
    x = tl.load(x_ptr + feature, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    return (wide * scale[:, None] * weight).to(x.dtype)


@triton.jit
def _rope(x_ptr, cos_ptr, sin_ptr, SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """[1, BLOCK] in x's dtype."""
    feature = tl.arange(0, BLOCK)[None, :]
    inside = feature < SIZE
    if INTERLEAVED:
        other = feature ^ 1
    else:
        other = tl.where(feature < SIZE // 2, feature + SIZE // 2, feature - SIZE // 2)
    x = tl.load(x_ptr + feature, mask=inside, other=0.0)
    exchanged = tl.load(x_ptr + other, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + feature, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + feature, mask=inside, other=0.0)
    return (x.to(tl.float32) * cos + exchanged * sin).to(x.dtype)


@triton.jit
def _write_row(
    x_ptr, rows_ptr, scale_ptr, slot, cos_ptr, sin_ptr, weight_ptr, eps,
    LATENT: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    LATENT_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
):  # fmt: skip
    latent = _normed(x_ptr, weight_ptr, eps, LATENT, LATENT_BLOCK)
    key = _rope(x_ptr + LATENT, cos_ptr, sin_ptr, ROPE, INTERLEAVED, ROPE_BLOCK)
    if scale_ptr is not None:
        latent, key = latent.to(tl.float32), key.to(tl.float32)
        scale = float8_scale(tl.maximum(tl.max(tl.abs(latent), axis=1), tl.max(tl.abs(key), axis=1)))
        tl.store(scale_ptr + slot + tl.arange(0, 1), scale, mask=slot + tl.arange(0, 1) >= 0)
        latent, key = float8_numbers(latent, scale), float8_numbers(key, scale)
    row = rows_ptr + slot * (LATENT + ROPE)
    of_latent, of_key = tl.arange(0, LATENT_BLOCK)[None, :], tl.arange(0, ROPE_BLOCK)[None, :]
    latent_kept = (of_latent < LATENT) & (slot >= 0)
    key_kept = (of_key < ROPE) & (slot >= 0)
    tl.store(row + of_latent, latent.to(rows_ptr.dtype.element_ty), mask=latent_kept)
    tl.store(row + LATENT + of_key, key.to(rows_ptr.dtype.element_ty), mask=key_kept)


# Slots are a slice of a larger upload: their alignment changes and must not cause a recompilation.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_latents(
    x_ptr, q_ptr, rows_ptr, scale_ptr, slots_ptr, cos_ptr, sin_ptr, q_weight_ptr, weight_ptr, eps,
    x_stride, cos_stride, sin_stride,
    QUERY: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, LATENT_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, 2), or (T, 1) where queries have no latent."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_stride
    if tl.program_id(1) == 0:
        slot = tl.load(slots_ptr + token)
        if RANKS > 1:  # the slot on this rank, of the one that counts all ranks
            slot = tl.where((slot >= 0) & (slot % RANKS == RANK), slot // RANKS, -1)
        _write_row(
            x_ptr + QUERY, rows_ptr, scale_ptr, slot, cos_ptr + token * cos_stride,
            sin_ptr + token * sin_stride, weight_ptr, eps, LATENT, ROPE, INTERLEAVED,
            LATENT_BLOCK, ROPE_BLOCK,
        )  # fmt: skip
    # Nested, because only the outer condition is known at compile time.
    if q_ptr is not None:  # noqa: SIM102
        if tl.program_id(1) == 1:
            q = _normed(x_ptr, q_weight_ptr, eps, QUERY, QUERY_BLOCK)
            of_query = tl.arange(0, QUERY_BLOCK)[None, :]
            tl.store(q_ptr + token * QUERY + of_query, q, mask=of_query < QUERY)


def _fit(x_TN: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, cache: LatentLayer, slots_T: Tensor) -> bool:
    return (
        cos_T1R.shape[2] == cache.rows.shape[2] - cache.latent_width
        and x_TN.shape[1] <= _MOST_FEATURES
        and x_TN.stride(1) == cos_T1R.stride(2) == sin_T1R.stride(2) == slots_T.stride(0) == 1
        and cache.rows.is_contiguous()
        and not cache.shared_scale
    )


def _launch(
    x_TN: Tensor,
    q_TQ: Tensor | None,
    norms: LatentNorms,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: LatentLayer,
    slots_T: Tensor,
    interleaved: bool,
) -> None:
    query = 0 if q_TQ is None else q_TQ.shape[1]
    latent = cache.latent_width
    rope = cache.rows.shape[2] - cache.latent_width
    if not len(x_TN):
        return
    _write_latents[(len(x_TN), 2 if query else 1)](
        x_TN, q_TQ, cache.rows, cache.scale, slots_T, cos_T1R, sin_T1R,
        norms.q_weight_Q, norms.kv_weight_C, norms.eps,
        x_TN.stride(0), cos_T1R.stride(0), sin_T1R.stride(0),
        QUERY=query, LATENT=latent, ROPE=rope, INTERLEAVED=interleaved,
        QUERY_BLOCK=triton.next_power_of_2(max(query, 1)), LATENT_BLOCK=triton.next_power_of_2(latent),
        ROPE_BLOCK=triton.next_power_of_2(rope), RANK=cache.shard.rank, RANKS=cache.shard.ranks,
        num_warps=4, **launch_options(x_TN.device),
    )  # fmt: skip


@write_latent.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda latents_TK, weight_C, eps, cos_T1R, sin_T1R, cache, slots_T, interleaved=False: _fit(
        latents_TK, cos_T1R, sin_T1R, cache, slots_T
    ),
)
def _write_latent(
    latents_TK: Tensor,
    weight_C: Tensor,
    eps: float,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: LatentLayer,
    slots_T: Tensor,
    interleaved: bool = False,
) -> None:
    norms = LatentNorms(weight_C, weight_C, eps)  # the first is unused
    _launch(latents_TK, None, norms, cos_T1R, sin_T1R, cache, slots_T, interleaved)


@norm_and_write_latents.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda latents_TN, norms, cos_T1R, sin_T1R, cache, slots_T, interleaved=False: _fit(
        latents_TN, cos_T1R, sin_T1R, cache, slots_T
    ),
)
def _norm_and_write_latents(
    latents_TN: Tensor,
    norms: LatentNorms,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: LatentLayer,
    slots_T: Tensor,
    interleaved: bool = False,
) -> Tensor:
    q_TQ = latents_TN.new_empty(len(latents_TN), len(norms.q_weight_Q))
    _launch(latents_TN, q_TQ, norms, cos_T1R, sin_T1R, cache, slots_T, interleaved)
    return q_TQ
