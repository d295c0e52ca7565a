"""Triton kernels of `experts`.

T tokens, J experts per token, P = T * J token-expert pairs, X experts, D hidden, F expert features.

For many tokens, over the blocks of `expert_blocks`:

    _grouped_gemm   gate and up    x [T, D]     -> inner [P, F], in the order of the experts
                    down           inner [P, F] -> y [P, D], in the order of the pairs
    _sum_pairs      the weighted sum of each token's J rows of y in float32, always in the same order

For few tokens, where hardly two choose the same expert; nothing is sorted or padded:

    _gate_up        a program for some features of a pair
    _down           a program for some outputs of a token, over all of its experts
"""

import triton
import triton.language as tl

from atom_ops.triton_impl.hardware.pdl import pdl_begin, pdl_launch_dependents, pdl_wait


@triton.jit
def _gated(gate, up, CLAMPED: tl.constexpr, limit, alpha):
    """`clamped_swiglu` or `silu_and_mul`, in float32; CLAMPED as `clamp_kind`."""
    if CLAMPED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        if CLAMPED == 1:
            up += 1.0
        inner = up * (gate * tl.sigmoid(alpha * gate))
    else:
        inner = gate * tl.sigmoid(gate) * up
    return inner


@triton.jit
def _weight_tile(
    weight, first_row, first_column, rows, inputs,
    DESCRIBED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS]; rows from `rows` on are not this expert's, but a descriptor loads them."""
    if DESCRIBED:
        tile_RC = weight.load([first_row, first_column])
    else:
        row_R = tl.arange(0, ROWS)
        column_C = first_column + tl.arange(0, COLUMNS)
        weight_RC = weight + (first_row.to(tl.int64) + row_R)[:, None] * inputs + column_C[None, :]
        if EVEN:
            tile_RC = tl.load(weight_RC)
        else:
            inside_RC = (row_R < rows)[:, None] & (column_C < inputs)[None, :]
            tile_RC = tl.load(weight_RC, mask=inside_RC, other=0.0)
    return tile_RC


@triton.jit
def _multiply_add(x_TC, weight_RC, total, SWAPPED: tl.constexpr):
    if SWAPPED:
        total = tl.dot(weight_RC, tl.trans(x_TC), total, input_precision="ieee")
    else:
        total = tl.dot(x_TC, tl.trans(weight_RC), total, input_precision="ieee")
    return total


