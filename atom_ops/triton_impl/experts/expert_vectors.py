"""Triton kernels of `experts` for quantized weights and few tokens: nothing is sorted or padded.

    _gate_up_8bit, _gate_up_4bit    a program for some features of a pair
    _down_8bit, _down_4bit          a program for some outputs of a token, over all of its experts

The weights are read once; the activations are not rounded. A row of a weight is cut into spans of 128
columns. 8 bits: a tile is [rows, spans, columns of a span], or [rows, experts of the token, columns of a
span]. 4 bits: decoding limits, so the products are left to tensor cores, although most columns of their
second operand are unused; a tile is [rows, columns of a span].
"""

import triton
import triton.language as tl

from atom_ops.triton_impl.experts.expert_kernels import _gated
from atom_ops.triton_impl.hardware.pdl import pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.quantized.four_bit import decode_words, join_quarters


@triton.jit
def _tile(weight_RGC, inside_R, inside_GC, EVEN: tl.constexpr):
    if EVEN:
        tile_RGC = tl.load(weight_RGC)
    else:
        tile_RGC = tl.load(weight_RGC, mask=inside_R[:, None, None] & inside_GC[None, :, :], other=0.0)
    return tile_RGC.to(tl.float32)


@triton.jit
def _expert_here(topk_ids, pair, experts, first_expert):
    """The expert of a pair, and whether it is one."""
    expert = tl.load(topk_ids + pair) - first_expert
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


@triton.jit(do_not_specialize=["experts", "first_expert", "top_k"])
def _gate_up_8bit(
    x, topk_ids, weight, scales, bias, out, outputs, inputs, scale_rows, scale_columns, experts, first_expert,
    top_k, limit, alpha,
    BLOCK: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the features, pairs). Reads no weights for a pair without an expert.

    `scales` as in `_grouped_8bit`; ROWS divides BLOCK.
    """
    pdl_wait(PDL)
    pair = tl.program_id(1).to(tl.int64)
    expert, known = _expert_here(topk_ids, pair, experts, first_expert)
    spans = tl.where(known, tl.cdiv(inputs, 128), 0)
    first = tl.program_id(0) * ROWS
    output_R = first + tl.arange(0, ROWS)
    span_G = tl.arange(0, SPANS)
    column_C = tl.arange(0, 128)
    inside_R = output_R < outputs
    x += pair // top_k * inputs
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
    topk_ids, topk_weights, token, experts, first_expert, TOP_K: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    """Pairs of a token, their experts and weights, and which of them have an expert."""
    place_J = tl.arange(0, BLOCK_J)
    pair_J = token * TOP_K + place_J
    here_J = place_J < TOP_K
    expert_J = tl.load(topk_ids + pair_J, mask=here_J, other=-1) - first_expert
    here_J = here_J & (expert_J >= 0) & (expert_J < experts)
    topk_weight_J = tl.load(topk_weights + pair_J, mask=here_J, other=0.0)
    return pair_J, tl.where(here_J, expert_J, 0), topk_weight_J, here_J


@triton.jit
def _bias_of_token(bias, row_RJ, inside_RJ, topk_weight_J):
    """The weighted sum of the biases of a token's experts."""
    bias_RJ = tl.load(bias + row_RJ, mask=inside_RJ, other=0.0).to(tl.float32)
    return tl.sum(bias_RJ * topk_weight_J[None, :], 1)


@triton.jit(do_not_specialize=["experts", "first_expert"])
def _down_8bit(
    inner, topk_ids, topk_weights, weight, scales, bias, out, outputs, inputs, scale_rows, scale_columns,
    experts, first_expert, BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_J: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the outputs, tokens). EVEN: all rows, columns and experts of the tiles exist."""
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    output_R = first + tl.arange(0, ROWS)
    column_C = tl.arange(0, 128)
    inside_R = output_R < outputs
    pair_J, expert_J, topk_weight_J, here_J = _experts_of_token(
        topk_ids, topk_weights, token, experts, first_expert, TOP_K, BLOCK_J
    )  # fmt: skip
    row_RJ = expert_J[None, :] * outputs + output_R[:, None]
    inside_RJ = inside_R[:, None] & here_J[None, :]
    weight_RJC = weight + (row_RJ * inputs)[:, :, None] + column_C[None, None, :]
    inner_JC = inner + (pair_J * inputs)[:, None] + column_C[None, :]
    scale_J = (
        scales + (expert_J * scale_rows + first // BLOCK) * scale_columns if BLOCK > 0 else topk_weight_J
    )
    total_RJC = tl.zeros((ROWS, BLOCK_J, 128), tl.float32)
    for start in tl.range(0, inputs, 128, num_stages=STAGES):
        inside_JC = here_J[:, None] & (column_C < inputs - start)[None, :]
        factor_J = topk_weight_J
        if BLOCK > 0:
            factor_J *= tl.load(scale_J + start // BLOCK, mask=here_J, other=0.0)
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
        out_R += _bias_of_token(bias, row_RJ, inside_RJ, topk_weight_J)
    tl.store(out + token * outputs + output_R, out_R.to(out.dtype.element_ty), mask=inside_R)


@triton.jit
def _decoded(
    weight_RC, scales, zeros, row_R, chunk, inside_R, groups, dtype: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A chunk of these rows, [ROWS, 128]; `weight_RC` points to its words."""
    words_RC = tl.load(weight_RC) if EVEN else tl.load(weight_RC, mask=inside_R[:, None], other=0)
    a, b, c, d = decode_words(words_RC, scales, zeros, row_R, chunk, inside_R, groups, GROUP, dtype, PTX)
    return tl.reshape(join_quarters(a, b, c, d), [ROWS, 128])


