"""Triton kernels of `experts` for quantized weights and many tokens: grouped GEMMs over blocks of one expert.

    _round_groups     x -> e4m3 or int8, a scale for each group of 128 inputs
    _grouped_8bit     FP8 and INT8 weights times such activations, on tensor cores of that type
    _grouped_4bit     MXFP4 and INT4 weights, decoded in registers, times 16-bit activations

As in `expert_kernels`, gate and up store in the order of the experts, and down in that of the pairs.
"""

import triton
import triton.language as tl

from atom_ops.triton_impl.experts.expert_kernels import _gated, _weight_tile, _with_bias
from atom_ops.triton_impl.hardware.pdl import pdl_begin, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.quantized.four_bit import decode_words, join_quarters

_LARGEST_FP8 = tl.constexpr(448.0)
_LARGEST_INT8 = tl.constexpr(127.0)


@triton.jit
def _rounded(x_TC, INTEGER: tl.constexpr):
    """x in 8 bits and its scales [T], one for each row; NaN reaches the whole row."""
    largest: tl.constexpr = _LARGEST_INT8 if INTEGER else _LARGEST_FP8
    most_T = tl.max(tl.abs(x_TC), 1)
    scale_T = tl.maximum(most_T, 1e-20) / largest
    invalid_T = tl.max((x_TC != x_TC).to(tl.int32), 1)
    scale_T = tl.where(invalid_T > 0, float("nan"), scale_T)
    scaled_TC = tl.clamp(x_TC / scale_T[:, None], -largest, largest)
    code_TC = tl.floor(scaled_TC + 0.5).to(tl.int8) if INTEGER else scaled_TC.to(tl.float8e4nv)
    return code_TC, scale_T


@triton.jit
def _round_groups(
    x, codes, scales, size, groups,
    INTEGER: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of GROUPS groups)."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    group_G = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column_GC = group_G[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_GC = tl.load(x + token * size + column_GC, mask=column_GC < size, other=0.0).to(tl.float32)
    code_GC, scale_G = _rounded(x_GC, INTEGER)
    tl.store(codes + token * size + column_GC, code_GC, mask=column_GC < size)
    tl.store(scales + token * groups + group_G, scale_G, mask=group_G < groups)


@triton.jit
def _scaled_product(x_TC, weight_RC, scale_T, scale, SWAPPED: tl.constexpr, INTEGER: tl.constexpr):
    """x times the weight in float32, scaled."""
    kind: tl.constexpr = tl.int32 if INTEGER else tl.float32
    if SWAPPED:
        part = tl.dot(weight_RC, tl.trans(x_TC), out_dtype=kind).to(tl.float32)
        return part * (scale_T * scale)[None, :]
    else:
        part = tl.dot(x_TC, tl.trans(weight_RC), out_dtype=kind).to(tl.float32)
        return part * (scale_T * scale)[:, None]


