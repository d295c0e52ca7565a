"""RoPE: one program for a token's cosines and sines, or for some of its heads."""

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.rotary import rotary, rotation_at
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_HEADS = 8


# Positions may be a slice of a larger upload: their alignment changes and must not cause a
# recompilation.
@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _gather_rotation(
    table_ptr, positions_ptr, cos_ptr, sin_ptr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    first = feature
    second = feature + HALF
    if INTERLEAVED:
        first = 2 * feature
        second = 2 * feature + 1
    inside = feature < HALF
    row = table_ptr + tl.load(positions_ptr + token) * (2 * HALF) + feature
    cos = tl.load(row, mask=inside, other=0.0)
    sin = tl.load(row + HALF, mask=inside, other=0.0)
    out = token * (2 * HALF)
    tl.store(cos_ptr + out + first, cos, mask=inside)
    tl.store(cos_ptr + out + second, cos, mask=inside)
    tl.store(sin_ptr + out + first, -sin, mask=inside)
    tl.store(sin_ptr + out + second, sin, mask=inside)


@rotation_at.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda cos_sin_PR, positions_T, interleaved=False: (
        cos_sin_PR.is_contiguous() and positions_T.is_contiguous()
    ),
)
def _rotation_at(cos_sin_PR: Tensor, positions_T: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    tokens = len(positions_T)
    size = cos_sin_PR.shape[1]
    cos_T1R, sin_T1R = cos_sin_PR.new_empty((2, tokens, 1, size)).unbind()
    if tokens:
        block = triton.next_power_of_2(size // 2)
        _gather_rotation[(tokens,)](
            cos_sin_PR, positions_T, cos_T1R, sin_T1R,
            HALF=size // 2, INTERLEAVED=interleaved, BLOCK=block, num_warps=1,
            **launch_options(positions_T.device),
        )  # fmt: skip
    return cos_T1R, sin_T1R


@triton.jit
def _rope(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    feature = tl.arange(0, BLOCK)
    if INTERLEAVED:
        other = feature ^ 1
    else:
        other = tl.where(feature < ROTARY_DIM // 2, feature + ROTARY_DIM // 2, feature - ROTARY_DIM // 2)
    in_rotary = feature < ROTARY_DIM
    inside = (head < HEADS)[:, None] & (feature < SIZE)[None, :]
    rows = x_ptr + token * token_stride + head[:, None] * head_stride
    x = tl.load(rows + feature[None, :], mask=inside, other=0.0).to(tl.float32)
    exchanged = tl.load(rows + other[None, :], mask=inside & in_rotary[None, :], other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * cos_stride + feature, mask=in_rotary, other=1.0)
    sin = tl.load(sin_ptr + token * sin_stride + feature, mask=in_rotary, other=0.0)
    out = out_ptr + (token * HEADS + head[:, None]) * SIZE + feature[None, :]
    tl.store(out, x * cos[None, :] + exchanged * sin[None, :], mask=inside)


def _supports(x_THE: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool = False) -> bool:
    return x_THE.dim() == 3 and x_THE.stride(2) == cos_T1R.stride(2) == sin_T1R.stride(2) == 1


@rotary.provider("triton", needs=NEEDS, supported=runs_on, supports=_supports)
def _rotary(x_THE: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool = False) -> Tensor:
    tokens, heads, size = x_THE.shape
    out_THE = x_THE.new_empty(x_THE.shape)
    if out_THE.numel():
        heads_block = min(triton.next_power_of_2(heads), _HEADS)
        _rope[(tokens, triton.cdiv(heads, heads_block))](
            x_THE,
            out_THE,
            cos_T1R,
            sin_T1R,
            x_THE.stride(0),
            x_THE.stride(1),
            cos_T1R.stride(0),
            sin_T1R.stride(0),
            HEADS=heads,
            SIZE=size,
            ROTARY_DIM=cos_T1R.shape[-1],
            INTERLEAVED=interleaved,
            HEADS_BLOCK=heads_block,
            BLOCK=triton.next_power_of_2(size),
            num_warps=4,
            **launch_options(x_THE.device),
        )
    return out_THE
