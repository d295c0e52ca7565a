# ruff: noqa: RUF005 - Triton unpacks no tuple within another
# mypy: disable-error-code="assignment, misc, var-annotated"
"""`linear` of up to 8 tokens with a 4-bit weight (`FourBitWords`) on Hopper, by persistent programs.

A program multiplies the same number of tiles of 16 rows as the others, with the instructions of
`four_bit_mma`. TMA copies words and scales into a ring of stages in shared memory:

    tiles     |     0     |     1     |   of a program, one after another
    stages    |  0  |  1  |  2  |  3  |   4096 columns each, which all warps multiply together
    warps     | 0 .. 7 |                  512 columns each: four chunks

When all warps have read a stage, one thread copies the one that takes its place. The first stages are on
their way before the previous kernel ends (PDL). They fill so much of an SM that two programs do not fit: the
rows are shared out before the launch, and an SM with two programs would hold up the rest. With 3 stages two
fit: 24576 x 4096 took 15 us after itself, but 25 after a norm, whose program leaves one SM no room.

A stage lies in the order in which threads read it: chunk of a warp, upper or lower 8 rows, warp, row, words.
TMA reads the weight in pieces of 64 bytes for that; a weight in the order of the stages took as long.

Written in Gluon, which has no interpreter.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_ops.triton_impl.four_bit import settings_of
from atom_ops.triton_impl.four_bit_mma import (
    MOST_TOKENS,
    _activations,
    _decoded,
    _multiplied,
    _one_of,
    _pairs,
    _scale_bits,
)
from atom_ops.triton_impl.gluon_pdl import pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hopper_pipeline import load_tile, make_barriers, thread_barrier
from atom_ops.triton_impl.pdl import launch_options
from atom_ops.triton_impl.quantized_plans import RingPlan
from atom_ops.weights import FourBitWords

_ROWS = gl.constexpr(16)
"""Of a tile: as many as an instruction multiplies."""
_WARPS = gl.constexpr(8)
_THREADS = gl.constexpr(32 * 8)
_CHUNKS = gl.constexpr(4)
"""Of 128 columns: what a warp multiplies in a stage, as in `four_bit_mma`."""
_PIECES = gl.constexpr(8)
"""Of a warp in a stage, 512 bytes each: half the rows of a chunk."""
_WORDS = 16
"""int32 of a chunk, which is two 16-bit words each."""
_COLUMNS = 4096
"""Of a stage."""
_PROGRAMS = 132
"""SMs of an H100 or H200."""
_OWN = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0]))
"""Of [threads, 4]: each has its own four numbers."""
_BY_ROW = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [8, 1, 1, 1], [3, 2, 1, 0]))
"""Of [warps, 8 rows, 4 lanes, 4]: the same numbers."""
_BY_WARP = gl.constexpr(gl.BlockedLayout([8, 1], [1, 32], [1, 8], [0, 1]))
"""Of [warps, 128 sums]: a thread has the sums of all warps."""
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
_FLAT_CUBE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))


@gluon.jit
def _copy(
    words_desc, scales_desc, words, scales, ready, i, first, stop, STEPS: gl.constexpr, STAGES: gl.constexpr
):
    """Stage i of a program, if it has so many."""
    exists = i < (stop - first) * STEPS
    tile, step, slot = first + i // STEPS, i % STEPS, i % STAGES
    barrier = ready.index(slot)
    mbarrier.expect(barrier, words_desc.block_type.nbytes + scales_desc.block_type.nbytes, pred=exists)
    load_tile(words_desc, [0, tile * 2, step * _WARPS, 0, 0], barrier, words.index(slot), pred=exists)
    at = [tile * _ROWS, step * _WARPS * _CHUNKS]
    load_tile(scales_desc, at, barrier, scales.index(slot), pred=exists)


@gluon.jit
def _scales_of(scales, slot, half: gl.constexpr):
    """[threads, 4]: of a warp's chunks, and of the row that four lanes share."""
    own = scales.index(slot * 2 + half).permute((1, 0, 2)).load(gl.SliceLayout(2, _BY_ROW))
    wide = gl.expand_dims(own, 2) + gl.zeros([_WARPS, 8, 4, 4], own.dtype, _BY_ROW)
    return gl.convert_layout(gl.reshape(wide, [_THREADS, 4]), _OWN)


@gluon.jit
def _chunk(total, low_words, high_words, scales, activations, c: gl.constexpr, reg, l4, GROUP: gl.constexpr):
    """The total of a tile, with the products of a warp's chunk c."""
    LATE: gl.constexpr = GROUP >= 128
    low = _decoded(low_words, scales, scales, c, 0, reg, l4, 2, GROUP, 1, LATE, False)
    high = _decoded(high_words, scales, scales, c, 1, reg, l4, 2, GROUP, 1, LATE, False)
    part = gl.zeros_like(total) if LATE else total
    for q in gl.static_range(4):
        part = _multiplied(low[q], high[q], activations[4 * c + q], part)
    if LATE:
        of_low = _one_of(_scale_bits(scales[0], GROUP, LATE), c, reg)
        of_high = _one_of(_scale_bits(scales[1], GROUP, LATE), c, reg)
        part = total + part * gl.where(reg < 2, of_low, of_high).to(gl.float32, bitcast=True)
    return part


