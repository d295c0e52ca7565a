"""`linear` of one token with a 4-bit weight (`FourBitWords`): bound by the bytes of the weight.

A tile of the weight is loaded in cells: int32 of two neighbouring words, so of eight codes, two of each
quarter of a chunk. They are decoded in registers and multiplied in float32:

    int4    Byte 2 of the float32 128.0 counts ones, so that a code is decoded by moving a byte. 128 times
            the activations is subtracted once for all rows.
    e2m1    Sign and magnitude are moved to their places in a float32, which is 2^-126 times the number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.target import INTERPRETED
from atom_ops.triton_impl.quantized.four_bit import settings_of
from atom_ops.triton_impl.quantized.quantized_plans import GemvPlan
from atom_ops.weights import FourBitWords

_CODES = 8
"""Codes of a cell."""


@triton.jit
def _places(first, quarter: tl.constexpr, CELLS: tl.constexpr):
    """The inputs of this quarter of CELLS cells from cell `first` on, in the order of the codes."""
    number = tl.arange(0, 2 * CELLS)
    return first * 8 + number // 32 * 128 + quarter * 32 + number % 32


@triton.jit
def _quarter(x, first, quarter: tl.constexpr, INPUTS: tl.constexpr, CELLS: tl.constexpr):
    place = _places(first, quarter, CELLS)
    return tl.load(x + place, mask=place < INPUTS, other=0.0)


@triton.jit
def _wide(x, first, quarter: tl.constexpr, INPUTS: tl.constexpr, CELLS: tl.constexpr):
    return _quarter(x, first, quarter, INPUTS, CELLS).to(tl.float32)


@triton.jit
def _cells(words, output_R, inside_R, first, ALL: tl.constexpr, EVEN: tl.constexpr, CELLS: tl.constexpr):
    """[R, CELLS] from cell `first` of a row on; a row has ALL cells."""
    cell_C = first + tl.arange(0, CELLS)
    place_RC = words + output_R.to(tl.int64)[:, None] * ALL + cell_C[None, :]
    if EVEN:
        return tl.load(place_RC)
    else:
        return tl.load(place_RC, mask=inside_R[:, None] & (cell_C < ALL)[None, :], other=0)


@triton.jit
def _entries(
    table, output_R, inside_R, first, groups, GROUP: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Scales or zeros of a tile: of each four cells [R, CELLS / 4]; with groups of 32 or 64 all there are."""
    row_R = output_R.to(tl.int64) * groups
    if GROUP == 32 or GROUP == 64:
        COUNT: tl.constexpr = 128 // GROUP
        group_G = first // 16 * COUNT + tl.arange(0, CELLS // 16 * COUNT)
    else:
        part_G = first // 4 + tl.arange(0, CELLS // 4)
        group_G = part_G // 4 if GROUP == 0 else part_G * 32 // GROUP
    inside_RG = inside_R[:, None] & (group_G < groups)[None, :]
    return tl.load(table + row_R[:, None] + group_G[None, :], mask=inside_RG, other=0)