@triton.jit(do_not_specialize=["top_k"])
def _grouped_8bit(
    x, x_scales, weight, scales, bias, order, blocks, out, out_scales,
    outputs, inputs, x_groups, scale_rows, scale_columns, top_k, limit, alpha,
    INTEGER: tl.constexpr, BLOCK: tl.constexpr, X_GROUP: tl.constexpr,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    DESCRIBED: tl.constexpr, EVEN: tl.constexpr, SWAPPED: tl.constexpr, PERSISTENT: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the greatest possible number of blocks,), fewer if PERSISTENT.

    `x_scales` [.., x_groups]: one for X_GROUP columns. `scales` [X, scale_rows, scale_columns]: one for
    BLOCK rows (a multiple of ROWS) and columns; BLOCK 0: one for a row, scale_rows of an expert. GATED
    stores rounded activations, with one scale for ROWS columns in `out_scales` [.., tiles of a block].
    """
    pdl_wait(PDL)
    tiles_of_block = tl.cdiv(outputs, ROWS)
    tiles = tl.load(blocks) * tiles_of_block
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=PERSISTENT):
        block = blocks + 4 + number // tiles_of_block * 4
        tile = number % tiles_of_block
        first_output = tile * ROWS
        expert, first, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
        at_T = first + tl.arange(0, TOKENS)
        real_T = at_T < end
        pair_T = tl.load(order + at_T, mask=real_T, other=0)
        row_T = (pair_T // top_k if GATED else at_T).to(tl.int64)
        column_C = tl.arange(0, COLUMNS)
        x_TC = x + row_T[:, None] * inputs + column_C[None, :]
        x_scale_T = x_scales + row_T * x_groups
        first_row = expert * (2 * outputs if GATED else outputs) + first_output
        left = outputs - first_output
        if BLOCK > 0:
            scale = scales + (expert * scale_rows + first_output // BLOCK).to(tl.int64) * scale_columns
            scale_up = scale
            if GATED:
                scale_up += outputs // BLOCK * scale_columns
        total = tl.zeros((ROWS, TOKENS) if SWAPPED else (TOKENS, ROWS), tl.float32)
        if GATED:
            total_up = tl.zeros((ROWS, TOKENS) if SWAPPED else (TOKENS, ROWS), tl.float32)
        for start in range(0, inputs, COLUMNS):
            if EVEN:
                part_TC = tl.load(x_TC + start, mask=real_T[:, None], other=0.0)
            else:
                inside_TC = real_T[:, None] & (column_C < inputs - start)[None, :]
                part_TC = tl.load(x_TC + start, mask=inside_TC, other=0.0)
            of_x_T = tl.load(x_scale_T + start // X_GROUP, mask=real_T, other=0.0)
            of_weight = 1.0
            if BLOCK > 0:
                of_weight = tl.load(scale + start // BLOCK)
            part_RC = _weight_tile(weight, first_row, start, left, inputs, DESCRIBED, EVEN, ROWS, COLUMNS)
            total += _scaled_product(part_TC, part_RC, of_x_T, of_weight, SWAPPED, INTEGER)
            if GATED:
                if BLOCK > 0:
                    of_weight = tl.load(scale_up + start // BLOCK)
                part_RC = _weight_tile(
                    weight, first_row + outputs, start, left, inputs, DESCRIBED, EVEN, ROWS, COLUMNS
                )
                total_up += _scaled_product(part_TC, part_RC, of_x_T, of_weight, SWAPPED, INTEGER)
        output_R = first_output + tl.arange(0, ROWS)
        inside_R = output_R < outputs
        row_at = expert.to(tl.int64) * (2 * outputs if GATED else outputs)
        if BLOCK == 0:
            scale_R = tl.load(scales + row_at + output_R, mask=inside_R, other=0.0)
            total *= scale_R[:, None] if SWAPPED else scale_R[None, :]
            if GATED:
                scale_R = tl.load(scales + row_at + outputs + output_R, mask=inside_R, other=0.0)
                total_up *= scale_R[:, None] if SWAPPED else scale_R[None, :]
        out_TR = _with_bias(total, bias, row_at, output_R, outputs, SWAPPED, HAS_BIAS)
        stored_T = (at_T if GATED else pair_T).to(tl.int64)
        out_at_TR = out + stored_T[:, None] * outputs + output_R[None, :]
        inside_TR = real_T[:, None] & inside_R[None, :]
        if GATED:
            up_TR = _with_bias(total_up, bias, row_at + outputs, output_R, outputs, SWAPPED, HAS_BIAS)
            inner_TR = tl.where(inside_R[None, :], _gated(out_TR, up_TR, CLAMPED, limit, alpha), 0.0)
            code_TR, scale_T = _rounded(inner_TR, INTEGER)
            tl.store(out_at_TR, code_TR, mask=inside_TR)
            tl.store(out_scales + stored_T * tiles_of_block + tile, scale_T, mask=real_T)
        else:
            tl.store(out_at_TR, out_TR.to(out.dtype.element_ty), mask=inside_TR)
    pdl_launch_dependents(PDL)


@triton.jit
def _decoded_rows(
    weight, scales, zeros, first_row, chunk, left, chunks, groups, dtype: tl.constexpr,
    GROUP: tl.constexpr, DESCRIBED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A chunk of the weight, [ROWS, 128]."""
    words_RC = _weight_tile(weight, first_row, chunk * 32, left, chunks * 32, DESCRIBED, EVEN, ROWS, 32)
    row_R = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    inside_R = tl.arange(0, ROWS) < left
    a, b, c, d = decode_words(words_RC, scales, zeros, row_R, chunk, inside_R, groups, GROUP, dtype, PTX)
    return tl.reshape(join_quarters(a, b, c, d), [ROWS, 128])


