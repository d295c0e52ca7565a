"""The per-head GEMMs of latent attention: W_UK absorbed into queries, W_UV applied to the output.

queries   T x N  by  W_UK[h] N x C      ─► the first C features of an absorbed query; one more
                                          program applies RoPE to the others
values    T x C  by  W_UV[h]ᵀ C x V     ─► the head's output
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.latent.latent_attention import absorb_queries, expand_values
from atom_ops.ops.linear.linear import BATCH_INVARIANT
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait, prefetch_rows
from atom_ops.triton_impl.hardware.shared_memory import fitting_block, fitting_stages, product_bytes
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, runs_on

_OUTPUTS = 128
_INPUTS = 128
_WARPS = 4
_SAME_FOR_ALL = 32
_LEAST_OUTPUTS = 32
_WANTED_PROGRAMS = 120


@triton.jit
def _rope_heads(
    q, out, cos, sin, token_T, tokens, q_stride, out_stride,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`q` and `out` point to the head's first feature with RoPE."""
    feature_R = tl.arange(0, BLOCK_R)
    if INTERLEAVED:
        other_R = feature_R ^ 1
    else:
        other_R = tl.where(feature_R < ROPE // 2, feature_R + ROPE // 2, feature_R - ROPE // 2)
    inside_TR = (token_T < tokens)[:, None] & (feature_R < ROPE)[None, :]
    rows_T1 = q + token_T.to(tl.int64)[:, None] * q_stride
    x_TR = tl.load(rows_T1 + feature_R[None, :], mask=inside_TR, other=0.0).to(tl.float32)
    exchanged_TR = tl.load(rows_T1 + other_R[None, :], mask=inside_TR, other=0.0).to(tl.float32)
    at_TR = token_T[:, None] * ROPE + feature_R[None, :]
    cos_TR = tl.load(cos + at_TR, mask=inside_TR, other=0.0)
    sin_TR = tl.load(sin + at_TR, mask=inside_TR, other=0.0)
    out_TR = out + token_T.to(tl.int64)[:, None] * out_stride + feature_R[None, :]
    tl.store(out_TR, (x_TR * cos_TR + exchanged_TR * sin_TR).to(out.dtype.element_ty), mask=inside_TR)


@triton.jit(do_not_specialize=["tokens"])
def _absorb(
    q, weight, cos, sin, out, tokens,
    q_stride, q_head_stride, weight_head_stride, weight_stride, out_stride,
    NOPE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of C and one for R; H; tiles of tokens)."""
    pdl_launch_dependents(PDL)
    block, head = tl.program_id(0), tl.program_id(1)
    token_T = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    q += head * q_head_stride
    out += head * (LATENT + ROPE)
    if block == tl.num_programs(0) - 1:
        pdl_wait(PDL)
        _rope_heads(
            q + NOPE, out + LATENT, cos, sin, token_T, tokens, q_stride, out_stride,
            ROPE, INTERLEAVED, BLOCK_R,
        )  # fmt: skip
    else:
        feature_N = tl.arange(0, BLOCK_N)
        latent_C = block * BLOCK_C + tl.arange(0, BLOCK_C)
        weight_at_NC = feature_N[:, None] * weight_stride + latent_C[None, :]
        inside_NC = (feature_N < NOPE)[:, None] & (latent_C < LATENT)[None, :]
        weight += head.to(tl.int64) * weight_head_stride
        weight_NC = tl.load(weight + weight_at_NC, mask=inside_NC, other=0.0)
        pdl_wait(PDL)
        inside_TN = (token_T < tokens)[:, None] & (feature_N < NOPE)[None, :]
        q_at_TN = token_T.to(tl.int64)[:, None] * q_stride + feature_N[None, :]
        q_TN = tl.load(q + q_at_TN, mask=inside_TN, other=0.0)
        out_TC = tl.dot(q_TN, weight_NC, input_precision="ieee")
        out_at_TC = token_T.to(tl.int64)[:, None] * out_stride + latent_C[None, :]
        inside_TC = (token_T < tokens)[:, None] & (latent_C < LATENT)[None, :]
        tl.store(out + out_at_TC, out_TC.to(out.dtype.element_ty), mask=inside_TC)


@triton.jit(do_not_specialize=["tokens"])
def _expand(
    x, weight, out, tokens, x_stride, x_head_stride, weight_head_stride, weight_stride, out_stride,
    LATENT: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, FETCHED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of V, H, tiles of tokens). FETCHED: the weight is fetched into the L2 cache early."""
    pdl_launch_dependents(PDL)
    head = tl.program_id(1)
    token_T = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    first_value = tl.program_id(0) * BLOCK_V
    value_V = first_value + tl.arange(0, BLOCK_V)
    x += head * x_head_stride
    weight += head.to(tl.int64) * weight_head_stride
    if FETCHED:
        size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        rows = tl.minimum(VALUE - first_value, BLOCK_V)
        prefetch_rows(weight + first_value * weight_stride, rows, weight_stride * size, LATENT * size, PDL)
    pdl_wait(PDL)
    total_TV = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for first in range(0, LATENT, BLOCK_C):
        latent_C = first + tl.arange(0, BLOCK_C)
        inside_TC = (token_T < tokens)[:, None] & (latent_C < LATENT)[None, :]
        inside_VC = (value_V < VALUE)[:, None] & (latent_C < LATENT)[None, :]
        x_at_TC = token_T.to(tl.int64)[:, None] * x_stride + latent_C[None, :]
        x_TC = tl.load(x + x_at_TC, mask=inside_TC, other=0.0)
        weight_VC = tl.load(
            weight + value_V[:, None] * weight_stride + latent_C[None, :], mask=inside_VC, other=0.0
        )
        total_TV = tl.dot(x_TC, tl.trans(weight_VC), total_TV, input_precision="ieee")
    out_at_TV = token_T.to(tl.int64)[:, None] * out_stride + head * VALUE + value_V[None, :]
    inside_TV = (token_T < tokens)[:, None] & (value_V < VALUE)[None, :]
    tl.store(out + out_at_TV, total_TV.to(out.dtype.element_ty), mask=inside_TV)


def _block(size: int, most: int) -> int:
    """A block size for tl.dot: a power of two, at least 16."""
    return min(max(triton.next_power_of_2(size), 16), most)


def _tile(tokens: int) -> int:
    if tokens <= 16:
        return 16
    return 32 if tokens <= 64 else 64


def _outputs(size: int, programs: int) -> int:
    """Outputs of a program: few enough to occupy most SMs, where as many `programs` have each output.

    The bits of an output do not depend on it.
    """
    block = _block(size, _OUTPUTS)
    while block > _LEAST_OUTPUTS and programs * triton.cdiv(size, block) < _WANTED_PROGRAMS:
        block //= 2
    return block


def _aligned(weight_HVC: Tensor) -> bool:
    """Whether all rows begin and end at multiples of 16 bytes, as `prefetch_rows` needs."""
    numbers = (*weight_HVC.stride()[:2], weight_HVC.shape[2], weight_HVC.storage_offset())
    return all(number * weight_HVC.element_size() % 16 == 0 for number in numbers)


def _last_contiguous(*tensors: Tensor) -> bool:
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def _has_dot(x: Tensor) -> bool:
    """The interpreter's bfloat16 tl.dot is wrong."""
    return not (INTERPRETED and x.dtype == torch.bfloat16)


def _supports_absorb(
    q_THE: Tensor, key_HNC: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool = False
) -> bool:
    fits = key_HNC.shape[1] <= 256 and cos_T1R.is_contiguous() and sin_T1R.is_contiguous()
    return fits and _last_contiguous(q_THE, key_HNC) and _has_dot(q_THE)


def _launch_absorb(
    q_THE: Tensor, key_HNC: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool, tile: int
) -> Tensor:
    tokens, heads, width = q_THE.shape
    _, nope, latent = key_HNC.shape
    rope = width - nope
    out_THK = q_THE.new_empty(tokens, heads, latent + rope)
    block = _outputs(latent, heads * triton.cdiv(tokens, tile))
    inputs = _block(nope, 256)
    block = fitting_block(block, lambda block: product_bytes(tile, block, inputs, q_THE.dtype), q_THE.device)
    if tokens:
        _absorb[(triton.cdiv(latent, block) + 1, heads, triton.cdiv(tokens, tile))](
            q_THE, key_HNC, cos_T1R, sin_T1R, out_THK, tokens,
            *q_THE.stride()[:2], *key_HNC.stride()[:2], out_THK.stride(0),
            NOPE=nope, LATENT=latent, ROPE=rope, INTERLEAVED=interleaved,
            BLOCK_T=tile, BLOCK_N=inputs, BLOCK_C=block, BLOCK_R=triton.next_power_of_2(rope),
            num_warps=_WARPS, **launch_options(q_THE.device),
        )  # fmt: skip
    return out_THK


@absorb_queries.provider(
    "triton", needs=NEEDS, supported=runs_on, supports=_supports_absorb, batch_invariant=False
)
def _absorb_queries(
    q_THE: Tensor, key_HNC: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool = False
) -> Tensor:
    return _launch_absorb(q_THE, key_HNC, cos_T1R, sin_T1R, interleaved, _tile(len(q_THE)))


@absorb_queries.provider(BATCH_INVARIANT, needs=NEEDS, supported=runs_on, supports=_supports_absorb)
def _absorb_batch_invariant(
    q_THE: Tensor, key_HNC: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool = False
) -> Tensor:
    return _launch_absorb(q_THE, key_HNC, cos_T1R, sin_T1R, interleaved, _SAME_FOR_ALL)


def _supports_expand(latent_THC: Tensor, value_HVC: Tensor) -> bool:
    return _last_contiguous(latent_THC, value_HVC) and _has_dot(latent_THC)


def _launch_expand(latent_THC: Tensor, value_HVC: Tensor, tile: int) -> Tensor:
    tokens, heads, latent = latent_THC.shape
    value = value_HVC.shape[1]
    out_THV = latent_THC.new_empty(tokens, heads, value)
    block = _outputs(value, heads * triton.cdiv(tokens, tile))
    device, size = latent_THC.device, latent_THC.element_size()
    # By the most outputs: how inputs are added up may not depend on the number of tokens.
    most = tile + _block(value, _OUTPUTS)
    inputs = fitting_block(_block(latent, _INPUTS), lambda block: most * block * size, device)
    stages = 4 if torch.version.hip is None else 2
    stages = fitting_stages(stages, (tile + block) * inputs * size, device)
    if tokens:
        _expand[(triton.cdiv(value, block), heads, triton.cdiv(tokens, tile))](
            latent_THC, value_HVC, out_THV, tokens,
            *latent_THC.stride()[:2], *value_HVC.stride()[:2], out_THV.stride(0),
            LATENT=latent, VALUE=value, BLOCK_T=tile, BLOCK_C=inputs, BLOCK_V=block,
            FETCHED=_aligned(value_HVC), num_warps=_WARPS, num_stages=stages,
            **launch_options(device),
        )  # fmt: skip
    return out_THV


@expand_values.provider(
    "triton", needs=NEEDS, supported=runs_on, supports=_supports_expand, batch_invariant=False
)
def _expand_values(latent_THC: Tensor, value_HVC: Tensor) -> Tensor:
    return _launch_expand(latent_THC, value_HVC, _tile(len(latent_THC)))


@expand_values.provider(BATCH_INVARIANT, needs=NEEDS, supported=runs_on, supports=_supports_expand)
def _expand_batch_invariant(latent_THC: Tensor, value_HVC: Tensor) -> Tensor:
    return _launch_expand(latent_THC, value_HVC, _SAME_FOR_ALL)
