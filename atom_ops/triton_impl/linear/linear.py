"""Triton kernels of `linear` for few tokens, where reading the weight takes all of the time.

O output features, I inputs, T tokens; a program computes a tile of outputs for every token.

  _gemv   one token: multiply and add without tensor cores
  gemv_rows   the same by whole rows, several tiles of them a program; can add and normalise before
  _gemm   several tokens, with tensor cores: weight [rows, columns] x tokens [columns, 16 or more],
          with split-K where that helps; a second launch reduces the splits in a fixed order

For 33 to 64 tokens on Hopper see `hopper_linear`. The fastest kernel, tile and split for a shape
are measured (`plans`).
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.linear.linear import linear
from atom_ops.triton_impl.hardware.pdl import (
    fits_cache,
    launch_options,
    pdl_launch_dependents,
    pdl_wait,
    prefetch_rows,
)
from atom_ops.triton_impl.hardware.target import INTERPRETED
from atom_ops.triton_impl.linear.split_k import partials_of, reduce_partials, store_outputs
from atom_ops.triton_impl.plans.linear_plans import FusedPlan, LinearPlan, Plan, Plans, StreamKPlan
from atom_ops.triton_impl.plans.shipped import shipped_on
from atom_ops.triton_impl.quantized import quantized_linear
from atom_ops.triton_impl.quantized.quantized_call import Packed, QuantizedCall
from atom_ops.triton_impl.quantized.quantized_plans import QuantizedPlan
from atom_ops.weights import Weight

_INTERPRETED = (
    LinearPlan(tokens=1, vector=True, rows=8, columns=64, warps=4, stages=1),
    LinearPlan(tokens=8, vector=False, rows=16, columns=64, warps=4, stages=2, split_k=3),
    LinearPlan(tokens=128, vector=False, rows=32, columns=128, warps=4, stages=2),
)


@triton.jit
def weight_tile(weight_RC, inside_R, valid_C, EVEN: tl.constexpr):
    if EVEN:
        tile_RC = tl.load(weight_RC)
    else:
        tile_RC = tl.load(weight_RC, mask=inside_R[:, None] & valid_C[None, :], other=0.0)
    return tile_RC


@triton.jit
def _x_chunk(x_C, valid_C, EVEN: tl.constexpr):
    part_C = tl.load(x_C) if EVEN else tl.load(x_C, mask=valid_C, other=0.0)
    return part_C.to(tl.float32)[None, :]


@triton.jit
def _gemv(
    x, weight, bias, out, outputs, inputs,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    output_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, COLUMNS)
    inside_R = output_R < outputs
    weight_RC = weight + output_R.to(tl.int64)[:, None] * inputs + column_C[None, :]
    total_RC = tl.zeros((ROWS, COLUMNS), tl.float32)
    if STAGES == 1:
        # One tile ahead in registers; the first is loaded while the previous kernel runs (PDL).
        part_RC = weight_tile(weight_RC, inside_R, column_C < inputs, EVEN)
        pdl_wait(PDL)
        for ahead in tl.range(COLUMNS, inputs, COLUMNS, num_stages=1):
            next_RC = weight_tile(weight_RC + ahead, inside_R, column_C < inputs - ahead, EVEN)
            x_C = x + ahead - COLUMNS + column_C
            total_RC += part_RC.to(tl.float32) * _x_chunk(x_C, column_C < inputs, EVEN)
            part_RC = next_RC
        pdl_launch_dependents(PDL)
        last = tl.cdiv(inputs, COLUMNS) * COLUMNS - COLUMNS
        x_C = x + last + column_C
        total_RC += part_RC.to(tl.float32) * _x_chunk(x_C, column_C < inputs - last, EVEN)
    else:
        pdl_wait(PDL)
        for first in tl.range(0, inputs, COLUMNS, num_stages=STAGES):
            valid_C = column_C < inputs - first
            part_RC = weight_tile(weight_RC + first, inside_R, valid_C, EVEN)
            total_RC += part_RC.to(tl.float32) * _x_chunk(x + first + column_C, valid_C, EVEN)
        pdl_launch_dependents(PDL)
    store_outputs(tl.sum(total_RC, 1), bias, out, output_R, output_R, inside_R, HAS_BIAS)


@triton.jit
def gemv_rows(
    x, residual, norm_weight, weight, bias, out, total, eps, outputs,
    INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies TILES tiles of ROWS whole rows, and loads one tile ahead.

    With `norm_weight` it normalises x + residual first, and program 0 stores their sum.
    """
    column_C = tl.arange(0, COLUMNS)
    valid_C = column_C < INPUTS
    output_R = tl.program_id(0) * (TILES * ROWS) + tl.arange(0, ROWS)
    weight_RC = weight + output_R.to(tl.int64)[:, None] * INPUTS + column_C[None, :]
    next_RC = weight_tile(weight_RC, output_R < outputs, valid_C, EVEN)
    if norm_weight is not None:
        scale_C = tl.load(norm_weight + column_C, mask=valid_C, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    x_C = tl.load(x + column_C, mask=valid_C, other=0.0)
    if residual is not None:
        residual_C = tl.load(residual + column_C, mask=valid_C, other=0.0)
        x_C = (x_C.to(tl.float32) + residual_C.to(tl.float32)).to(x_C.dtype)
        tl.store(total + column_C, x_C, mask=valid_C & (tl.program_id(0) == 0))
    wide_C = x_C.to(tl.float32)
    if norm_weight is not None:
        normed_C = wide_C * tl.rsqrt(tl.sum(wide_C * wide_C) / INPUTS + eps) * scale_C
        wide_C = normed_C.to(x_C.dtype).to(tl.float32)
    pdl_launch_dependents(PDL)
    for tile in tl.static_range(TILES):
        tile_RC = next_RC
        if tile + 1 < TILES:
            ahead_R = output_R + (tile + 1) * ROWS
            next_RC = weight_tile(weight_RC + (tile + 1) * ROWS * INPUTS, ahead_R < outputs, valid_C, EVEN)
        at_R = output_R + tile * ROWS
        sum_R = tl.sum(tile_RC.to(tl.float32) * wide_C[None, :], 1)
        store_outputs(sum_R, bias, out, at_R, at_R, at_R < outputs, HAS_BIAS)


@triton.jit(do_not_specialize=["tokens"])
def _gemm(
    x, weight, bias, out, tokens, outputs, inputs, share,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    if FETCH:
        pdl_launch_dependents(PDL)
    output_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    column_C = tl.arange(0, COLUMNS)
    token_T = tl.arange(0, TOKENS)
    inside_R, real_T = output_R < outputs, token_T < tokens
    first = split * share
    weight_RC = weight + output_R.to(tl.int64)[:, None] * inputs + column_C[None, :] + first
    x_CT = x + token_T[None, :] * inputs + column_C[:, None] + first
    total_RT = tl.zeros((ROWS, TOKENS), tl.float32)
    if FETCH:
        size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        rows = weight + tl.program_id(0).to(tl.int64) * ROWS * inputs + first
        prefetch_rows(rows, ROWS, inputs * size, share * size, PDL)
    pdl_wait(PDL)
    for start in range(0, share, COLUMNS):
        if EVEN:
            tile_RC = tl.load(weight_RC + start)
            tile_CT = tl.load(x_CT + start, mask=real_T[None, :], other=0.0)
        else:
            valid_C = column_C < inputs - first - start
            tile_RC = tl.load(weight_RC + start, mask=inside_R[:, None] & valid_C[None, :], other=0.0)
            tile_CT = tl.load(x_CT + start, mask=valid_C[:, None] & real_T[None, :], other=0.0)
        total_RT = tl.dot(tile_RC, tile_CT, total_RT, input_precision="ieee")
    if not FETCH:
        pdl_launch_dependents(PDL)
    place_RT = (split * tokens + token_T)[None, :] * outputs + output_R[:, None]
    inside_RT = inside_R[:, None] & real_T[None, :]
    store_outputs(total_RT, bias, out, place_RT, output_R[:, None], inside_RT, HAS_BIAS)


def multiply(
    plan: Plan,
    x_TI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear` by this plan; at most `plan.tokens` tokens."""
    if isinstance(plan, StreamKPlan):
        from atom_ops.triton_impl.linear import hopper_linear  # Gluon for Hopper is not in every Triton

        return hopper_linear.multiply(plan, x_TI, weight, bias, out_dtype)
    tokens, inputs = x_TI.shape
    outputs = len(weight)
    out_TO = x_TI.new_empty(tokens, outputs, dtype=out_dtype)
    share = triton.cdiv(inputs, plan.split_k * plan.columns) * plan.columns
    split_k = triton.cdiv(inputs, share)
    even = outputs % plan.rows == 0 and inputs % (split_k * plan.columns) == 0
    options = launch_options(x_TI.device)
    tile = {"EVEN": even, "ROWS": plan.rows, "COLUMNS": plan.columns, "num_warps": plan.warps, **options}
    grid = (triton.cdiv(outputs, plan.rows), split_k)
    if plan.vector and plan.tiles:
        multiply_rows(plan, x_TI, None, None, weight, bias, (out_TO, None), 0.0)
        return out_TO
    if plan.vector:
        _gemv[grid[:1]](
            x_TI, weight, bias, out_TO, outputs, inputs,
            HAS_BIAS=bias is not None, STAGES=plan.stages, **tile,
        )  # fmt: skip
        return out_TO
    tile |= {"TOKENS": max(16, triton.next_power_of_2(plan.tokens)), "num_stages": plan.stages}
    tile["FETCH"] = even and fits_cache(weight)
    sums = partials_of(out_TO, split_k)
    of_gemm = None if split_k > 1 else bias
    _gemm[grid](
        x_TI, weight, of_gemm, sums, tokens, outputs, inputs, share, HAS_BIAS=of_gemm is not None, **tile
    )
    return out_TO if split_k == 1 else reduce_partials(sums, bias, out_TO)


def multiply_rows(
    plan: LinearPlan | FusedPlan,
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    results: tuple[Tensor, Tensor | None],
    eps: float,
) -> None:
    """Fill `results`, the outputs and the sum with the residual, by `gemv_rows`."""
    outputs, inputs = weight.shape
    columns = triton.next_power_of_2(inputs)
    each = plan.rows * plan.tiles
    gemv_rows[(triton.cdiv(outputs, each),)](
        x_TI, residual_TI, norm_weight_I, weight, bias, *results, eps, outputs,
        INPUTS=inputs, HAS_BIAS=bias is not None, EVEN=columns == inputs and outputs % each == 0,
        ROWS=plan.rows, COLUMNS=columns, TILES=plan.tiles, num_warps=plan.warps,
        **launch_options(x_TI.device),
    )  # fmt: skip


@cache
def plans_on(device: torch.device) -> dict[tuple[int, int], Plans]:
    """Plans by the weight's shape: those that are shipped, and what `tuning` adds."""
    return dict(shipped_on(device).linear)


def _plan(x_TI: Tensor, weight: Tensor) -> Plan | None:
    """None if the vendor's library is faster or the shape was not measured."""
    tokens = len(x_TI)
    # The interpreter's bfloat16 tl.dot is wrong.
    dtypes = (torch.float32, torch.float16) if INTERPRETED else (torch.bfloat16, torch.float16)
    if weight.dtype not in dtypes:
        return None
    plans = (
        _INTERPRETED if INTERPRETED else plans_on(weight.device).get((weight.shape[0], weight.shape[1]), ())
    )
    return next((plan for plan in plans if plan.least <= tokens <= plan.tokens), None)


def _plan_of(
    x_TI: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Plan | QuantizedPlan | None:
    """How the call runs; None: on torch."""
    if isinstance(weight, Tensor):
        return _plan(x_TI, weight)
    if not quantized_linear.supports(weight, x_TI):
        return None
    return quantized_linear.plan_of(x_TI, weight, out_dtype or x_TI.dtype)


@linear.provider(
    "triton",
    needs="a GPU (or TRITON_INTERPRET=1)",
    supported=lambda device: INTERPRETED or device.type == "cuda",
    plan=_plan_of,
    prepare=lambda x_TI, weight, bias=None, out_dtype=None: (
        x_TI,
        quantized_linear.packed(weight) or weight,
        bias,
        out_dtype,
    ),
    pack=quantized_linear.packed,
    batch_invariant=False,
    quantizes_activations=True,
)
def _linear(
    x_TI: Tensor,
    weight: Tensor | Packed,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    plan: Any = None,
) -> Tensor:
    """`plan`: what `_plan_of` returned."""
    plan = plan or _plan_of(x_TI, weight, bias, out_dtype)
    if not isinstance(weight, Tensor):
        return plan.multiply(QuantizedCall(x_TI, weight, bias, out_dtype or x_TI.dtype))[0]
    return multiply(plan, x_TI, weight, bias, out_dtype)
