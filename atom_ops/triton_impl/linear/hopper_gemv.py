"""`linear` of one token with a weight of e4m3 blocks on Hopper, alone or after a gated activation.

Persistent programs, so that the input vector is read and activated once for many rows, and stays
in registers as float32. A program multiplies the same number of tiles of ROWS rows as the others, and
loads a tile ahead. Before the previous kernel ends (PDL) it loads the first one, and reads the next ones
into the L2 cache. Columns come in PARTS parts:

    part     |          0          |          1          |   COLUMNS columns each
    warps    |  0  |  1  |  ...    |  0  |  1  |  ...    |   512 columns each; more warps share the rows
    lanes      16 bytes each, of one block of scales: its sum is scaled before sums of lanes are added

The activations are not rounded. Written in Gluon, which has no interpreter.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from atom_ops.triton_impl.hardware.gluon_pdl import pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.pdl import launch_options
from atom_ops.triton_impl.quantized.quantized_plans import PersistentGemvPlan
from atom_ops.weights import BlockFP8

_WORDS = gl.constexpr(4)
"""Words of a lane, one after another: 16 bytes."""
_WARP_COLUMNS = 512
_DECODE = gl.constexpr(
    """{
    .reg .b16 low, high;
    .reg .b32 pair;
    .reg .b16 a, b;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {a, b}, pair;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {a, b}, pair;
    cvt.f32.f16 $2, a;
    cvt.f32.f16 $3, b;
    }"""
)


_PREFETCH = gl.constexpr(
    """{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    setp.gt.and.s32 first, $2, 0, first;
    @first cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
    }"""
)
_FETCHED_BYTES = 16 << 20
"""Bytes of a weight that are prefetched before the previous kernel ends; reading them takes about 4 us."""


@gluon.jit
def _tiles(
    words, tile, stop, outputs, layout: gl.constexpr,
    INPUTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """The parts of a tile in words of four values; undefined from `stop` on."""
    row_R = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    word_W = gl.arange(0, COLUMNS // 4, gl.SliceLayout(0, layout))
    inside_RW = ((row_R < outputs) & (tile < stop))[:, None] & (word_W >= 0)[None, :]
    words_RW = words + row_R.to(gl.int64)[:, None] * (INPUTS // 4) + word_W[None, :]
    parts = ()
    for part in gl.static_range(PARTS):
        parts = parts + (gl.load(words_RW + part * (COLUMNS // 4), mask=inside_RW),)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@gluon.jit
def _in_fours(wide_C, layout: gl.constexpr, COLUMNS: gl.constexpr):
    """The first, second, third and fourth values of all words."""
    even_P, odd_P = gl.split(gl.reshape(wide_C, [COLUMNS // 2, 2]))
    first_W, third_W = gl.split(gl.reshape(even_P, [COLUMNS // 4, 2]))
    second_W, fourth_W = gl.split(gl.reshape(odd_P, [COLUMNS // 4, 2]))
    word: gl.constexpr = gl.SliceLayout(0, layout)
    return (
        gl.convert_layout(first_W, word), gl.convert_layout(second_W, word),
        gl.convert_layout(third_W, word), gl.convert_layout(fourth_W, word),
    )  # fmt: skip


@gluon.jit
def _input(
    x, layout: gl.constexpr, WARP_ROWS: gl.constexpr, INPUTS: gl.constexpr, COLUMNS: gl.constexpr,
    PARTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The parts of the input vector in float32; the activation is rounded as its own kernel rounds it."""
    whole: gl.constexpr = gl.BlockedLayout(
        [1, 4 * _WORDS], [1, 32], [WARP_ROWS, gl.num_warps() // WARP_ROWS], [1, 0]
    )  # fmt: skip
    column_C = gl.arange(0, COLUMNS, gl.SliceLayout(0, whole))
    parts = ()
    for part in gl.static_range(PARTS):
        own_C = gl.load(x + part * COLUMNS + column_C)
        if GATED:
            up_C = gl.load(x + INPUTS + part * COLUMNS + column_C).to(gl.float32)
            gate_C = own_C.to(gl.float32)
            own_C = (gate_C / (1.0 + gl.exp(-gate_C)) * up_C).to(x.dtype.element_ty)
        fours = _in_fours(own_C.to(gl.float32), layout, COLUMNS)
        parts = parts + (fours,)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@gluon.jit
def _multiply_store(
    parts, wide, scales, out, tile, outputs, INPUTS: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    BLOCK: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    for part in gl.static_range(PARTS):
        a_RW, b_RW, c_RW, d_RW = gl.inline_asm_elementwise(
            _DECODE, "=f,=f,=f,=f,r", [parts[part]],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        word_RW = a_RW * wide[part][0][None, :] + b_RW * wide[part][1][None, :]
        word_RW += c_RW * wide[part][2][None, :]
        word_RW += d_RW * wide[part][3][None, :]
        lane_RL = gl.sum(gl.reshape(word_RW, [ROWS, COLUMNS // 16, 4]), 2)
        lane_L = gl.arange(0, COLUMNS // 16, gl.SliceLayout(0, lane_RL.type.layout))
        first = scales + tile * ROWS // BLOCK_ROWS * ((INPUTS + BLOCK - 1) // BLOCK)
        lane_RL *= gl.load(first + (part * COLUMNS + lane_L * 16) // BLOCK)[None, :]
        if part == 0:
            total_RL = lane_RL
        else:
            total_RL += lane_RL
    sum_R = gl.sum(total_RL, 1)
    row_R = tile * ROWS + gl.arange(0, ROWS, sum_R.type.layout)
    gl.store(out + row_R, sum_R.to(out.dtype.element_ty), mask=row_R < outputs)


@gluon.jit
def _persistent_gemv(
    x, words, scales, out, outputs, tiles,
    INPUTS: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK: gl.constexpr, GATED: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr,
    WARP_ROWS: gl.constexpr, FETCH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,). FETCH: rows that a program prefetches."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, _WORDS], [1, 32], [WARP_ROWS, gl.num_warps() // WARP_ROWS], [1, 0]
    )  # fmt: skip
    first = gl.program_id(0) * tiles // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * tiles // gl.num_programs(0)
    parts = _tiles(words, first, stop, outputs, layout, INPUTS, ROWS, COLUMNS, PARTS)
    # The rows of a program lie one after another: the next ones go to the L2 cache.
    row = (first + 1) * ROWS
    size = (gl.minimum(gl.minimum(stop * ROWS, outputs), row + FETCH) - row) * INPUTS
    place = words + row.to(gl.int64) * (INPUTS // 4)
    gl.inline_asm_elementwise(
        _PREFETCH, "=r,l,r", [place.to(gl.uint64, bitcast=True), size],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    pdl_wait(PDL)
    wide = _input(x, layout, WARP_ROWS, INPUTS, COLUMNS, PARTS, GATED)
    for tile in range(first + 1, stop):
        ahead = _tiles(words, tile, stop, outputs, layout, INPUTS, ROWS, COLUMNS, PARTS)
        _multiply_store(
            parts, wide, scales, out, tile - 1, outputs,
            INPUTS, BLOCK_ROWS, BLOCK, ROWS, COLUMNS, PARTS,
        )  # fmt: skip
        parts = ahead
    pdl_launch_dependents(PDL)
    _multiply_store(
        parts, wide, scales, out, stop - 1, outputs,
        INPUTS, BLOCK_ROWS, BLOCK, ROWS, COLUMNS, PARTS,
    )  # fmt: skip


def multiply(
    plan: PersistentGemvPlan,
    x: Tensor,
    weight: BlockFP8,
    out_TO: Tensor,
    *,
    gated: bool = False,
) -> None:
    """Fill `out_TO` [1, O]; `gated`: x is [1, 2I]."""
    outputs, inputs = weight.shape
    assert inputs % plan.columns == 0 and plan.columns % _WARP_COLUMNS == 0, "not a plan for this weight"
    assert weight.block[0] % plan.rows == 0, "a tile has one row of scales"
    tiles = triton.cdiv(outputs, plan.rows)
    programs = min(plan.programs, tiles)
    _persistent_gemv[(programs,)](
        x, weight.values.view(torch.int32), weight.scales, out_TO, outputs, tiles,
        INPUTS=inputs, BLOCK_ROWS=weight.block[0], BLOCK=weight.block[1], GATED=gated,
        ROWS=plan.rows, COLUMNS=plan.columns, PARTS=inputs // plan.columns,
        WARP_ROWS=plan.warps * _WARP_COLUMNS // plan.columns,
        FETCH=max(_FETCHED_BYTES // (programs * inputs) - plan.rows, 0), num_warps=plan.warps,
        **launch_options(x.device),
    )  # fmt: skip