@gluon.jit
def _store(sums, total, bias, out, first_row, tokens, outputs):
    """Add the totals of all warps, and store a tile."""
    sums.store(total)
    by_warp = sums._reinterpret(gl.float32, [_WARPS, 128], _FLAT)
    sum_V = gl.sum(by_warp.load(_BY_WARP), 0)
    # A lane has four sums: of two rows, and of two tokens each.
    place = gl.arange(0, 128, gl.SliceLayout(0, _BY_WARP))
    lane, reg = place // 4, place % 4
    token, output = lane % 4 * 2 + reg % 2, first_row + lane // 4 + reg // 2 * 8
    inside = (token < tokens) & (output < outputs)
    if bias is not None:
        sum_V += gl.load(bias + output, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + token * outputs + output, sum_V.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["tokens"])
def _multiply_few(
    words_desc, scales_desc, x, bias, out, tokens, outputs, tiles,
    INPUTS: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,), at most one for each SM."""
    first = gl.program_id(0) * tiles // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * tiles // gl.num_programs(0)
    words = gl.allocate_shared_memory(
        words_desc.dtype, [STAGES] + words_desc.block_type.shape, words_desc.layout
    )
    scales = gl.allocate_shared_memory(
        scales_desc.dtype, [STAGES] + scales_desc.block_type.shape, scales_desc.layout
    )
    # Two, so that no warp waits for the ones that still add up the tile before.
    sums = gl.allocate_shared_memory(gl.float32, [2, _THREADS, 4], _FLAT)
    ready = make_barriers(STAGES, 1)
    fence_async_shared()
    thread_barrier()
    for i in gl.static_range(STAGES):
        _copy(words_desc, scales_desc, words, scales, ready, i, first, stop, STEPS, STAGES)
    pdl_launch_dependents(PDL)
    pieces = words._reinterpret(gl.int32, [STAGES * _PIECES, _THREADS, 4], _FLAT)
    entries = scales._reinterpret(scales_desc.dtype, [STAGES * 2, 8, _WARPS, _CHUNKS], _FLAT_CUBE)
    thread = gl.expand_dims(gl.arange(0, _THREADS, gl.SliceLayout(1, _OWN)), 1)
    reg = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, _OWN)), 0)
    lead, l4 = thread % 32 // 4, thread % 4 * 4 + reg
    chunk = thread // 32 * _CHUNKS
    pdl_wait(PDL)
    activations = _activations(x, chunk, lead, l4, tokens, INPUTS, True)
    i = 0
    for tile in range(first, stop):
        total = gl.zeros([_THREADS, 4], gl.float32, _OWN)
        for step in range(STEPS):
            slot = i % STAGES
            mbarrier.wait(ready.index(slot), i // STAGES & 1)
            found = ()
            for piece in gl.static_range(_PIECES):
                found = found + (pieces.index(slot * _PIECES + piece).load(_OWN),)
            of_rows = (_scales_of(entries, slot, 0), _scales_of(entries, slot, 1))
            thread_barrier()
            _copy(words_desc, scales_desc, words, scales, ready, i + STAGES, first, stop, STEPS, STAGES)
            for c in gl.static_range(_CHUNKS):
                total = _chunk(total, found[2 * c], found[2 * c + 1], of_rows, activations, c, reg, l4, GROUP)
            if STEPS > 1:
                # They arrive while the program waits for the next stage.
                next_chunk = chunk + (step + 1) % STEPS * (_WARPS * _CHUNKS)
                activations = _activations(x, next_chunk, lead, l4, tokens, INPUTS, True)
            i += 1
        _store(sums.index(tile % 2), total, bias, out, tile * _ROWS, tokens, outputs)


def reads(weight: FourBitWords) -> bool:
    """Whether stages and tiles are whole, and scales are of 128 inputs, or MXFP4's; without zero points."""
    outputs, inputs = weight.shape
    whole = inputs % _COLUMNS == 0 and outputs % _ROWS.value == 0
    return whole and weight.zeros is None and weight.group in (0, 128)


def multiply(plan: RingPlan, x_TI: Tensor, weight: FourBitWords, bias: Tensor | None, out_TO: Tensor) -> None:
    """Fill `out_TO` [T, O]; everything in bfloat16. See `reads`."""
    (outputs, inputs), tokens = weight.shape, len(x_TI)
    assert tokens <= MOST_TOKENS, "not a plan for so many tokens"
    assert reads(weight), "not a plan for this weight"
    tiles = outputs // _ROWS.value
    _multiply_few[(min(_PROGRAMS, tiles),)](
        _word_stages(weight.words.view(torch.int32)), _scale_stages(weight.scales), _pairs(x_TI), bias,
        out_TO, tokens, outputs, tiles,
        INPUTS=inputs, GROUP=settings_of(weight)["GROUP"], STEPS=inputs // _COLUMNS, STAGES=plan.stages,
        num_warps=_WARPS.value, **launch_options(x_TI.device),
    )  # fmt: skip


def _word_stages(words: Tensor) -> TensorDescriptor:
    """The words of a row are seen as chunks of a warp and warps, and rows as halves of tiles."""
    (outputs, stored), chunks, half = words.shape, _CHUNKS.value, _ROWS.value // 2
    return TensorDescriptor(
        words,
        [chunks, outputs // half, stored // (chunks * _WORDS), half, _WORDS],
        [_WORDS, half * stored, chunks * _WORDS, stored, 1],
        [chunks, 2, _WARPS.value, half, _WORDS],
        gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=5),
    )


def _scale_stages(scales: Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * scales.element_size(), rank=2)
    return TensorDescriptor.from_tensor(scales, [_ROWS.value, _WARPS.value * _CHUNKS.value], layout)