@triton.jit(do_not_specialize=["experts", "first_expert", "top_k"])
def _gate_up_4bit(
    x, topk_ids, weight, scales, zeros, bias, out, outputs, inputs, groups, experts, first_expert, top_k,
    limit, alpha,
    GROUP: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the features, pairs). Reads no weights for a pair without an expert.

    On tensor cores, whose second operand has WIDTH columns: x is the first one, the others are zeros.
    """
    pdl_wait(PDL)
    pair = tl.program_id(1).to(tl.int64)
    expert, known = _expert_here(topk_ids, pair, experts, first_expert)
    row_chunks = tl.cdiv(inputs, 128)
    chunks = tl.where(known, row_chunks, 0)
    # Rows of the gate, then of up.
    place_R = tl.arange(0, 2 * ROWS)
    feature_R = tl.program_id(0) * ROWS + place_R % ROWS
    inside_R = feature_R < outputs
    row_R = expert * 2 * outputs + place_R // ROWS * outputs + feature_R
    weight_RC = weight + row_R[:, None] * (row_chunks * 32) + tl.arange(0, 32)[None, :]
    column_C = tl.arange(0, 128)
    number_N = tl.arange(0, WIDTH)
    x_CN = x + pair // top_k * inputs + column_C[:, None] + number_N[None, :] * 0
    total_RN = tl.zeros((2 * ROWS, WIDTH), tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        inside_CN = (column_C < inputs - chunk * 128)[:, None] & (number_N == 0)[None, :]
        part_CN = tl.load(x_CN + chunk * 128, mask=inside_CN, other=0.0)
        weight_RI = _decoded(
            weight_RC + chunk * 32, scales, zeros, row_R, chunk, inside_R, groups, x.dtype.element_ty,
            GROUP, EVEN, 2 * ROWS, PTX,
        )  # fmt: skip
        total_RN = tl.dot(weight_RI, part_CN, total_RN, input_precision="ieee")
    pdl_launch_dependents(PDL)
    gate_R, up_R = tl.sum(total_RN, 1).reshape(2, ROWS).permute(1, 0).split()
    output_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _store_gated(
        gate_R, up_R, bias, expert * 2 * outputs, out + pair * outputs + output_R, output_R, outputs,
        output_R < outputs, limit, alpha, CLAMPED, HAS_BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["experts", "first_expert"])
def _down_4bit(
    inner, topk_ids, topk_weights, weight, scales, zeros, bias, out, outputs, inputs, groups,
    experts, first_expert, GROUP: tl.constexpr, TOP_K: tl.constexpr, BLOCK_J: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the outputs, tokens). EVEN: all rows and experts of the tiles exist.

    The rows of all experts are one operand and the activations of each a column of the other one; of the
    result only the sums of an expert's rows with its own activations are used.
    """
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    chunks = tl.cdiv(inputs, 128)
    place_M = tl.arange(0, BLOCK_J * ROWS)
    output_M = tl.program_id(0) * ROWS + place_M % ROWS
    place_J = place_M // ROWS
    expert_M = tl.load(topk_ids + token * TOP_K + place_J, mask=place_J < TOP_K, other=-1) - first_expert
    inside_M = (output_M < outputs) & (place_J < TOP_K) & (expert_M >= 0) & (expert_M < experts)
    row_M = tl.where(inside_M, expert_M, 0) * outputs + output_M
    weight_MC = weight + row_M[:, None] * (chunks * 32) + tl.arange(0, 32)[None, :]
    column_C = tl.arange(0, 128)
    number_N = tl.arange(0, WIDTH)
    expert_N = tl.load(topk_ids + token * TOP_K + number_N, mask=number_N < TOP_K, other=-1) - first_expert
    known_N = (number_N < TOP_K) & (expert_N >= 0) & (expert_N < experts)
    inner_CN = inner + ((token * TOP_K + number_N) * inputs)[None, :] + column_C[:, None]
    total_MN = tl.zeros((BLOCK_J * ROWS, WIDTH), tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        inside_CN = (column_C < inputs - chunk * 128)[:, None] & known_N[None, :]
        part_CN = tl.load(inner_CN + chunk * 128, mask=inside_CN, other=0.0)
        weight_MI = _decoded(
            weight_MC + chunk * 32, scales, zeros, row_M, chunk, inside_M, groups, inner.dtype.element_ty,
            GROUP, EVEN, BLOCK_J * ROWS, PTX,
        )  # fmt: skip
        total_MN = tl.dot(weight_MI, part_CN, total_MN, input_precision="ieee")
    pdl_launch_dependents(PDL)
    own_MN = place_J[:, None] == number_N[None, :]
    total_M = tl.sum(tl.where(own_MN, total_MN, 0.0), 1)
    if HAS_BIAS:
        total_M += tl.load(bias + row_M, mask=inside_M, other=0.0).to(tl.float32)
    total_M *= tl.load(topk_weights + token * TOP_K + place_J, mask=inside_M, other=0.0)
    out_R = tl.sum(tl.reshape(total_M, [BLOCK_J, ROWS]), 0)
    output_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + token * outputs + output_R, out_R.to(out.dtype.element_ty), mask=output_R < outputs)
