"""The grouped GEMMs of `experts` with 4-bit weights on Hopper, by `four_bit_wgmma`.

    _gather_pairs   x [T, D]     -> [P, D], in the order of the experts, so that a block is a rectangle
    _grouped        gate and up     [P, D] -> inner [P, F], in the same order; 64 rows of each in a program
                    down            inner  -> y [P, D], in the order of the pairs

A tile of x that reaches past its block has rows of other experts, which reach no pair of this one.

Tiles that remain for a last wave of `down` are halved to 64 rows, if twice as many run at once.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from atom_ops.ops.experts.experts import ClampedSwiglu, ExpertActivation, ExpertWeights, clamp_kind
from atom_ops.triton_impl.experts.expert_blocks import ExpertBlocks, sort_by_expert
from atom_ops.triton_impl.experts.expert_plans import WgmmaPlan
from atom_ops.triton_impl.hardware import pdl
from atom_ops.triton_impl.hardware.gluon_pdl import pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.pdl import launch_options
from atom_ops.triton_impl.hardware.persistent import num_sms
from atom_ops.triton_impl.quantized.four_bit import COLUMNS, WORDS
from atom_ops.triton_impl.quantized.four_bit_wgmma import (
    ROWS,
    STAGES,
    described,
    products,
    rows_layout,
    scale_words,
    store_rows,
    stored_tokens,
    words_layout,
)
from atom_ops.weights import FourBitWords

_GATHERED_AT_ONCE = 1024
_REGISTERS = 65536
"""Registers of an SM."""
_THREADS = 128
"""Threads of a program."""


@triton.jit(do_not_specialize=["top_k"])
def _gather_pairs(x, order, blocks, out, top_k, size, AT_ONCE: tl.constexpr, PDL: tl.constexpr):
    """Grid (pairs, parts of a row). The next kernel reads the blocks early: they are complete by then."""
    pdl.pdl_wait(PDL)
    pdl.pdl_launch_dependents(PDL)
    place = tl.program_id(0).to(tl.int64)
    number = tl.load(blocks)
    end_of_last = tl.load(blocks + 4 * number + 2, mask=number > 0, other=0)
    if place < end_of_last:
        column = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
        row = (tl.load(order + place) // top_k).to(tl.int64)
        part = tl.load(x + row * size + column, mask=column < size, other=0.0)
        tl.store(out + place * size + column, part, mask=column < size)


@gluon.jit
def _gated(gate, up, CLAMPED: gl.constexpr, limit, alpha):
    """As `expert_kernels._gated`; comparisons with NaN are false."""
    if CLAMPED:
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        if CLAMPED == 1:
            up = up + 1.0
        inner = up * (gate / (1.0 + gl.exp(-alpha * gate)))
    else:
        inner = gate / (1.0 + gl.exp(-gate)) * up
    return inner


@gluon.jit
def _biased(total_RT, bias, row_of_expert, first_output, outputs, ROWS: gl.constexpr):
    if bias is not None:
        output_R = first_output + gl.arange(0, ROWS, gl.SliceLayout(1, total_RT.type.layout))
        bias_R = gl.load(bias + row_of_expert + output_R, mask=output_R < outputs, other=0.0)
        total_RT += bias_R.to(gl.float32)[:, None]
    return total_RT


@gluon.jit
def _block(
    weight, x, scales, words, ready, bias, order, out, expert, first, end, first_output, outputs, groups,
    limit, alpha,
    NUMBER: gl.constexpr, TOKENS: gl.constexpr, CHUNKS: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, CLAMPED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The rows of a program times up to TOKENS pairs, `first` to `end`."""
    SIDE: gl.constexpr = NUMBER // 2 if GATED else NUMBER
    parts = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, SPAN * 128], x.layout)
    row_of_expert = expert.to(gl.int64) * (2 * outputs if GATED else outputs)
    number_R = gl.arange(0, NUMBER, rows_layout(TOKENS))
    row_R = row_of_expert + gl.minimum(first_output + number_R % SIDE, outputs - 1)
    if GATED:
        row_R += gl.where(number_R < SIDE, 0, outputs)
    row = first_output if GATED else expert * outputs + first_output
    total_RT = products(
        weight, x, words, parts, ready, expert * 2, row, scales + row_R * groups,
        first, 0, (CHUNKS + SPAN - 1) // SPAN, NUMBER, TOKENS, CHUNKS, SPAN, GROUP, GATED, PDL,
    )  # fmt: skip
    if GATED:
        gate_RT, up_RT = total_RT.reshape([2, SIDE, TOKENS]).permute((1, 2, 0)).split()
        gate_RT = _biased(gate_RT, bias, row_of_expert, first_output, outputs, SIDE)
        up_RT = _biased(up_RT, bias, row_of_expert + outputs, first_output, outputs, SIDE)
        found_RT = _gated(gate_RT, up_RT, CLAMPED, limit, alpha)
    else:
        found_RT = _biased(total_RT, bias, row_of_expert, first_output, outputs, SIDE)
    at_T = first + stored_tokens(TOKENS)
    place_T = at_T if GATED else gl.load(order + at_T, mask=at_T < end, other=0)
    store_rows(found_RT, out, place_T, first_output, outputs, at_T < end, SIDE)