@triton.jit
def _with_bias(total, bias, first, output_R, outputs, SWAPPED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """[tokens, rows] in float32."""
    total_TR = tl.trans(total) if SWAPPED else total
    if HAS_BIAS:
        bias_R = tl.load(bias + first + output_R, mask=output_R < outputs, other=0.0)
        total_TR += bias_R.to(tl.float32)[None, :]
    return total_TR


@triton.jit(do_not_specialize=["top_k"])
def _grouped_gemm(
    x, weight, bias, order, blocks, out, outputs, inputs, top_k, limit, alpha,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    DESCRIBED: tl.constexpr, X_DESCRIBED: tl.constexpr, EVEN: tl.constexpr, SWAPPED: tl.constexpr,
    PERSISTENT: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the greatest possible number of blocks,), fewer if PERSISTENT.

    GATED: both halves of `weight` [X, 2 outputs, inputs], and the activation between them; gathers the
    rows of x, and stores in the order of the experts. Otherwise reads in that order, and stores row p
    for pair p. SWAPPED: the weight is the first operand, which may have more rows than there are
    tokens. DESCRIBED: `weight` is a tensor descriptor of all rows, else a pointer; X_DESCRIBED: so is x,
    and a tile's rows from `end` on are those of other experts.
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
        column_C = tl.arange(0, COLUMNS)
        if not X_DESCRIBED:
            x_TC = x + row_T.to(tl.int64)[:, None] * inputs + column_C[None, :]
        first_row = expert * (2 * outputs if GATED else outputs) + first_output
        left = outputs - first_output
        total = tl.zeros((ROWS, TOKENS) if SWAPPED else (TOKENS, ROWS), tl.float32)
        if GATED:
            total_up = tl.zeros((ROWS, TOKENS) if SWAPPED else (TOKENS, ROWS), tl.float32)
        for start in range(0, inputs, COLUMNS):
            if X_DESCRIBED:
                part_TC = x.load([first, start])
            elif EVEN:
                part_TC = tl.load(x_TC + start, mask=real_T[:, None], other=0.0)
            else:
                inside_TC = real_T[:, None] & (column_C < inputs - start)[None, :]
                part_TC = tl.load(x_TC + start, mask=inside_TC, other=0.0)
            part_RC = _weight_tile(weight, first_row, start, left, inputs, DESCRIBED, EVEN, ROWS, COLUMNS)
            total = _multiply_add(part_TC, part_RC, total, SWAPPED)
            if GATED:
                part_RC = _weight_tile(
                    weight, first_row + outputs, start, left, inputs, DESCRIBED, EVEN, ROWS, COLUMNS
                )
                total_up = _multiply_add(part_TC, part_RC, total_up, SWAPPED)
        output_R = first_output + tl.arange(0, ROWS)
        bias_at = expert.to(tl.int64) * (2 * outputs if GATED else outputs)
        out_TR = _with_bias(total, bias, bias_at, output_R, outputs, SWAPPED, HAS_BIAS)
        if GATED:
            up_TR = _with_bias(total_up, bias, bias_at + outputs, output_R, outputs, SWAPPED, HAS_BIAS)
            out_TR = _gated(out_TR, up_TR, CLAMPED, limit, alpha)
        stored_T = (at_T if GATED else pair_T).to(tl.int64)
        tl.store(
            out + stored_T[:, None] * outputs + output_R[None, :],
            out_TR.to(out.dtype.element_ty),
            mask=real_T[:, None] & (output_R < outputs)[None, :],
        )
    pdl_launch_dependents(PDL)


@triton.jit(do_not_specialize=["experts", "first_expert"])
def _sum_pairs(
    y, topk_ids, topk_weights, out, size, experts, first_expert,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of a row). Rows of pairs without an expert were not written."""
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for pair in tl.static_range(TOP_K):
        expert = tl.load(topk_ids + token * TOP_K + pair) - first_expert
        inside = (column < size) & (expert >= 0) & (expert < experts)
        part = tl.load(y + (token * TOP_K + pair) * size + column, mask=inside, other=0.0)
        topk_weight = tl.load(topk_weights + token * TOP_K + pair)
        total += tl.where(inside, part.to(tl.float32) * topk_weight, 0.0)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


@triton.jit
def _vector_tile(weight_RC, inside_R, inside_C, EVEN: tl.constexpr):
    if EVEN:
        tile_RC = tl.load(weight_RC)
    else:
        tile_RC = tl.load(weight_RC, mask=inside_R[:, None] & inside_C[None, :], other=0.0)
    return tile_RC.to(tl.float32)


@triton.jit(do_not_specialize=["experts", "first_expert", "top_k"])
def _gate_up(
    x, topk_ids, weight, bias, out, outputs, inputs, experts, first_expert, top_k, limit, alpha,
    CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the features, pairs). Reads no weights for a pair without an expert."""
    pdl_wait(PDL)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(topk_ids + pair) - first_expert
    inputs_read = tl.where((expert >= 0) & (expert < experts), inputs, 0)
    expert = tl.where(inputs_read > 0, expert, 0)
    output_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, COLUMNS)
    inside_R = output_R < outputs
    x += pair // top_k * inputs
    gate_RC = weight + (expert * 2 * outputs + output_R)[:, None] * inputs + column_C[None, :]
    up_RC = weight + ((expert * 2 + 1) * outputs + output_R)[:, None] * inputs + column_C[None, :]
    gates_RC, ups_RC = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, inputs_read, COLUMNS, num_stages=STAGES):
        inside_C = column_C < inputs - start
        x_C = tl.load(x + start + column_C, mask=inside_C, other=0.0).to(tl.float32)
        gates_RC += _vector_tile(gate_RC + start, inside_R, inside_C, EVEN) * x_C[None, :]
        ups_RC += _vector_tile(up_RC + start, inside_R, inside_C, EVEN) * x_C[None, :]
    pdl_launch_dependents(PDL)
    gate_R, up_R = tl.sum(gates_RC, 1), tl.sum(ups_RC, 1)
    if HAS_BIAS:
        bias_R = bias + expert * 2 * outputs + output_R
        gate_R += tl.load(bias_R, mask=inside_R, other=0.0).to(tl.float32)
        up_R += tl.load(bias_R + outputs, mask=inside_R, other=0.0).to(tl.float32)
    inner_R = _gated(gate_R, up_R, CLAMPED, limit, alpha)
    tl.store(out + pair * outputs + output_R, inner_R.to(out.dtype.element_ty), mask=inside_R)


