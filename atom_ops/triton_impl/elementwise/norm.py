"""RMS norm, alone, with a residual and with a gate: one program for each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.elementwise.norm import add_rms_norm, gated_rms_norm, rms_norm
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_MOST_FEATURES = 16384


def _supports(x_TD: Tensor) -> bool:
    return x_TD.is_floating_point() and x_TD.shape[-1] <= _MOST_FEATURES


@triton.jit
def normed_row(x, weight, eps, SIZE: tl.constexpr):
    """RMS norm of a row of `SIZE` elements, in float32; the others of the block are 0."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    return wide * scale * weight.to(tl.float32)


@triton.jit
def _norm_rows(
    x_ptr, residual_ptr, weight_ptr, x_weight_ptr, out_ptr, total_ptr, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if x_weight_ptr is not None:
        x_weight = tl.load(x_weight_ptr + column, mask=inside, other=0.0)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0)
        if x_weight_ptr is not None:
            x = normed_row(x, x_weight, eps, SIZE).to(x.dtype)
        # The residual stream is the rounded sum, so the norm is of that.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row + column, x, mask=inside)
    if weight_ptr is not None:
        tl.store(out_ptr + row + column, normed_row(x, weight, eps, SIZE), mask=inside)


def norm_warps(block: int) -> int:
    """Warps of a program with a row; like the block, of the width alone, for batch invariance."""
    return min(max(block // 512, 1), 16)


def _launch(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor | None,
    eps: float,
    x_weight_D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(normed, sum); without a residual the sum is `x_TD`, without a weight both are the sum."""
    size = x_TD.shape[-1]
    x_TD = x_TD.contiguous()
    total_TD = x_TD if residual_TD is None else torch.empty_like(x_TD)
    out_TD = total_TD if weight_D is None else torch.empty_like(x_TD)
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    block = triton.next_power_of_2(size)
    if x_TD.numel():
        _norm_rows[(x_TD.numel() // size,)](
            x_TD, residual_TD, weight_D, x_weight_D, out_TD, total_TD, eps,
            SIZE=size, BLOCK=block, num_warps=norm_warps(block), **launch_options(x_TD.device),
        )  # fmt: skip
    return out_TD, total_TD


@rms_norm.provider(
    "triton", needs=NEEDS, supported=runs_on, supports=lambda x_TD, weight_D, eps: _supports(x_TD)
)
def _rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return _launch(x_TD, None, weight_D, eps)[0]


@add_rms_norm.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TD, residual_TD, weight_D, eps, x_weight_D=None: (
        _supports(x_TD) and x_TD.dtype == residual_TD.dtype
    ),
)
def _add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, eps: float, x_weight_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _launch(x_TD, residual_TD, weight_D, eps, x_weight_D)


@triton.jit
def _gated_norm_rows(
    x_ptr, gate_ptr, weight_ptr, out_ptr, eps, gate_stride, gate_head_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    gate_ptr += row // HEADS * gate_stride + row % HEADS * gate_head_stride
    x = tl.load(x_ptr + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + column, x * scale * weight * gate * tl.sigmoid(gate), mask=inside)


@gated_rms_norm.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TD, gate_TD, weight_D, eps: (
        _supports(x_TD) and x_TD.dim() <= 3 and gate_TD.stride(-1) == 1
    ),
)
def _gated_rms_norm(x_TD: Tensor, gate_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x_TD = x_TD.contiguous()
    size = x_TD.shape[-1]
    out_TD = torch.empty_like(x_TD)
    heads = x_TD.shape[1] if x_TD.dim() == 3 else 1
    head_stride = gate_TD.stride(1) if x_TD.dim() == 3 else 0
    if x_TD.numel():
        _gated_norm_rows[(x_TD.numel() // size,)](
            x_TD, gate_TD, weight_D, out_TD, eps, gate_TD.stride(0), head_stride,
            HEADS=heads, SIZE=size, BLOCK=triton.next_power_of_2(size),
            num_warps=min(max(size // 512, 1), 16), **launch_options(x_TD.device),
        )  # fmt: skip
    return out_TD