@gluon.jit
def _tile(
    weight, x, short_x, scales, words, ready, bias, order, block, out, first_output, outputs, groups, limit,
    alpha,
    NUMBER: gl.constexpr, BLOCK: gl.constexpr, SHORT: gl.constexpr, CHUNKS: gl.constexpr,
    SPAN: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, CLAMPED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """NUMBER rows times the pairs of a block."""
    expert, first, end = gl.load(block), gl.load(block + 1), gl.load(block + 2)
    if end - first <= SHORT:
        _block(
            weight, short_x, scales, words, ready, bias, order, out, expert, first, end, first_output,
            outputs, groups, limit, alpha, NUMBER, SHORT, CHUNKS, SPAN, GROUP, GATED, CLAMPED, PDL,
        )  # fmt: skip
    else:
        _block(
            weight, x, scales, words, ready, bias, order, out, expert, first, end, first_output,
            outputs, groups, limit, alpha, NUMBER, BLOCK, CHUNKS, SPAN, GROUP, GATED, CLAMPED, PDL,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["at_once"])
def _grouped(
    weight, half_weight, x, short_x, scales, bias, order, blocks, out, outputs, groups, limit, alpha, at_once,
    BLOCK: gl.constexpr, SHORT: gl.constexpr, CHUNKS: gl.constexpr, SPAN: gl.constexpr,
    GROUP: gl.constexpr, GATED: gl.constexpr, CLAMPED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of the greatest possible number of blocks, and half of `at_once`,).

    `at_once` programs run at the same time. Blocks of up to SHORT pairs load the tiles of `short_x`. The
    blocks, unlike x, were complete before the previous kernel began.
    """
    OUTPUTS: gl.constexpr = ROWS // 2 if GATED else ROWS
    words = gl.allocate_shared_memory(gl.int16, [STAGES, ROWS, SPAN * 32], words_layout(SPAN))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    tiles_of_block = (outputs + OUTPUTS - 1) // OUTPUTS
    tiles = gl.load(blocks) * tiles_of_block
    remaining = tiles % at_once
    whole = tiles if GATED or 2 * remaining > at_once else tiles - remaining
    place = gl.program_id(0)
    tile = place if place < whole else whole + (place - whole) // 2
    block = blocks + 4 + tile // tiles_of_block * 4
    first_output = tile % tiles_of_block * OUTPUTS
    if place < whole:
        _tile(
            weight, x, short_x, scales, words, ready, bias, order, block, out, first_output, outputs, groups,
            limit, alpha, ROWS, BLOCK, SHORT, CHUNKS, SPAN, GROUP, GATED, CLAMPED, PDL,
        )  # fmt: skip
    elif not GATED:
        first_output += (place - whole) % 2 * (ROWS // 2)
        if (tile < tiles) & (first_output < outputs):
            halves = words._reinterpret(gl.int16, [STAGES, ROWS // 2, SPAN * 32], words_layout(SPAN))
            _tile(
                half_weight, x, short_x, scales, halves, ready, bias, order, block, out, first_output,
                outputs, groups, limit, alpha,
                ROWS // 2, BLOCK, SHORT, CHUNKS, SPAN, GROUP, GATED, CLAMPED, PDL,
            )  # fmt: skip
        else:
            pdl_wait(PDL)
    else:
        pdl_wait(PDL)
    pdl_launch_dependents(PDL)


def by_expert(
    plan: WgmmaPlan, x_TD: Tensor, topk_ids_TJ: Tensor, weights: ExpertWeights, activation: ExpertActivation
) -> Tensor:
    """As `expert_quantized.by_expert`, in bfloat16."""
    gate_up, down = weights.gate_up_XOD, weights.down_XDF
    assert isinstance(gate_up, FourBitWords) and isinstance(down, FourBitWords), "checked with the plan"
    experts_X, hidden, features = down.shape
    blocks = sort_by_expert(topk_ids_TJ, experts_X, plan.block, weights.first)
    pairs = topk_ids_TJ.numel()
    x_PD = x_TD.new_empty(pairs, hidden)
    _gather_pairs[(pairs, triton.cdiv(hidden, _GATHERED_AT_ONCE))](
        x_TD, blocks.order_P, blocks.blocks, x_PD, topk_ids_TJ.shape[1], hidden,
        AT_ONCE=_GATHERED_AT_ONCE, num_warps=4, **launch_options(x_TD.device),
    )  # fmt: skip
    inner_PF = x_TD.new_empty(pairs, features)
    multiply(plan, blocks, x_PD, gate_up, weights.gate_up_bias_XO, inner_PF, activation, gated=True)
    del x_PD  # its memory is that of y, which is not written before the GEMM above ends
    y_PD = x_TD.new_empty(pairs, hidden)
    multiply(plan, blocks, inner_PF, down, weights.down_bias_XD, y_PD, None, gated=False)
    return y_PD


def multiply(
    plan: WgmmaPlan,
    blocks: ExpertBlocks,
    x_PI: Tensor,
    weight: FourBitWords,
    bias_XO: Tensor | None,
    out: Tensor,
    activation: ExpertActivation,
    gated: bool,
) -> None:
    """Fill `out`: if `gated` in the order of the experts, otherwise in that of the pairs."""
    outputs = out.shape[1]
    span = plan.chunks
    rows = ROWS.value
    scales, settings = scale_words(weight)
    words = weight.words.flatten(0, 1)
    clamped = activation or ClampedSwiglu(0.0, 0.0)
    if gated:
        words = words.view(-1, outputs, words.shape[1])
    half = [rows // 2, span * WORDS]
    tile = [2, *half] if gated else [rows, span * WORDS]
    at_once = num_sms(x_PI.device) * (_REGISTERS // (_THREADS * plan.registers))
    x_tiles = [described(x_PI, [size, span * COLUMNS]) for size in (plan.block, plan.short)]
    tiles = blocks.most * triton.cdiv(outputs, rows // 2 if gated else rows)
    _grouped[(tiles + (0 if gated else at_once // 2),)](
        described(words, tile), described(words, tile if gated else half), *x_tiles, scales, bias_XO,
        blocks.order_P, blocks.blocks, out, outputs, scales.shape[2], clamped.limit, clamped.alpha, at_once,
        BLOCK=plan.block, SHORT=plan.short, SPAN=span, GATED=gated, CLAMPED=clamp_kind(activation),
        num_warps=_THREADS // 32, maxnreg=plan.registers,
        **settings, **launch_options(x_PI.device),
    )  # fmt: skip
