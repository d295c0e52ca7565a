"""`linear` of one token with a quantized weight: bound by the bytes of the weight.

Weights are decoded in registers and multiplied in float32; the activations are not rounded. A cell is
what a tile of the weight is loaded in:

    8-bit formats    one number: e4m3 or int8
    4-bit formats    an int32 of 8 codes, the first in its lowest bits

A 4-bit integer is decoded without a conversion: byte 2 of the float32 128.0 counts ones. 128 times the
activations is subtracted once for all rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl import INTERPRETED
from atom_ops.triton_impl.four_bit_linear import load_scale, parts_of
from atom_ops.triton_impl.fp8 import decode_fp8
from atom_ops.triton_impl.pdl import launch_options, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.quantized_plans import GemvPlan, Packed
from atom_ops.weights import MXFP4, BlockFP8, GroupINT4

_CODES = 8
"""4-bit codes of a cell."""
_CELLS = tl.constexpr(4)
"""Cells of 32 inputs, which share a scale in every 4-bit format."""


@triton.jit
def _load_x(x, cell_C, valid_C, CODES: tl.constexpr):
    """[C], or [C, CODES]."""
    if CODES == 1:
        return tl.load(x + cell_C, mask=valid_C, other=0.0)
    else:
        at = cell_C[:, None] * CODES + tl.arange(0, CODES)[None, :]
        return tl.load(x + at, mask=valid_C[:, None] & (at >= 0), other=0.0)


@triton.jit
def _load_cells(cells_RC, inside_R, valid_C, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(cells_RC)
    else:
        return tl.load(cells_RC, mask=inside_R[:, None] & valid_C[None, :], other=0.0)


@triton.jit
def _by_code(x_C8, COLUMNS: tl.constexpr):
    """The columns of [C, 8], in order."""
    even, odd = tl.split(tl.reshape(x_C8, [COLUMNS, 2, 2, 2]))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _integer(bytes_RC, BYTE: tl.constexpr, NATIVE: tl.constexpr):
    """Byte BYTE, 0 to 15, of each int32, plus 128."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x43000000, $2;", "=f,r,r", [bytes_RC, 0x7044 + 0x100 * BYTE],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (((bytes_RC >> (8 * BYTE)) & 15) + 128).to(tl.float32)


@triton.jit
def _float(cell_RC, NUMBER: tl.constexpr):
    """The value of code NUMBER of each cell times 2 ** -126."""
    moved_RC = cell_RC << (22 - 4 * NUMBER) if NUMBER < 6 else cell_RC >> (4 * NUMBER - 22)
    sign_RC = (cell_RC << (28 - 4 * NUMBER)) & -0x80000000
    return (sign_RC.to(tl.int32) | (moved_RC & 0x1C00000)).to(tl.float32, bitcast=True)


