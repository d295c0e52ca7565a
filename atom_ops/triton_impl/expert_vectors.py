"""Triton kernels of `experts` for quantized weights and few tokens: nothing is sorted or padded.

    _gate_up_8bit, _gate_up_4bit    a program for some features of a pair
    _down_8bit, _down_4bit          a program for some outputs of a token, over all of its experts

A row of a weight is cut into spans of 128 columns; a tile is [rows, spans, columns or words of a span],
or [rows, experts of the token, columns or words of a span].
The weights are read once; the activations are not rounded.
"""

import triton
import triton.language as tl

from atom_ops.triton_impl.expert_kernels import _gated
from atom_ops.triton_impl.four_bit import decode_words
from atom_ops.triton_impl.pdl import pdl_launch_dependents, pdl_wait


@triton.jit
def _tile(weight_RGC, inside_R, inside_GC, EVEN: tl.constexpr):
    if EVEN:
        tile_RGC = tl.load(weight_RGC)
    else:
        tile_RGC = tl.load(weight_RGC, mask=inside_R[:, None, None] & inside_GC[None, :, :], other=0.0)
    return tile_RGC.to(tl.float32)


@triton.jit
def _chosen_expert(ids, pair, experts, first_expert):
    """The expert of a pair, and whether it is one."""
    expert = tl.load(ids + pair) - first_expert
    known = (expert >= 0) & (expert < experts)
    return tl.where(known, expert, 0), known


