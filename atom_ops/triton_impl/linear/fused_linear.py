"""GEMV for one token fused with the norm or the activation before it.

Every program computes the whole input vector, which is in the L2 cache, while its weights are being
loaded; it rounds where the separate kernels do. Only program 0 writes the residual sum.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.linear.fused_linear import add_norm_linear, silu_and_mul_linear
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, runs_on
from atom_ops.triton_impl.linear.linear import multiply_rows, weight_tile
from atom_ops.triton_impl.linear.split_k import store_outputs
from atom_ops.triton_impl.plans.linear_plans import FusedPlan
from atom_ops.triton_impl.plans.shipped import shipped_on
from atom_ops.triton_impl.quantized import quantized_linear
from atom_ops.triton_impl.quantized.quantized_call import Packed, QuantizedCall
from atom_ops.triton_impl.quantized.quantized_plans import QuantizedPlan
from atom_ops.weights import Weight

_INTERPRETED = FusedPlan(rows=8, columns=64, warps=4, tiles=2)


@triton.jit
def _silu_chunk(x, column_C, INPUTS: tl.constexpr, dtype: tl.constexpr):
    valid_C = column_C < INPUTS
    gate_C = tl.load(x + column_C, mask=valid_C, other=0.0).to(tl.float32)
    up_C = tl.load(x + INPUTS + column_C, mask=valid_C, other=0.0).to(tl.float32)
    return (gate_C * tl.sigmoid(gate_C) * up_C).to(dtype).to(tl.float32)[None, :]


@triton.jit
def _silu_and_mul_linear(
    x, weight, bias, out, outputs,
    INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies ROWS rows, COLUMNS columns at a time, and loads one tile ahead."""
    column_C = tl.arange(0, COLUMNS)
    output_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = output_R < outputs
    weight_RC = weight + output_R.to(tl.int64)[:, None] * INPUTS + column_C[None, :]
    total_RC = tl.zeros((ROWS, COLUMNS), tl.float32)
    tile_RC = weight_tile(weight_RC, inside_R, column_C < INPUTS, EVEN)
    pdl_wait(PDL)
    for ahead in tl.range(COLUMNS, INPUTS, COLUMNS, num_stages=1):
        next_RC = weight_tile(weight_RC + ahead, inside_R, column_C < INPUTS - ahead, EVEN)
        part_C = _silu_chunk(x, ahead - COLUMNS + column_C, INPUTS, x.dtype.element_ty)
        total_RC += tile_RC.to(tl.float32) * part_C
        tile_RC = next_RC
    pdl_launch_dependents(PDL)
    LAST: tl.constexpr = (INPUTS - 1) // COLUMNS * COLUMNS
    total_RC += tile_RC.to(tl.float32) * _silu_chunk(x, LAST + column_C, INPUTS, x.dtype.element_ty)
    store_outputs(tl.sum(total_RC, 1), bias, out, output_R, output_R, inside_R, HAS_BIAS)


@cache
def _plans(table: str, device: torch.device) -> dict[tuple[int, int], FusedPlan]:
    shipped = shipped_on(device)
    return {"norm": shipped.norm_linear, "silu": shipped.silu_linear}[table]


def _plan(table: str, x: Tensor, weight: Tensor) -> FusedPlan | None:
    """None if separate kernels are faster or the shape was not measured."""
    if len(x) != 1 or not x.is_contiguous() or x.dtype != weight.dtype or not x.is_floating_point():
        return None
    if INTERPRETED:
        return _INTERPRETED
    return _plans(table, weight.device).get((weight.shape[0], weight.shape[1]))


def _plan_with_norm(
    x_TD: Tensor, residual_TD: Tensor | None, norm_weight_D: Tensor, weight: Weight
) -> FusedPlan | QuantizedPlan | None:
    """How a norm and a linear layer run in one kernel; None: they do not."""
    if residual_TD is not None and residual_TD.dtype != x_TD.dtype:
        return None
    if not isinstance(weight, Tensor):
        return quantized_linear.plan_with_norm(x_TD, weight)
    return _plan("norm", x_TD, weight) if x_TD.dtype == norm_weight_D.dtype else None


def _plan_with_gate(x_T2F: Tensor, weight: Weight) -> FusedPlan | QuantizedPlan | None:
    """How an activation and a linear layer run in one kernel; None: they do not."""
    if not isinstance(weight, Tensor):
        return quantized_linear.plan_with_gate(x_T2F, weight)
    return _plan("silu", x_T2F, weight)


@add_norm_linear.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    plan=lambda x_TD, residual_TD, norm_weight_D, eps, weight, bias=None: _plan_with_norm(
        x_TD, residual_TD, norm_weight_D, weight
    ),
    batch_invariant=False,
    quantizes_activations=True,
)
def _launch_norm(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_weight_D: Tensor,
    eps: float,
    weight: Tensor | Packed,
    bias: Tensor | None = None,
    plan: Any = None,
) -> tuple[Tensor, Tensor]:
    """`plan`: what `_plan_with_norm` returned."""
    plan = plan or _plan_with_norm(x_TD, residual_TD, norm_weight_D, weight)
    if not isinstance(weight, Tensor):
        return plan.multiply(
            QuantizedCall(
                x_TD, weight, bias, x_TD.dtype,
                residual_TD=residual_TD, norm_weight_D=norm_weight_D, eps=eps,
            )
        )  # fmt: skip
    out_TO = x_TD.new_empty(1, len(weight))
    total_TD = x_TD if residual_TD is None else torch.empty_like(x_TD)
    multiply_rows(plan, x_TD, residual_TD, norm_weight_D, weight, bias, (out_TO, total_TD), eps)
    return out_TO, total_TD


@silu_and_mul_linear.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    plan=lambda x_T2F, weight, bias=None: _plan_with_gate(x_T2F, weight),
    batch_invariant=False,
    quantizes_activations=True,
)
def _launch_silu(
    x_T2F: Tensor,
    weight: Tensor | Packed,
    bias: Tensor | None = None,
    plan: Any = None,
) -> Tensor:
    """`plan`: what `_plan_with_gate` returned."""
    plan = plan or _plan_with_gate(x_T2F, weight)
    if not isinstance(weight, Tensor):
        return plan.multiply(QuantizedCall(x_T2F, weight, bias, x_T2F.dtype, gated=True))[0]
    outputs, inputs = weight.shape
    out_TO = x_T2F.new_empty(1, outputs)
    _silu_and_mul_linear[(triton.cdiv(outputs, plan.rows),)](
        x_T2F, weight, bias, out_TO, outputs,
        INPUTS=inputs, HAS_BIAS=bias is not None,
        EVEN=inputs % plan.columns == 0 and outputs % plan.rows == 0,
        ROWS=plan.rows, COLUMNS=plan.columns, num_warps=plan.warps, **launch_options(x_T2F.device),
    )  # fmt: skip
    return out_TO
