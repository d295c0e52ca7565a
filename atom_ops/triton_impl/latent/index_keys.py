"""Norm, RoPE and cache write of index keys: one program for a token."""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.latent.index_keys import IndexKeys, IndexNorm, write_index_keys
from atom_ops.triton_impl.attention.kv_cache import float8_numbers, float8_scale
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_MOST_FEATURES = 1024


@triton.jit
def _affine(x_ptr, weight_ptr, bias_ptr, feature, inside, mean, scale):
    """Normalised values, rounded to x's dtype, as float32."""
    x = tl.load(x_ptr + feature, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    return ((x.to(tl.float32) - mean) * scale * weight + bias).to(x.dtype).to(tl.float32)


# Slots are a slice of a larger upload: their alignment changes and must not cause a recompilation.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_index_keys(
    x_ptr, keys_ptr, scale_ptr, slots_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr, eps,
    x_stride, cos_stride, sin_stride,
    SIZE: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    x_ptr += token * x_stride
    feature = tl.arange(0, BLOCK)[None, :]
    inside = feature < SIZE
    wide = tl.load(x_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    mean = (tl.sum(wide, axis=1) / SIZE)[:, None]
    apart = tl.where(inside, wide - mean, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, axis=1) / SIZE + eps)[:, None]

    key = _affine(x_ptr, weight_ptr, bias_ptr, feature, inside, mean, scale)
    if INTERLEAVED:
        other = feature ^ 1
    else:
        other = tl.where(feature < ROPE // 2, feature + ROPE // 2, feature - ROPE // 2)
    rotary = feature < ROPE
    exchanged = _affine(x_ptr, weight_ptr, bias_ptr, other, rotary, mean, scale)
    cos = tl.load(cos_ptr + token * cos_stride + feature, mask=rotary, other=1.0)
    sin = tl.load(sin_ptr + token * sin_stride + feature, mask=rotary, other=0.0)
    key = (key * cos + exchanged * sin).to(x_ptr.dtype.element_ty)

    if scale_ptr is not None:
        key = key.to(tl.float32)
        largest = float8_scale(tl.max(tl.abs(key), axis=1))
        tl.store(scale_ptr + slot + tl.arange(0, 1), largest, mask=tl.arange(0, 1) + slot >= 0)
        key = float8_numbers(key, largest)
    stored = inside & (slot >= 0)
    tl.store(keys_ptr + slot * SIZE + feature, key.to(keys_ptr.dtype.element_ty), mask=stored)


def _supports(
    x_TI: Tensor,
    norm: IndexNorm,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: IndexKeys,
    slots_T: Tensor,
    interleaved: bool = False,
) -> bool:
    return (
        x_TI.shape[1] <= _MOST_FEATURES
        and x_TI.stride(1) == cos_T1R.stride(2) == sin_T1R.stride(2) == slots_T.stride(0) == 1
        and cache.keys.is_contiguous()
    )


@write_index_keys.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _write(
    x_TI: Tensor,
    norm: IndexNorm,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: IndexKeys,
    slots_T: Tensor,
    interleaved: bool = False,
) -> None:
    if not len(x_TI):
        return
    width = x_TI.shape[1]
    _write_index_keys[(len(x_TI),)](
        x_TI, cache.keys, cache.scale, slots_T, cos_T1R, sin_T1R, norm.weight_I, norm.bias_I, norm.eps,
        x_TI.stride(0), cos_T1R.stride(0), sin_T1R.stride(0),
        SIZE=width, ROPE=cos_T1R.shape[2], INTERLEAVED=interleaved,
        BLOCK=triton.next_power_of_2(width), num_warps=1 if width <= 256 else 4,
        **launch_options(x_TI.device),
    )  # fmt: skip