@triton.jit
def _store_gated(
    gate_R, up_R, bias, bias_at, out_R, output_R, outputs, inside_R, limit, alpha,
    CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS:
        bias_R = bias + bias_at + output_R
        gate_R += tl.load(bias_R, mask=inside_R, other=0.0).to(tl.float32)
        up_R += tl.load(bias_R + outputs, mask=inside_R, other=0.0).to(tl.float32)
    inner_R = _gated(gate_R, up_R, CLAMPED, limit, alpha)
    tl.store(out_R, inner_R.to(out_R.dtype.element_ty), mask=inside_R)


@triton.jit(do_not_specialize=["experts", "first_expert", "chosen"])
def _gate_up_8bit(
    x, ids, weight, scales, bias, out, outputs, inputs, scale_rows, scale_columns, experts, first_expert,
    chosen, limit, alpha,
    BLOCK: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the features, pairs). Reads no weights for a pair without an expert.

    `scales` as in `_grouped_8bit`; ROWS divides BLOCK.
    """
    pdl_wait(PDL)
    pair = tl.program_id(1).to(tl.int64)
    expert, known = _chosen_expert(ids, pair, experts, first_expert)
    spans = tl.where(known, tl.cdiv(inputs, 128), 0)
    first = tl.program_id(0) * ROWS
    output_R, span_G, column_C = first + tl.arange(0, ROWS), tl.arange(0, SPANS), tl.arange(0, 128)
    inside_R = output_R < outputs
    x += pair // chosen * inputs
    column_GC = span_G[:, None] * 128 + column_C[None, :]
    gate_RGC = weight + ((expert * 2 * outputs + output_R) * inputs)[:, None, None] + column_GC[None, :, :]
    up_RGC = gate_RGC + outputs.to(tl.int64) * inputs
    gates_RGC = tl.zeros((ROWS, SPANS, 128), tl.float32)
    ups_RGC = tl.zeros((ROWS, SPANS, 128), tl.float32)
    if BLOCK > 0:
        gate_scales = scales + (expert * scale_rows + first // BLOCK) * scale_columns
        up_scales = scales + (expert * scale_rows + (outputs + first) // BLOCK) * scale_columns
    for span in tl.range(0, spans, SPANS, num_stages=STAGES):
        start = span * 128
        inside_GC = column_GC < inputs - start
        x_GC = tl.load(x + start + column_GC, mask=inside_GC, other=0.0).to(tl.float32)
        up_x_GC = x_GC
        if BLOCK > 0:
            at_G = (span + span_G) * 128 // BLOCK
            inside_G = at_G < scale_columns
            up_x_GC = x_GC * tl.load(up_scales + at_G, mask=inside_G, other=0.0)[:, None]
            x_GC *= tl.load(gate_scales + at_G, mask=inside_G, other=0.0)[:, None]
        gates_RGC += _tile(gate_RGC + start, inside_R, inside_GC, EVEN) * x_GC[None, :, :]
        ups_RGC += _tile(up_RGC + start, inside_R, inside_GC, EVEN) * up_x_GC[None, :, :]
    pdl_launch_dependents(PDL)
    gate_R, up_R = tl.sum(tl.sum(gates_RGC, 2), 1), tl.sum(tl.sum(ups_RGC, 2), 1)
    if BLOCK == 0:
        scale_R = scales + expert * scale_rows + output_R
        gate_R *= tl.load(scale_R, mask=inside_R, other=0.0)
        up_R *= tl.load(scale_R + outputs, mask=inside_R, other=0.0)
    _store_gated(
        gate_R, up_R, bias, expert * 2 * outputs, out + pair * outputs + output_R, output_R, outputs,
        inside_R, limit, alpha, CLAMPED, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _experts_of_token(
    ids, shares, token, experts, first_expert, CHOSEN: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    """Pairs of a token, their experts and shares, and which of them have an expert."""
    place_J = tl.arange(0, BLOCK_J)
    pair_J, chosen_J = token * CHOSEN + place_J, place_J < CHOSEN
    expert_J = tl.load(ids + pair_J, mask=chosen_J, other=-1) - first_expert
    chosen_J = chosen_J & (expert_J >= 0) & (expert_J < experts)
    share_J = tl.load(shares + pair_J, mask=chosen_J, other=0.0)
    return pair_J, tl.where(chosen_J, expert_J, 0), share_J, chosen_J


@triton.jit
def _bias_of_token(bias, row_RJ, inside_RJ, share_J):
    """The weighted sum of the biases of a token's experts."""
    bias_RJ = tl.load(bias + row_RJ, mask=inside_RJ, other=0.0).to(tl.float32)
    return tl.sum(bias_RJ * share_J[None, :], 1)


@triton.jit(do_not_specialize=["experts", "first_expert"])
def _down_8bit(
    inner, ids, shares, weight, scales, bias, out, outputs, inputs, scale_rows, scale_columns, experts,
    first_expert, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_J: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the outputs, tokens). EVEN: all rows, columns and experts of the tiles exist."""
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    output_R, column_C = first + tl.arange(0, ROWS), tl.arange(0, 128)
    inside_R = output_R < outputs
    pair_J, expert_J, share_J, chosen_J = _experts_of_token(
        ids, shares, token, experts, first_expert, CHOSEN, BLOCK_J
    )  # fmt: skip
    row_RJ = expert_J[None, :] * outputs + output_R[:, None]
    inside_RJ = inside_R[:, None] & chosen_J[None, :]
    weight_RJC = weight + (row_RJ * inputs)[:, :, None] + column_C[None, None, :]
    inner_JC = inner + (pair_J * inputs)[:, None] + column_C[None, :]
    scale_J = scales + (expert_J * scale_rows + first // BLOCK) * scale_columns if BLOCK > 0 else share_J
    total_RJC = tl.zeros((ROWS, BLOCK_J, 128), tl.float32)
    for start in tl.range(0, inputs, 128, num_stages=STAGES):
        inside_JC = chosen_J[:, None] & (column_C < inputs - start)[None, :]
        factor_J = share_J
        if BLOCK > 0:
            factor_J *= tl.load(scale_J + start // BLOCK, mask=chosen_J, other=0.0)
        part_JC = tl.load(inner_JC + start, mask=inside_JC, other=0.0).to(tl.float32) * factor_J[:, None]
        part_RJC = _tile(weight_RJC + start, inside_R, inside_JC, EVEN)
        total_RJC += part_RJC * part_JC[None, :, :]
    pdl_launch_dependents(PDL)
    total_RJ = tl.sum(total_RJC, 2)
    if BLOCK == 0:
        scale_RJ = scales + expert_J[None, :] * scale_rows + output_R[:, None]
        total_RJ *= tl.load(scale_RJ, mask=inside_RJ, other=0.0)
    out_R = tl.sum(total_RJ, 1)
    if HAS_BIAS:
        out_R += _bias_of_token(bias, row_RJ, inside_RJ, share_J)
    tl.store(out + token * outputs + output_R, out_R.to(out.dtype.element_ty), mask=inside_R)


@triton.jit
def _quarter(x_GC, column_GC, inputs, inside_G, quarter: tl.constexpr):
    inside_GC = inside_G[:, None] & (column_GC + quarter * 32 < inputs)
    return tl.load(x_GC + quarter * 32, mask=inside_GC, other=0.0).to(tl.float32)


@triton.jit
def _words(weight_RGC, inside_R, inside_G, EVEN: tl.constexpr):
    if EVEN:
        words_RGC = tl.load(weight_RGC)
    else:
        words_RGC = tl.load(weight_RGC, mask=(inside_R[:, None] & inside_G[None, :])[:, :, None], other=0)
    return words_RGC


@triton.jit
def _product_4bit(
    words_RGC, x_a, x_b, x_c, x_d, scales, zeros, row_RG, chunk, inside_RG, groups,
    GROUP: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """[R, G, 32] in float32: the sum over the quarters."""
    a, b, c, d = decode_words(words_RGC, scales, zeros, row_RG, chunk, inside_RG, groups, GROUP, dtype, PTX)
    part_RGC = a.to(tl.float32) * x_a[None, :, :]
    part_RGC += b.to(tl.float32) * x_b[None, :, :]
    part_RGC += c.to(tl.float32) * x_c[None, :, :]
    part_RGC += d.to(tl.float32) * x_d[None, :, :]
    return part_RGC


@triton.jit(do_not_specialize=["experts", "first_expert", "chosen"])
def _gate_up_4bit(
    x, ids, weight, scales, zeros, bias, out, outputs, inputs, groups, experts, first_expert, chosen,
    limit, alpha,
    GROUP: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
    ROWS: tl.constexpr, SPANS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the features, pairs). Reads no weights for a pair without an expert."""
    pdl_wait(PDL)
    pair = tl.program_id(1).to(tl.int64)
    expert, known = _chosen_expert(ids, pair, experts, first_expert)
    row_chunks = tl.cdiv(inputs, 128)
    chunks = tl.where(known, row_chunks, 0)
    output_R, span_G = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SPANS)
    inside_R = output_R < outputs
    row_RG = (expert * 2 * outputs + output_R)[:, None] + span_G[None, :] * 0
    word_GC = span_G[:, None] * 32 + tl.arange(0, 32)[None, :]
    column_GC = span_G[:, None] * 128 + tl.arange(0, 32)[None, :]
    gate_RGC = (
        weight + ((expert * 2 * outputs + output_R) * (row_chunks * 32))[:, None, None] + word_GC[None, :, :]
    )
    up_RGC = gate_RGC + outputs.to(tl.int64) * (row_chunks * 32)
    x += pair // chosen * inputs
    gates_RGC = tl.zeros((ROWS, SPANS, 32), tl.float32)
    ups_RGC = tl.zeros((ROWS, SPANS, 32), tl.float32)
    for chunk in tl.range(0, chunks, SPANS, num_stages=STAGES):
        chunk_G = chunk + span_G
        inside_G = chunk_G < chunks
        inside_RG = inside_R[:, None] & inside_G[None, :]
        at_GC = chunk * 128 + column_GC
        x_a = _quarter(x + at_GC, at_GC, inputs, inside_G, 0)
        x_b = _quarter(x + at_GC, at_GC, inputs, inside_G, 1)
        x_c = _quarter(x + at_GC, at_GC, inputs, inside_G, 2)
        x_d = _quarter(x + at_GC, at_GC, inputs, inside_G, 3)
        words_RGC = _words(gate_RGC + chunk * 32, inside_R, inside_G, EVEN)
        gates_RGC += _product_4bit(
            words_RGC, x_a, x_b, x_c, x_d, scales, zeros, row_RG, chunk_G[None, :], inside_RG, groups, GROUP,
            x.dtype.element_ty, PTX,
        )  # fmt: skip
        words_RGC = _words(up_RGC + chunk * 32, inside_R, inside_G, EVEN)
        ups_RGC += _product_4bit(
            words_RGC, x_a, x_b, x_c, x_d, scales, zeros, row_RG + outputs, chunk_G[None, :], inside_RG,
            groups, GROUP, x.dtype.element_ty, PTX,
        )  # fmt: skip
    pdl_launch_dependents(PDL)
    gate_R, up_R = tl.sum(tl.sum(gates_RGC, 2), 1), tl.sum(tl.sum(ups_RGC, 2), 1)
    _store_gated(
        gate_R, up_R, bias, expert * 2 * outputs, out + pair * outputs + output_R, output_R, outputs,
        inside_R, limit, alpha, CLAMPED, HAS_BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["experts", "first_expert"])