@triton.jit
def _integer_sums(
    cell_RC, x_C8, zero_RG, scale_RG,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ZEROS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    x0, x1, x2, x3, x4, x5, x6, x7 = _by_code(x_C8, COLUMNS)
    sum_C = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))
    low_RC, high_RC = cell_RC & 0x0F0F0F0F, (cell_RC >> 4) & 0x0F0F0F0F
    total_RC = _integer(low_RC, 0, NATIVE) * x0[None, :] - (sum_C * (128 if ZEROS else 136))[None, :]
    total_RC += _integer(high_RC, 0, NATIVE) * x1[None, :]
    total_RC += _integer(low_RC, 1, NATIVE) * x2[None, :]
    total_RC += _integer(high_RC, 1, NATIVE) * x3[None, :]
    total_RC += _integer(low_RC, 2, NATIVE) * x4[None, :]
    total_RC += _integer(high_RC, 2, NATIVE) * x5[None, :]
    total_RC += _integer(low_RC, 3, NATIVE) * x6[None, :]
    total_RC += _integer(high_RC, 3, NATIVE) * x7[None, :]
    total_RG = tl.sum(tl.reshape(total_RC, [ROWS, COLUMNS // _CELLS, _CELLS]), 2)
    if ZEROS:
        sum_G = tl.sum(tl.reshape(sum_C, [COLUMNS // _CELLS, _CELLS]), 1)
        total_RG -= zero_RG.to(tl.float32) * sum_G[None, :]
    return total_RG * scale_RG


@triton.jit
def _float_sums(cell_RC, x_C8, scale_RG, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # The numbers are 2 ** -126 of their values; x times 2 ** 64 keeps the products normal.
    x0, x1, x2, x3, x4, x5, x6, x7 = _by_code(x_C8 * 2.0**64, COLUMNS)
    total_RC = _float(cell_RC, 0) * x0[None, :]
    total_RC += _float(cell_RC, 1) * x1[None, :]
    total_RC += _float(cell_RC, 2) * x2[None, :]
    total_RC += _float(cell_RC, 3) * x3[None, :]
    total_RC += _float(cell_RC, 4) * x4[None, :]
    total_RC += _float(cell_RC, 5) * x5[None, :]
    total_RC += _float(cell_RC, 6) * x6[None, :]
    total_RC += _float(cell_RC, 7) * x7[None, :]
    total_RG = tl.sum(tl.reshape(total_RC, [ROWS, COLUMNS // _CELLS, _CELLS]), 2)
    return total_RG * (scale_RG * 2.0**62)


@triton.jit
def _products(
    cell_RC, wide, scale_RG, zero_RG,
    FORMAT: tl.constexpr, ZEROS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Products of a tile and float32 activations, to be summed along the second dimension."""
    if FORMAT == "int4":
        return _integer_sums(cell_RC, wide, zero_RG, scale_RG, ROWS, COLUMNS, ZEROS, NATIVE)
    elif FORMAT == "mxfp4":
        return _float_sums(cell_RC, wide, scale_RG, ROWS, COLUMNS)
    elif FORMAT == "int8" or NATIVE:
        return cell_RC.to(tl.float32) * wide[None, :]
    else:
        return decode_fp8(cell_RC, tl.float32) * wide[None, :]


@triton.jit
def _scale_tile(
    scales, output_R, inside_R, first, INPUTS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """The scale of each 32 inputs of a tile of 4-bit cells, [R, C / 4]; of other formats nothing."""
    if FORMAT == "int4" or FORMAT == "mxfp4":
        part_G = first // _CELLS + tl.arange(0, COLUMNS // _CELLS)
        at_RG = output_R.to(tl.int64)[:, None] * (INPUTS // GROUP) + (part_G * 32 // GROUP)[None, :]
        inside_RG = inside_R[:, None] & (part_G * 32 < INPUTS)[None, :]
        return load_scale(scales, at_RG, inside_RG, FORMAT == "mxfp4")
    else:
        return first


@triton.jit
def _zero_tile(
    zeros, output_R, inside_R, first, INPUTS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    if zeros is not None:
        part_G = first // _CELLS + tl.arange(0, COLUMNS // _CELLS)
        at_RG = output_R.to(tl.int64)[:, None] * (INPUTS // GROUP) + (part_G * 32 // GROUP)[None, :]
        return tl.load(zeros + at_RG, mask=inside_R[:, None] & (part_G * 32 < INPUTS)[None, :], other=0)
    else:
        return first


@triton.jit
def _scaled(
    wide,
    scales,
    first_o,
    cell_C,
    valid_C,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Activations times the scales of a row of blocks, which all rows of a tile share."""
    if BLOCK_ROWS:
        row = scales + first_o // BLOCK_ROWS * ((INPUTS + BLOCK - 1) // BLOCK)
        return wide * tl.load(row + cell_C // BLOCK, mask=valid_C, other=0.0)
    else:
        return wide


@triton.jit
def _store(sum_R, scales, bias, out, output_R, inside_R, PER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr):
    if PER_ROW:
        sum_R *= tl.load(scales + output_R, mask=inside_R, other=0.0)
    if HAS_BIAS:
        sum_R += tl.load(bias + output_R, mask=inside_R, other=0.0).to(tl.float32)
    tl.store(out + output_R, sum_R.to(out.dtype.element_ty), mask=inside_R)


@triton.jit
def _gemv(
    x, weight, scales, zeros, bias, out, outputs,
    INPUTS: tl.constexpr, FORMAT: tl.constexpr, CODES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr, PER_ROW: tl.constexpr, NATIVE: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies ROWS rows, COLUMNS cells at a time, and loads one tile ahead."""
    CELLS: tl.constexpr = INPUTS // CODES
    ZEROS: tl.constexpr = zeros is not None
    first_o = tl.program_id(0) * ROWS
    output_R = first_o + tl.arange(0, ROWS)
    cell_C = tl.arange(0, COLUMNS)
    inside_R = output_R < outputs
    cells_RC = weight + output_R.to(tl.int64)[:, None] * CELLS + cell_C[None, :]
    cell_RC = _load_cells(cells_RC, inside_R, cell_C < CELLS, EVEN)
    scale_RG = _scale_tile(scales, output_R, inside_R, 0, INPUTS, GROUP, COLUMNS, FORMAT)
    zero_RG = _zero_tile(zeros, output_R, inside_R, 0, INPUTS, GROUP, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS if CODES == 1 else COLUMNS // _CELLS), tl.float32)
    pdl_wait(PDL)
    for ahead in tl.range(COLUMNS, CELLS, COLUMNS, num_stages=1):
        next_RC = _load_cells(cells_RC + ahead, inside_R, cell_C < CELLS - ahead, EVEN)
        next_scale = _scale_tile(scales, output_R, inside_R, ahead, INPUTS, GROUP, COLUMNS, FORMAT)
        next_zero = _zero_tile(zeros, output_R, inside_R, ahead, INPUTS, GROUP, COLUMNS)
        at_C = ahead - COLUMNS + cell_C
        wide = _load_x(x, at_C, at_C < CELLS, CODES).to(tl.float32)
        wide = _scaled(wide, scales, first_o, at_C, at_C < CELLS, BLOCK_ROWS, GROUP, INPUTS)
        total += _products(cell_RC, wide, scale_RG, zero_RG, FORMAT, ZEROS, ROWS, COLUMNS, NATIVE)
        cell_RC, scale_RG, zero_RG = next_RC, next_scale, next_zero
    pdl_launch_dependents(PDL)
    at_C = (CELLS - 1) // COLUMNS * COLUMNS + cell_C
    wide = _load_x(x, at_C, at_C < CELLS, CODES).to(tl.float32)
    wide = _scaled(wide, scales, first_o, at_C, at_C < CELLS, BLOCK_ROWS, GROUP, INPUTS)
    total += _products(cell_RC, wide, scale_RG, zero_RG, FORMAT, ZEROS, ROWS, COLUMNS, NATIVE)
    _store(tl.sum(total, 1), scales, bias, out, output_R, inside_R, PER_ROW, HAS_BIAS)


@triton.jit
def _gemv_rows(
    x, residual, norm_weight, weight, scales, zeros, bias, out, total, eps, outputs,
    INPUTS: tl.constexpr, FORMAT: tl.constexpr, CODES: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr, PER_ROW: tl.constexpr, NATIVE: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies TILES tiles of ROWS whole rows, and loads one tile ahead.

    With `norm_weight` it normalises x + residual first, and program 0 stores their sum.
    """
    CELLS: tl.constexpr = INPUTS // CODES
    ZEROS: tl.constexpr = zeros is not None
    cell_C = tl.arange(0, COLUMNS)
    valid_C = cell_C < CELLS
    first_o = tl.program_id(0) * (TILES * ROWS)
    output_R = first_o + tl.arange(0, ROWS)
    cells_RC = weight + output_R.to(tl.int64)[:, None] * CELLS + cell_C[None, :]
    next_RC = _load_cells(cells_RC, output_R < outputs, valid_C, EVEN)
    next_scale = _scale_tile(scales, output_R, output_R < outputs, 0, INPUTS, GROUP, COLUMNS, FORMAT)
    next_zero = _zero_tile(zeros, output_R, output_R < outputs, 0, INPUTS, GROUP, COLUMNS)
    if norm_weight is not None:
        factor = _load_x(norm_weight, cell_C, valid_C, CODES).to(tl.float32)
    pdl_wait(PDL)
    own = _load_x(x, cell_C, valid_C, CODES)
    if residual is not None:
        own = (own.to(tl.float32) + _load_x(residual, cell_C, valid_C, CODES).to(tl.float32)).to(own.dtype)
        if tl.program_id(0) == 0:
            if CODES == 1:
                tl.store(total + cell_C, own, mask=valid_C)
            else:
                at = cell_C[:, None] * CODES + tl.arange(0, CODES)[None, :]
                tl.store(total + at, own, mask=valid_C[:, None] & (at >= 0))
    wide = own.to(tl.float32)
    if norm_weight is not None:
        wide *= tl.rsqrt(tl.sum(wide * wide) / INPUTS + eps) * factor
        wide = wide.to(own.dtype).to(tl.float32)
    wide = _scaled(wide, scales, first_o, cell_C, valid_C, BLOCK_ROWS, GROUP, INPUTS)
    pdl_launch_dependents(PDL)
    for tile in tl.static_range(TILES):
        cell_RC, scale_RG, zero_RG = next_RC, next_scale, next_zero
        at_R = output_R + tile * ROWS
        if tile + 1 < TILES:
            ahead_R = at_R + ROWS
            next_RC = _load_cells(
                cells_RC + (tile + 1) * ROWS * CELLS, ahead_R < outputs, valid_C, EVEN
            )  # fmt: skip
            next_scale = _scale_tile(scales, ahead_R, ahead_R < outputs, 0, INPUTS, GROUP, COLUMNS, FORMAT)
            next_zero = _zero_tile(zeros, ahead_R, ahead_R < outputs, 0, INPUTS, GROUP, COLUMNS)
        sums = _products(cell_RC, wide, scale_RG, zero_RG, FORMAT, ZEROS, ROWS, COLUMNS, NATIVE)
        _store(tl.sum(sums, 1), scales, bias, out, at_R, at_R < outputs, PER_ROW, HAS_BIAS)


def multiply(
    plan: GemvPlan,
    x_TI: Tensor,
    weight: Packed,
    bias: Tensor | None,
    out_TO: Tensor,
    residual_TI: Tensor | None = None,
    norm_weight_I: Tensor | None = None,
    eps: float = 0.0,
    total_TI: Tensor | None = None,
) -> None:
    """Fill `out_TO` [1, O], and `total_TI` with x + residual; a norm needs a plan by whole rows."""
    outputs, inputs = weight.shape
    cells, scales, zeros, constants = _arguments(weight)
    count = inputs // constants["CODES"]
    columns = plan.columns // constants["CODES"] or triton.next_power_of_2(count)
    each = plan.rows * plan.tiles
    options = constants | {
        "INPUTS": inputs, "HAS_BIAS": bias is not None, "EVEN": outputs % each == 0 and count % columns == 0,
        "NATIVE": not INTERPRETED, "ROWS": plan.rows, "COLUMNS": columns, "num_warps": plan.warps,
        **launch_options(x_TI.device),
    }  # fmt: skip
    grid = (triton.cdiv(outputs, each),)
    if plan.columns:
        _gemv[grid](x_TI, cells, scales, zeros, bias, out_TO, outputs, **options)
        return
    _gemv_rows[grid](
        x_TI, residual_TI, norm_weight_I, cells, scales, zeros, bias, out_TO, total_TI, eps, outputs,
        TILES=plan.tiles, **options,
    )  # fmt: skip


def _arguments(weight: Packed) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """(cells, scales, zeros, constants of the kernels)."""
    if isinstance(weight, GroupINT4 | MXFP4):
        codes, scales, zeros, group, floats = parts_of(weight)
        name = "mxfp4" if floats else "int4"
        packed: dict[str, Any] = {
            "FORMAT": name,
            "CODES": _CODES,
            "BLOCK_ROWS": 0,
            "GROUP": group,
            "PER_ROW": False,
        }
        return codes.view(torch.int32), scales, zeros, packed
    name = "int8" if weight.values.dtype == torch.int8 else "fp8"
    constants: dict[str, Any] = {"FORMAT": name, "CODES": 1, "BLOCK_ROWS": 0, "GROUP": 1, "PER_ROW": True}
    if isinstance(weight, BlockFP8):
        rows, columns = weight.block
        constants |= {"BLOCK_ROWS": rows, "GROUP": columns, "PER_ROW": False}
    return weight.values, weight.scales, None, constants