@triton.jit(do_not_specialize=["top_k"])
def _grouped_4bit(
    x, weight, scales, zeros, bias, order, blocks, out,
    outputs, inputs, chunks, groups, top_k, limit, alpha,
    GROUP: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    DESCRIBED: tl.constexpr, EVEN: tl.constexpr, PERSISTENT: tl.constexpr, PTX: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the greatest possible number of blocks,), fewer if PERSISTENT. See `four_bit`.

    The weight is the first operand, in registers; gate and up are one of twice the rows, because WGMMAs
    of two accumulators with operands in registers wait for one another.
    """
    pdl_wait(PDL)
    tiles_of_block = tl.cdiv(outputs, ROWS)
    tiles = tl.load(blocks) * tiles_of_block
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=PERSISTENT):
        block = blocks + 4 + number // tiles_of_block * 4
        first_output = number % tiles_of_block * ROWS
        expert, first, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
        at_T = first + tl.arange(0, TOKENS)
        real_T = at_T < end
        pair_T = tl.load(order + at_T, mask=real_T, other=0)
        row_T = pair_T // top_k if GATED else at_T
        column_C = tl.arange(0, 128)
        x_TC = x + row_T.to(tl.int64)[:, None] * inputs + column_C[None, :]
        first_row = expert * (2 * outputs if GATED else outputs) + first_output
        left = outputs - first_output
        total = tl.zeros((2 * ROWS if GATED else ROWS, TOKENS), tl.float32)
        for chunk in range(chunks):
            if EVEN:
                part_TC = tl.load(x_TC + chunk * 128, mask=real_T[:, None], other=0.0)
            else:
                inside_TC = real_T[:, None] & (column_C < inputs - chunk * 128)[None, :]
                part_TC = tl.load(x_TC + chunk * 128, mask=inside_TC, other=0.0)
            weight_RC = _decoded_rows(
                weight, scales, zeros, first_row, chunk, left, chunks, groups, x.dtype.element_ty,
                GROUP, DESCRIBED, EVEN, ROWS, PTX,
            )  # fmt: skip
            if GATED:
                up_RC = _decoded_rows(
                    weight, scales, zeros, first_row + outputs, chunk, left, chunks, groups,
                    x.dtype.element_ty, GROUP, DESCRIBED, EVEN, ROWS, PTX,
                )  # fmt: skip
                weight_RC = tl.join(weight_RC, up_RC).permute(2, 0, 1).reshape(2 * ROWS, 128)
            total = tl.dot(weight_RC, tl.trans(part_TC), total, input_precision="ieee")
        if GATED:
            total, total_up = total.reshape(2, ROWS, TOKENS).permute(1, 2, 0).split()
        output_R = first_output + tl.arange(0, ROWS)
        bias_at = expert.to(tl.int64) * (2 * outputs if GATED else outputs)
        out_TR = _with_bias(total, bias, bias_at, output_R, outputs, True, HAS_BIAS)
        if GATED:
            up_TR = _with_bias(total_up, bias, bias_at + outputs, output_R, outputs, True, HAS_BIAS)
            out_TR = _gated(out_TR, up_TR, CLAMPED, limit, alpha)
        stored_T = (at_T if GATED else pair_T).to(tl.int64)
        tl.store(
            out + stored_T[:, None] * outputs + output_R[None, :],
            out_TR.to(out.dtype.element_ty),
            mask=real_T[:, None] & (output_R < outputs)[None, :],
        )
    pdl_launch_dependents(PDL)