def _down_4bit(
    inner, ids, shares, weight, scales, zeros, bias, out, outputs, inputs, groups, experts, first_expert,
    GROUP: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_J: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, PTX: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the outputs, tokens). EVEN: all rows and experts of the tiles exist."""
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    output_R, column_C = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, 32)
    inside_R = output_R < outputs
    chunks = tl.cdiv(inputs, 128)
    pair_J, expert_J, share_J, chosen_J = _experts_of_token(
        ids, shares, token, experts, first_expert, CHOSEN, BLOCK_J
    )  # fmt: skip
    row_RJ = expert_J[None, :] * outputs + output_R[:, None]
    inside_RJ = inside_R[:, None] & chosen_J[None, :]
    weight_RJC = weight + (row_RJ * (chunks * 32))[:, :, None] + column_C[None, None, :]
    inner_JC = inner + (pair_J * inputs)[:, None] + column_C[None, :]
    total_RJC = tl.zeros((ROWS, BLOCK_J, 32), tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        at_JC = inner_JC + chunk * 128
        column_JC = (chunk * 128 + column_C)[None, :]
        x_a = _quarter(at_JC, column_JC, inputs, chosen_J, 0)
        x_b = _quarter(at_JC, column_JC, inputs, chosen_J, 1)
        x_c = _quarter(at_JC, column_JC, inputs, chosen_J, 2)
        x_d = _quarter(at_JC, column_JC, inputs, chosen_J, 3)
        words_RJC = _words(weight_RJC + chunk * 32, inside_R, chosen_J, EVEN)
        total_RJC += _product_4bit(
            words_RJC, x_a, x_b, x_c, x_d, scales, zeros, row_RJ, chunk, inside_RJ, groups, GROUP,
            inner.dtype.element_ty, PTX,
        )  # fmt: skip
    pdl_launch_dependents(PDL)
    out_R = tl.sum(tl.sum(total_RJC, 2) * share_J[None, :], 1)
    if HAS_BIAS:
        out_R += _bias_of_token(bias, row_RJ, inside_RJ, share_J)
    tl.store(out + token * outputs + output_R, out_R.to(out.dtype.element_ty), mask=inside_R)
