"""Gated activations: one program for a block of a row."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.elementwise.activation import (
    clamped_swiglu,
    gelu_tanh_and_mul,
    sigmoid_and_mul,
    silu_and_mul,
)
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_BLOCK = 1024


@triton.jit
def _gate_and_mul(
    x_ptr, out_ptr, GELU: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_ptr = x_ptr + row * (2 * SIZE) + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(x)) / 2 is the sigmoid of 2x.
    inner = 1.5957691216 * gate * (1.0 + 0.044715 * gate * gate) if GELU else gate
    tl.store(out_ptr + row * SIZE + column, gate * tl.sigmoid(inner) * up, mask=inside)


@silu_and_mul.provider(
    "triton", needs=NEEDS, supported=runs_on, supports=lambda x_T2F: x_T2F.is_floating_point()
)
def _silu_and_mul(x_T2F: Tensor) -> Tensor:
    return _launch(_gate_and_mul, x_T2F, GELU=False)


@gelu_tanh_and_mul.provider(
    "triton", needs=NEEDS, supported=runs_on, supports=lambda x_T2F: x_T2F.is_floating_point()
)
def _gelu_tanh_and_mul(x_T2F: Tensor) -> Tensor:
    return _launch(_gate_and_mul, x_T2F, GELU=True)


def _launch(kernel: Any, x_T2F: Tensor, *scalars: float, **constants: bool) -> Tensor:
    """Run a kernel on rows of gate and up; returns its output, [..., F]."""
    x_T2F = x_T2F.contiguous()
    size = x_T2F.shape[-1] // 2
    out_TF = x_T2F.new_empty((*x_T2F.shape[:-1], size))
    if out_TF.numel():
        block = min(triton.next_power_of_2(size), _BLOCK)
        kernel[(out_TF.numel() // size, triton.cdiv(size, block))](
            x_T2F, out_TF, *scalars,
            SIZE=size, BLOCK=block, num_warps=4, **constants, **launch_options(x_T2F.device),
        )  # fmt: skip
    return out_TF


@triton.jit
def _clamped_swiglu(
    x_ptr, out_ptr, limit, alpha, shift, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_ptr = x_ptr + row * (2 * SIZE) + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + shift
    tl.store(out_ptr + row * SIZE + column, up * (gate * tl.sigmoid(alpha * gate)), mask=inside)


@clamped_swiglu.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_T2F, limit, alpha, shift=1.0: x_T2F.is_floating_point(),
)
def _launch_clamped(x_T2F: Tensor, limit: float, alpha: float, shift: float = 1.0) -> Tensor:
    return _launch(_clamped_swiglu, x_T2F, limit, alpha, shift)


@triton.jit
def _sigmoid_and_mul(
    x_ptr, gate_ptr, out_ptr, gate_stride,
    GATES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    of_column = column if GATES > 1 else column * 0
    gate = tl.load(gate_ptr + row * gate_stride + of_column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, x * tl.sigmoid(gate), mask=inside)


@sigmoid_and_mul.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda x_TF, gate_TG: x_TF.is_floating_point() and gate_TG.stride(1) == 1,
)
def _launch_sigmoid(x_TF: Tensor, gate_TG: Tensor) -> Tensor:
    x_TF = x_TF.contiguous()
    rows, size = x_TF.shape
    out_TF = x_TF.new_empty(x_TF.shape)
    if out_TF.numel():
        block = min(triton.next_power_of_2(size), _BLOCK)
        _sigmoid_and_mul[(rows, triton.cdiv(size, block))](
            x_TF, gate_TG, out_TF, gate_TG.stride(0),
            GATES=gate_TG.shape[1], SIZE=size, BLOCK=block, num_warps=4, **launch_options(x_TF.device),
        )  # fmt: skip
    return out_TF