@triton.jit(do_not_specialize=["experts", "first_expert"])
def _down(
    inner, topk_ids, topk_weights, weight, bias, out, outputs, inputs, experts, first_expert,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_J: tl.constexpr, COMPLETE: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the outputs, tokens). EVEN: no mask but for the experts.

    COMPLETE: few pairs, if any, have no expert.
    """
    pdl_wait(PDL)
    token = tl.program_id(1).to(tl.int64)
    output_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, COLUMNS)
    place_J = tl.arange(0, BLOCK_J)
    pair_J = token * TOP_K + place_J
    here_J = place_J < TOP_K
    expert_J = tl.load(topk_ids + pair_J, mask=here_J, other=0) - first_expert
    here_J = here_J & (expert_J >= 0) & (expert_J < experts)
    expert_J = tl.where(here_J, expert_J, 0)
    topk_weight_J = tl.load(topk_weights + pair_J, mask=here_J, other=0.0)
    inside_R = output_R < outputs
    row_RJ = expert_J[None, :] * outputs + output_R[:, None]
    weight_RJC = weight + (row_RJ * inputs)[:, :, None] + column_C[None, None, :]
    inner_JC = inner + (pair_J * inputs)[:, None] + column_C[None, :]
    total_RJC = tl.zeros((ROWS, BLOCK_J, COLUMNS), tl.float32)
    for start in tl.range(0, inputs, COLUMNS, num_stages=STAGES):
        inside_JC = here_J[:, None] & (column_C < inputs - start)[None, :]
        part_JC = tl.load(inner_JC + start, mask=inside_JC, other=0.0).to(tl.float32) * topk_weight_J[:, None]
        if EVEN and COMPLETE and BLOCK_J == TOP_K:
            part_RJC = tl.load(weight_RJC + start)
        elif EVEN:
            part_RJC = tl.load(weight_RJC + start, mask=here_J[None, :, None], other=0.0)
        else:
            inside_RJC = inside_R[:, None, None] & inside_JC[None, :, :]
            part_RJC = tl.load(weight_RJC + start, mask=inside_RJC, other=0.0)
        total_RJC += part_RJC.to(tl.float32) * part_JC[None, :, :]
    pdl_launch_dependents(PDL)
    out_R = tl.sum(tl.sum(total_RJC, 2), 1)
    if HAS_BIAS:
        inside_RJ = inside_R[:, None] & here_J[None, :]
        bias_RJ = tl.load(bias + row_RJ, mask=inside_RJ, other=0.0).to(tl.float32)
        out_R += tl.sum(bias_RJ * topk_weight_J[None, :], 1)
    tl.store(out + token * outputs + output_R, out_R.to(out.dtype.element_ty), mask=inside_R)
