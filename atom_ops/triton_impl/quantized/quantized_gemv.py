"""`linear` of one token with an 8-bit weight: bound by the bytes of the weight.

Weights are decoded in registers and multiplied in float32; the activations are not rounded.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.target import INTERPRETED
from atom_ops.triton_impl.quantized.fp8 import decode_fp8
from atom_ops.triton_impl.quantized.quantized_plans import GemvPlan
from atom_ops.weights import BlockFP8, ChannelFP8, ChannelINT8

EightBit = BlockFP8 | ChannelFP8 | ChannelINT8


@triton.jit
def _tile(weight_RC, inside_R, valid_C, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(weight_RC)
    else:
        return tl.load(weight_RC, mask=inside_R[:, None] & valid_C[None, :], other=0.0)


@triton.jit
def _products(tile_RC, wide_C, DECODED: tl.constexpr):
    """Products of a tile and float32 activations, to be summed along the second dimension."""
    if DECODED:
        return decode_fp8(tile_RC, tl.float32) * wide_C[None, :]
    else:
        return tile_RC.to(tl.float32) * wide_C[None, :]


@triton.jit
def _scaled(
    wide_C, scales, first_o, column_C, valid_C,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Activations times the scales of a row of blocks, which all rows of a tile share."""
    if BLOCK_ROWS:
        row = scales + first_o // BLOCK_ROWS * ((INPUTS + BLOCK - 1) // BLOCK)
        return wide_C * tl.load(row + column_C // BLOCK, mask=valid_C, other=0.0)
    else:
        return wide_C


@triton.jit
def _store(sum_R, scales, bias, out, output_R, inside_R, PER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr):
    if PER_ROW:
        sum_R *= tl.load(scales + output_R, mask=inside_R, other=0.0)
    if HAS_BIAS:
        sum_R += tl.load(bias + output_R, mask=inside_R, other=0.0).to(tl.float32)
    tl.store(out + output_R, sum_R.to(out.dtype.element_ty), mask=inside_R)


@triton.jit
def _gemv(
    x, weight, scales, bias, out, outputs,
    INPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, DECODED: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies ROWS rows, COLUMNS columns at a time, and loads one tile ahead."""
    first_o = tl.program_id(0) * ROWS
    column_C = tl.arange(0, COLUMNS)
    output_R = first_o + tl.arange(0, ROWS)
    inside_R = output_R < outputs
    weight_RC = weight + output_R.to(tl.int64)[:, None] * INPUTS + column_C[None, :]
    tile_RC = _tile(weight_RC, inside_R, column_C < INPUTS, EVEN)
    total_RC = tl.zeros((ROWS, COLUMNS), tl.float32)
    pdl_wait(PDL)
    for ahead in tl.range(COLUMNS, INPUTS, COLUMNS, num_stages=1):
        next_RC = _tile(weight_RC + ahead, inside_R, column_C < INPUTS - ahead, EVEN)
        at_C = ahead - COLUMNS + column_C
        wide_C = tl.load(x + at_C, mask=at_C < INPUTS, other=0.0).to(tl.float32)
        wide_C = _scaled(wide_C, scales, first_o, at_C, at_C < INPUTS, BLOCK_ROWS, BLOCK, INPUTS)
        total_RC += _products(tile_RC, wide_C, DECODED)
        tile_RC = next_RC
    pdl_launch_dependents(PDL)
    at_C = (INPUTS - 1) // COLUMNS * COLUMNS + column_C
    wide_C = tl.load(x + at_C, mask=at_C < INPUTS, other=0.0).to(tl.float32)
    wide_C = _scaled(wide_C, scales, first_o, at_C, at_C < INPUTS, BLOCK_ROWS, BLOCK, INPUTS)
    total_RC += _products(tile_RC, wide_C, DECODED)
    _store(tl.sum(total_RC, 1), scales, bias, out, output_R, inside_R, BLOCK_ROWS == 0, HAS_BIAS)


@triton.jit
def _gemv_rows(
    x, residual, norm_weight, weight, scales, bias, out, total, eps, outputs,
    INPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, DECODED: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies TILES tiles of ROWS whole rows, and loads one tile ahead.

    With `norm_weight` it normalises x + residual first, and program 0 stores their sum.
    """
    column_C = tl.arange(0, COLUMNS)
    valid_C = column_C < INPUTS
    first_o = tl.program_id(0) * (TILES * ROWS)
    output_R = first_o + tl.arange(0, ROWS)
    weight_RC = weight + output_R.to(tl.int64)[:, None] * INPUTS + column_C[None, :]
    next_RC = _tile(weight_RC, output_R < outputs, valid_C, EVEN)
    if norm_weight is not None:
        factor_C = tl.load(norm_weight + column_C, mask=valid_C, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    own_C = tl.load(x + column_C, mask=valid_C, other=0.0)
    if residual is not None:
        residual_C = tl.load(residual + column_C, mask=valid_C, other=0.0).to(tl.float32)
        own_C = (own_C.to(tl.float32) + residual_C).to(own_C.dtype)
        if tl.program_id(0) == 0:
            tl.store(total + column_C, own_C, mask=valid_C)
    wide_C = own_C.to(tl.float32)
    if norm_weight is not None:
        wide_C *= tl.rsqrt(tl.sum(wide_C * wide_C) / INPUTS + eps) * factor_C
        wide_C = wide_C.to(own_C.dtype).to(tl.float32)
    wide_C = _scaled(wide_C, scales, first_o, column_C, valid_C, BLOCK_ROWS, BLOCK, INPUTS)
    pdl_launch_dependents(PDL)
    for tile in tl.static_range(TILES):
        tile_RC = next_RC
        at_R = output_R + tile * ROWS
        if tile + 1 < TILES:
            ahead_RC = weight_RC + (tile + 1) * ROWS * INPUTS
            next_RC = _tile(ahead_RC, at_R + ROWS < outputs, valid_C, EVEN)
        sum_R = tl.sum(_products(tile_RC, wide_C, DECODED), 1)
        _store(sum_R, scales, bias, out, at_R, at_R < outputs, BLOCK_ROWS == 0, HAS_BIAS)


def multiply(
    plan: GemvPlan,
    x_TI: Tensor,
    weight: EightBit,
    bias: Tensor | None,
    out_TO: Tensor,
    residual_TI: Tensor | None = None,
    norm_weight_I: Tensor | None = None,
    eps: float = 0.0,
    total_TI: Tensor | None = None,
) -> None:
    """Fill `out_TO` [1, O], and `total_TI` with x + residual; a norm needs a plan by whole rows."""
    outputs, inputs = weight.shape
    columns = plan.columns or triton.next_power_of_2(inputs)
    each = plan.rows * plan.tiles
    block_rows, block = weight.block if isinstance(weight, BlockFP8) else (0, 0)
    options: dict[str, Any] = {
        "INPUTS": inputs, "BLOCK_ROWS": block_rows, "BLOCK": block,
        "DECODED": INTERPRETED and weight.values.dtype != torch.int8, "HAS_BIAS": bias is not None,
        "EVEN": outputs % each == 0 and inputs % columns == 0, "ROWS": plan.rows, "COLUMNS": columns,
        "num_warps": plan.warps, **launch_options(x_TI.device),
    }  # fmt: skip
    grid = (triton.cdiv(outputs, each),)
    if plan.columns:
        _gemv[grid](x_TI, weight.values, weight.scales, bias, out_TO, outputs, **options)
        return
    _gemv_rows[grid](
        x_TI, residual_TI, norm_weight_I, weight.values, weight.scales, bias, out_TO, total_TI, eps, outputs,
        TILES=plan.tiles, **options,
    )  # fmt: skip