@triton.jit
def _of_quarters(entries, GROUP: tl.constexpr, ROWS: tl.constexpr, CELLS: tl.constexpr):
    """The entries of `_entries` for the groups of 32 or 64, each [R, CELLS / 4]."""
    COUNT: tl.constexpr = 128 // GROUP
    if COUNT == 4:
        even, odd = tl.split(tl.reshape(entries, [ROWS, CELLS // 16, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    else:
        a, c = tl.split(tl.reshape(entries, [ROWS, CELLS // 16, 2]))
        b, d = a, c
    return (
        _four_times(a, ROWS, CELLS), _four_times(b, ROWS, CELLS),
        _four_times(c, ROWS, CELLS), _four_times(d, ROWS, CELLS),
    )  # fmt: skip


@triton.jit
def _four_times(chunks, ROWS: tl.constexpr, CELLS: tl.constexpr):
    wide = tl.broadcast_to(tl.expand_dims(chunks, 2), [ROWS, CELLS // 16, 4])
    return tl.reshape(wide, [ROWS, CELLS // 4]).to(tl.float32)


@triton.jit
def _by_fours(total_RC, ROWS: tl.constexpr, CELLS: tl.constexpr):
    return tl.sum(tl.reshape(total_RC, [ROWS, CELLS // 4, 4]), 2)


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
def _integers(low_RC, high_RC, quarter: tl.constexpr, x_C2, CENTRE: tl.constexpr, NATIVE: tl.constexpr):
    """Sum over the two columns of a quarter of (code - CENTRE) * x."""
    x0, x1 = tl.split(x_C2)
    bytes_RC = high_RC if quarter % 2 else low_RC
    product = _integer(bytes_RC, quarter // 2, NATIVE) * x0[None, :] - ((x0 + x1) * CENTRE)[None, :]
    return product + _integer(bytes_RC, quarter // 2 + 2, NATIVE) * x1[None, :]


@triton.jit
def _float(word_RC, quarter: tl.constexpr):
    """2^-126 times the number of a quarter of a word in the upper half of an int32."""
    if quarter == 3:
        sign_RC = (word_RC << 1) & -0x80000000
        bits_RC = sign_RC.to(tl.int32) | ((word_RC >> 3) & 0x01800000) | ((word_RC >> 7) & 0x00400000)
    else:
        moved_RC = word_RC << (3 * quarter)
        bits_RC = (moved_RC & -0x80000000).to(tl.int32) | (moved_RC & 0x01C00000)
    return bits_RC.to(tl.float32, bitcast=True)


@triton.jit
def _floats(cell_RC, quarter: tl.constexpr, x_C2):
    x0, x1 = tl.split(x_C2)
    return _float(cell_RC << 16, quarter) * x0[None, :] + _float(cell_RC, quarter) * x1[None, :]


@triton.jit
def _float_scale(four, quarter: tl.constexpr):
    return (((four >> (8 * quarter)) & 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _sums(
    cell_RC, scale, zero, a, b, c, d,
    GROUP: tl.constexpr, ZEROS: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """[R, CELLS / 4]: the products of a tile, added by fours, and scaled. a .. d: x by quarter, [2 CELLS]."""
    a, b = tl.reshape(a, [CELLS, 2]), tl.reshape(b, [CELLS, 2])
    c, d = tl.reshape(c, [CELLS, 2]), tl.reshape(d, [CELLS, 2])
    if GROUP == 0:
        # The numbers are 2^-126 of their values; x times 2^64 keeps the products normal.
        total = _by_fours(_floats(cell_RC, 0, a * 2.0**64), ROWS, CELLS) * _float_scale(scale, 0)
        total += _by_fours(_floats(cell_RC, 1, b * 2.0**64), ROWS, CELLS) * _float_scale(scale, 1)
        total += _by_fours(_floats(cell_RC, 2, c * 2.0**64), ROWS, CELLS) * _float_scale(scale, 2)
        total += _by_fours(_floats(cell_RC, 3, d * 2.0**64), ROWS, CELLS) * _float_scale(scale, 3)
        return total * 2.0**-64
    else:
        CENTRE: tl.constexpr = 128 if ZEROS else 136
        low_RC = cell_RC & 0x0F0F0F0F
        high_RC = (cell_RC >> 4) & 0x0F0F0F0F
        a_RC = _integers(low_RC, high_RC, 0, a, CENTRE, NATIVE)
        b_RC = _integers(low_RC, high_RC, 1, b, CENTRE, NATIVE)
        c_RC = _integers(low_RC, high_RC, 2, c, CENTRE, NATIVE)
        d_RC = _integers(low_RC, high_RC, 3, d, CENTRE, NATIVE)
        if GROUP == 32 or GROUP == 64:
            a_RG, b_RG = _by_fours(a_RC, ROWS, CELLS), _by_fours(b_RC, ROWS, CELLS)
            c_RG, d_RG = _by_fours(c_RC, ROWS, CELLS), _by_fours(d_RC, ROWS, CELLS)
            if ZEROS:
                zero_a, zero_b, zero_c, zero_d = _of_quarters(zero, GROUP, ROWS, CELLS)
                a_RG -= zero_a * _sum_by_fours(a, CELLS)[None, :]
                b_RG -= zero_b * _sum_by_fours(b, CELLS)[None, :]
                c_RG -= zero_c * _sum_by_fours(c, CELLS)[None, :]
                d_RG -= zero_d * _sum_by_fours(d, CELLS)[None, :]
            scale_a, scale_b, scale_c, scale_d = _of_quarters(scale, GROUP, ROWS, CELLS)
            return a_RG * scale_a + b_RG * scale_b + c_RG * scale_c + d_RG * scale_d
        else:
            total = _by_fours((a_RC + b_RC) + (c_RC + d_RC), ROWS, CELLS)
            if ZEROS:
                total -= zero.to(tl.float32) * _sum_by_fours((a + b) + (c + d), CELLS)[None, :]
            return total * scale.to(tl.float32)


@triton.jit
def _sum_by_fours(x_C2, CELLS: tl.constexpr):
    return tl.sum(tl.reshape(x_C2, [CELLS // 4, 8]), 1)


@triton.jit
def _store(sum_R, bias, out, output_R, inside_R, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        sum_R += tl.load(bias + output_R, mask=inside_R, other=0.0).to(tl.float32)
    tl.store(out + output_R, sum_R.to(out.dtype.element_ty), mask=inside_R)


@triton.jit
def _gemv(
    x, words, scales, zeros, bias, out, outputs, groups,
    INPUTS: tl.constexpr, ALL: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, CELLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies ROWS rows, CELLS cells at a time, and loads one tile ahead."""
    ZEROS: tl.constexpr = zeros is not None
    output_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = output_R < outputs
    cell_RC = _cells(words, output_R, inside_R, 0, ALL, EVEN, CELLS)
    scale = _entries(scales, output_R, inside_R, 0, groups, GROUP, CELLS)
    zero = _entries(zeros, output_R, inside_R, 0, groups, GROUP, CELLS) if ZEROS else 0
    total_RG = tl.zeros((ROWS, CELLS // 4), tl.float32)
    pdl_wait(PDL)
    for ahead in tl.range(CELLS, ALL, CELLS, num_stages=1):
        next_RC = _cells(words, output_R, inside_R, ahead, ALL, EVEN, CELLS)
        next_scale = _entries(scales, output_R, inside_R, ahead, groups, GROUP, CELLS)
        next_zero = _entries(zeros, output_R, inside_R, ahead, groups, GROUP, CELLS) if ZEROS else 0
        at = ahead - CELLS
        total_RG += _sums(
            cell_RC, scale, zero, _wide(x, at, 0, INPUTS, CELLS), _wide(x, at, 1, INPUTS, CELLS),
            _wide(x, at, 2, INPUTS, CELLS), _wide(x, at, 3, INPUTS, CELLS), GROUP, ZEROS, PTX, ROWS, CELLS,
        )  # fmt: skip
        cell_RC, scale, zero = next_RC, next_scale, next_zero
    pdl_launch_dependents(PDL)
    at = (ALL - 1) // CELLS * CELLS
    total_RG += _sums(
        cell_RC, scale, zero, _wide(x, at, 0, INPUTS, CELLS), _wide(x, at, 1, INPUTS, CELLS),
        _wide(x, at, 2, INPUTS, CELLS), _wide(x, at, 3, INPUTS, CELLS), GROUP, ZEROS, PTX, ROWS, CELLS,
    )  # fmt: skip
    _store(tl.sum(total_RG, 1), bias, out, output_R, inside_R, HAS_BIAS)


@triton.jit
def _added(x, residual, total, quarter: tl.constexpr, INPUTS: tl.constexpr, CELLS: tl.constexpr):
    """A quarter of x + residual in the dtype of x, as float32; program 0 stores it."""
    own = _quarter(x, 0, quarter, INPUTS, CELLS)
    if residual is not None:
        own = (own.to(tl.float32) + _wide(residual, 0, quarter, INPUTS, CELLS)).to(own.dtype)
        if tl.program_id(0) == 0:
            place = _places(0, quarter, CELLS)
            tl.store(total + place, own, mask=place < INPUTS)
    return own.to(tl.float32)


@triton.jit
def _gemv_rows(
    x, residual, norm_weight, words, scales, zeros, bias, out, total, eps, outputs, groups,
    INPUTS: tl.constexpr, ALL: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, CELLS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies TILES tiles of ROWS whole rows, and loads one tile ahead.

    With `norm_weight` it normalises x + residual first, and program 0 stores their sum.
    """
    ZEROS: tl.constexpr = zeros is not None
    dtype: tl.constexpr = x.dtype.element_ty
    output_R = tl.program_id(0) * (TILES * ROWS) + tl.arange(0, ROWS)
    next_RC = _cells(words, output_R, output_R < outputs, 0, ALL, EVEN, CELLS)
    next_scale = _entries(scales, output_R, output_R < outputs, 0, groups, GROUP, CELLS)
    next_zero = _entries(zeros, output_R, output_R < outputs, 0, groups, GROUP, CELLS) if ZEROS else 0
    if norm_weight is not None:
        norm_a, norm_b = _wide(norm_weight, 0, 0, INPUTS, CELLS), _wide(norm_weight, 0, 1, INPUTS, CELLS)
        norm_c, norm_d = _wide(norm_weight, 0, 2, INPUTS, CELLS), _wide(norm_weight, 0, 3, INPUTS, CELLS)
    pdl_wait(PDL)
    a, b = _added(x, residual, total, 0, INPUTS, CELLS), _added(x, residual, total, 1, INPUTS, CELLS)
    c, d = _added(x, residual, total, 2, INPUTS, CELLS), _added(x, residual, total, 3, INPUTS, CELLS)
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum((a * a + b * b) + (c * c + d * d)) / INPUTS + eps)
        a, b = (a * factor * norm_a).to(dtype).to(tl.float32), (b * factor * norm_b).to(dtype).to(tl.float32)
        c, d = (c * factor * norm_c).to(dtype).to(tl.float32), (d * factor * norm_d).to(dtype).to(tl.float32)
    pdl_launch_dependents(PDL)
    for tile in tl.static_range(TILES):
        cell_RC, scale, zero = next_RC, next_scale, next_zero
        at_R = output_R + tile * ROWS
        if tile + 1 < TILES:
            ahead_R = at_R + ROWS
            next_RC = _cells(words, ahead_R, ahead_R < outputs, 0, ALL, EVEN, CELLS)
            next_scale = _entries(scales, ahead_R, ahead_R < outputs, 0, groups, GROUP, CELLS)
            next_zero = _entries(zeros, ahead_R, ahead_R < outputs, 0, groups, GROUP, CELLS) if ZEROS else 0
        sums_RG = _sums(cell_RC, scale, zero, a, b, c, d, GROUP, ZEROS, PTX, ROWS, CELLS)
        _store(tl.sum(sums_RG, 1), bias, out, at_R, at_R < outputs, HAS_BIAS)


def multiply(
    plan: GemvPlan,
    x_TI: Tensor,
    weight: FourBitWords,
    bias: Tensor | None,
    out_TO: Tensor,
    residual_TI: Tensor | None = None,
    norm_weight_I: Tensor | None = None,
    eps: float = 0.0,
    total_TI: Tensor | None = None,
) -> None:
    """Fill `out_TO` [1, O], and `total_TI` with x + residual; a norm needs a plan by whole rows."""
    outputs, inputs = weight.shape
    words = weight.words.view(torch.int32)
    groups = weight.scales.shape[1]
    stored = words.shape[1]
    cells = plan.columns // _CODES or triton.next_power_of_2(stored)
    each = plan.rows * plan.tiles
    options = settings_of(weight) | {
        "INPUTS": inputs, "ALL": stored, "HAS_BIAS": bias is not None, "PTX": not INTERPRETED,
        "EVEN": outputs % each == 0 and stored % cells == 0, "ROWS": plan.rows, "CELLS": cells,
        "num_warps": plan.warps, **launch_options(x_TI.device),
    }  # fmt: skip
    grid = (triton.cdiv(outputs, each),)
    if plan.columns:
        _gemv[grid](
            x_TI, words, weight.scales, weight.zeros, bias, out_TO, outputs, groups, **options
        )  # fmt: skip
        return
    _gemv_rows[grid](
        x_TI, residual_TI, norm_weight_I, words, weight.scales, weight.zeros, bias, out_TO, total_TI, eps,
        outputs, groups, TILES=plan.tiles, **options,
    )  # fmt: skip
