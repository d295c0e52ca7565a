# ruff: noqa: RUF005 - Triton unpacks no tuple within another
# mypy: disable-error-code="assignment, misc, var-annotated"
"""`linear` of up to 8 tokens with a 4-bit weight (`FourBitWords`), by tensor cores.

mma.m16n8k16 multiplies 16 rows by 8 tokens. A thread holds parts of its operands, and may hold them in any
order of the columns that both operands share. So a thread loads eight neighbouring words of a row, which
are 32 codes, decodes them in its registers, and loads eight neighbouring activations for each quarter. No
number moves between threads before the warps, which share the columns of a row, add their sums.

The warps of a program share the columns of its rows. A step multiplies 512 columns in each warp, and loads
the words of the next step first; the first step's are on their way before the previous kernel ends (PDL).
Scales are read four at a time, and activations by as few threads as there are tokens: in a layout made for
the instruction, single scales would take more cycles of the load units than the words.

One token uses one column of eight: tensor cores wait for the weight even so. Written in Gluon, which has no
interpreter.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from atom_ops.triton_impl.hardware.gluon_pdl import pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.pdl import launch_options
from atom_ops.triton_impl.quantized.four_bit import E2M1_BF16, INT4_BF16, settings_of
from atom_ops.triton_impl.quantized.quantized_plans import MmaPlan
from atom_ops.weights import FourBitWords

MOST_TOKENS = 8
_WORDS = gl.constexpr(16)
"""int32 of a chunk, which is two 16-bit words each."""
_CHUNKS = gl.constexpr(4)
"""Chunks of 128 columns that a warp multiplies in a step."""

_UNSCALED = gl.constexpr(
    """{
    .reg .b32 t, one, magic;
    mov.b32 one, 0x3F803F80;
    mov.b32 magic, 0x43004300;
    lop3.b32 t, $4, 0x000F000F, magic, 0xEA;
    fma.rn.bf16x2 $0, t, one, $5;
    shr.b32 t, $4, 4;
    lop3.b32 t, t, 0x000F000F, magic, 0xEA;
    fma.rn.bf16x2 $1, t, one, $5;
    shr.b32 t, $4, 8;
    lop3.b32 t, t, 0x000F000F, magic, 0xEA;
    fma.rn.bf16x2 $2, t, one, $5;
    shr.b32 t, $4, 12;
    lop3.b32 t, t, 0x000F000F, magic, 0xEA;
    fma.rn.bf16x2 $3, t, one, $5;
    }"""
)
"""code - zero of two words, a pair for each quarter; $5 is -128 - zero."""

_MULTIPLY = gl.constexpr(
    """
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {$0, $1, $2, $3}, {$4, $8, $5, $9}, {$12, $13}, {$16, $17, $18, $19};
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {$0, $1, $2, $3}, {$6, $10, $7, $11}, {$14, $15}, {$0, $1, $2, $3};
    """
)
"""The 32 columns of a quarter: rows 0 .. 7 in $4 .. $7, rows 8 .. 15 in $8 .. $11, tokens in $12 .. $15."""


@gluon.jit
def _multiplied(low, high, x, total):
    """total + the products of a quarter; all [threads, 4]."""
    return gl.inline_asm_elementwise(
        _MULTIPLY, "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f", [low, high, x, total],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _twice(bits):
    return bits | (bits << 16)


@gluon.jit
def _words_of(words, row, chunk, l4, last_row, ALL: gl.constexpr, HALVES: gl.constexpr, WHOLE: gl.constexpr):
    """int32 [threads, 4] of the chunks of a step and HALVES times 8 rows; the last row repeats."""
    found = ()
    for c in gl.static_range(_CHUNKS):
        for half in gl.static_range(HALVES):
            row_T = gl.minimum(row + 8 * half, last_row).to(gl.int64)
            place = words + row_T * ALL + (chunk + c) * _WORDS + l4
            if WHOLE:
                found = found + (gl.load(place),)
            else:
                inside = (l4 >= 0) & (chunk + c < ALL // _WORDS)
                found = found + (gl.load(place, mask=inside, other=0),)
    return found


@gluon.jit
def _entries_of(
    table, row, chunk, reg, last_row, groups, HALVES: gl.constexpr, GROUP: gl.constexpr,
    EACH: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Scales or zeros of the same, [threads, 4] each: HALVES times 8 rows, then four entries further."""
    found = ()
    for vector in gl.static_range(EACH * _CHUNKS // 4):
        for half in gl.static_range(HALVES):
            row_T = gl.minimum(row + 8 * half, last_row).to(gl.int64)
            entry = chunk * EACH + vector * 4 + reg if GROUP <= 128 else (chunk + reg) * 128 // GROUP
            place = table + row_T * groups + entry
            if WHOLE:
                found = found + (gl.load(place),)
            else:
                found = found + (gl.load(place, mask=entry < groups, other=0),)
    return found


@gluon.jit
def _one_of(entries, number: gl.constexpr, reg):
    """The entry `number` of four, [threads, 1]; a thread has all four, so that it costs nothing."""
    return gl.expand_dims(gl.sum(gl.where(reg == number, entries, 0), 1), 1)


@gluon.jit
def _scale_bits(entries, GROUP: gl.constexpr, LATE: gl.constexpr):
    """int32: float32 for LATE, else bfloat16; MXFP4: four exponents."""
    if GROUP == 0:
        return entries
    if LATE:
        return entries.to(gl.float32).to(gl.int32, bitcast=True)
    return entries.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF


@gluon.jit
def _scale_pair(bits, q: gl.constexpr, GROUP: gl.constexpr):
    """A quarter's scale twice, as bfloat16."""
    if GROUP == 0:
        bits = ((bits >> (8 * q)) & 255) << 7
    return _twice(bits)


@gluon.jit
def _decoded(
    words, scales, zeros, c: gl.constexpr, half: gl.constexpr, reg, l4, HALVES: gl.constexpr,
    GROUP: gl.constexpr, EACH: gl.constexpr, LATE: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Pairs of numbers of a chunk's four quarters, each int32 [threads, 4]; LATE: without their scale."""
    pairs, offsets = (), ()
    for q in gl.static_range(4):
        vector = scales[(c * EACH + q * EACH // 4) // 4 * HALVES + half]
        bits = _one_of(_scale_bits(vector, GROUP, LATE), (c * EACH + q * EACH // 4) % 4, reg)
        pairs = pairs + (_scale_pair(bits, q, GROUP) + gl.zeros_like(l4),)
        if ZEROS:
            vector = zeros[(c * EACH + q * EACH // 4) // 4 * HALVES + half].to(gl.int32)
            zero = _one_of(vector, (c * EACH + q * EACH // 4) % 4, reg) | 0xC300
            offsets = offsets + (_twice(zero) + gl.zeros_like(l4),)
        else:
            offsets = offsets + (_twice(gl.full_like(l4, 0xC308)),)
    if GROUP == 0:
        found = gl.inline_asm_elementwise(
            E2M1_BF16, "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, pairs[0], pairs[1], pairs[2], pairs[3]],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif LATE:
        found = gl.inline_asm_elementwise(
            _UNSCALED, "=&r,=&r,=&r,=&r,r,r", [words, offsets[0]],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = gl.inline_asm_elementwise(
            INT4_BF16, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [
                words, pairs[0], pairs[1], pairs[2], pairs[3], offsets[0], offsets[1], offsets[2], offsets[3],
            ],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return found


@gluon.jit
def _activations(x, chunk, lead, l4, tokens, INPUTS: gl.constexpr, WHOLE: gl.constexpr):
    """Pairs of activations of a step's chunks, four quarters each: int32 [threads, 4].

    Undefined in the threads whose column of the instruction has no token.
    """
    found = ()
    for number in gl.static_range(4 * _CHUNKS):
        place = chunk * 64 + number * 16 + l4
        if WHOLE:
            pairs = gl.load(x + lead * (INPUTS // 2) + place, mask=(lead < tokens) & (place >= 0))
        else:
            inside = (lead < tokens) & (place < INPUTS // 2)
            pairs = gl.load(x + lead * (INPUTS // 2) + place, mask=inside, other=0)
        found = found + (pairs,)
    return found


@gluon.jit
def _step(
    totals, words, scales, zeros, activations, reg, l4, TILES: gl.constexpr,
    GROUP: gl.constexpr, EACH: gl.constexpr, LATE: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """The totals of TILES tiles of 16 rows, with the products of a step."""
    HALVES: gl.constexpr = 2 * TILES
    for c in gl.static_range(_CHUNKS):
        fresh = ()
        for tile in gl.static_range(TILES):
            low = _decoded(
                words[c * HALVES + 2 * tile], scales, zeros, c, 2 * tile, reg, l4,
                HALVES, GROUP, EACH, LATE, ZEROS,
            )  # fmt: skip
            high = _decoded(
                words[c * HALVES + 2 * tile + 1], scales, zeros, c, 2 * tile + 1, reg, l4,
                HALVES, GROUP, EACH, LATE, ZEROS,
            )  # fmt: skip
            total = totals[tile]
            part = gl.zeros_like(total) if LATE else total
            for q in gl.static_range(4):
                part = _multiplied(low[q], high[q], activations[4 * c + q], part)
            if LATE:
                of_low = _one_of(_scale_bits(scales[2 * tile], GROUP, LATE), c, reg)
                of_high = _one_of(_scale_bits(scales[2 * tile + 1], GROUP, LATE), c, reg)
                factor = gl.where(reg < 2, of_low, of_high).to(gl.float32, bitcast=True)
                fresh = fresh + (total + part * factor,)
            else:
                fresh = fresh + (part,)
        totals = fresh
    return totals


@gluon.jit
def _store(total, bias, out, first_row, reg, tokens, outputs, layout: gl.constexpr, WARPS: gl.constexpr):
    """The sums of all warps, [threads of a warp, 4] each."""
    if WARPS > 1:
        total = gl.convert_layout(gl.sum(gl.reshape(total, [WARPS, 32, 4]), 0), layout)
    place = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, layout)), 1)
    token = place % 4 * 2 + reg % 2
    output = first_row + place // 4 + reg // 2 * 8
    if bias is not None:
        total += gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)
    inside = (token < tokens) & (output < outputs)
    gl.store(out + token * outputs + output, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _multiply_few(
    x, words, scales, zeros, bias, out, tokens, outputs, groups,
    INPUTS: gl.constexpr, ALL: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr,
    TILES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of TILES * 16 rows,)."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    EACH: gl.constexpr = 128 // GROUP if GROUP == 32 or GROUP == 64 else 1
    ZEROS: gl.constexpr = zeros is not None
    LATE: gl.constexpr = GROUP >= 128
    HALVES: gl.constexpr = 2 * TILES
    STEP: gl.constexpr = WARPS * _CHUNKS
    STEPS: gl.constexpr = (ALL // _WORDS + STEP - 1) // STEP
    WHOLE: gl.constexpr = ALL // _WORDS % STEP == 0 and INPUTS % 128 == 0
    thread = gl.expand_dims(gl.arange(0, 32 * WARPS, gl.SliceLayout(1, layout)), 1)
    reg = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, layout)), 0)
    lead = thread % 32 // 4
    l4 = thread % 4 * 4 + reg
    chunk = thread // 32 * _CHUNKS
    last_row = outputs - 1
    first_row = gl.program_id(0) * (TILES * 16)
    row = first_row + lead
    next_words = _words_of(words, row, chunk, l4, last_row, ALL, HALVES, WHOLE)
    next_scales = _entries_of(scales, row, chunk, reg, last_row, groups, HALVES, GROUP, EACH, WHOLE)
    next_zeros = next_scales
    if ZEROS:
        next_zeros = _entries_of(zeros, row, chunk, reg, last_row, groups, HALVES, GROUP, EACH, WHOLE)
    pdl_wait(PDL)
    totals = ()
    for _ in gl.static_range(TILES):
        totals = totals + (gl.zeros([32 * WARPS, 4], gl.float32, layout),)
    for s in gl.static_range(STEPS):
        now_words, now_scales, now_zeros = next_words, next_scales, next_zeros
        at = chunk + s * STEP
        if s + 1 == STEPS:
            pdl_launch_dependents(PDL)
        activations = _activations(x, at, lead, l4, tokens, INPUTS, WHOLE)
        if s + 1 < STEPS:
            at += STEP
            next_words = _words_of(words, row, at, l4, last_row, ALL, HALVES, WHOLE)
            next_scales = _entries_of(scales, row, at, reg, last_row, groups, HALVES, GROUP, EACH, WHOLE)
            if ZEROS:
                next_zeros = _entries_of(zeros, row, at, reg, last_row, groups, HALVES, GROUP, EACH, WHOLE)
        totals = _step(
            totals, now_words, now_scales, now_zeros, activations, reg, l4, TILES, GROUP, EACH, LATE, ZEROS
        )  # fmt: skip
    for tile in gl.static_range(TILES):
        _store(totals[tile], bias, out, first_row + tile * 16, reg, tokens, outputs, layout, WARPS)


def multiply(plan: MmaPlan, x_TI: Tensor, weight: FourBitWords, bias: Tensor | None, out_TO: Tensor) -> None:
    """Fill `out_TO` [T, O]; everything in bfloat16."""
    outputs, inputs = weight.shape
    tokens = len(x_TI)
    assert tokens <= MOST_TOKENS, "not a plan for so many tokens"
    words = weight.words.view(torch.int32)
    _multiply_few[(triton.cdiv(outputs, plan.tiles * 16),)](
        _pairs(x_TI), words, weight.scales, weight.zeros, bias, out_TO, tokens, outputs,
        weight.scales.shape[1],
        INPUTS=inputs, ALL=words.shape[1], GROUP=settings_of(weight)["GROUP"], WARPS=plan.warps,
        TILES=plan.tiles, num_warps=plan.warps, **launch_options(x_TI.device),
    )  # fmt: skip


def _pairs(x: Tensor) -> Tensor:
    """int32 of two bfloat16."""
    return (x.clone() if x.storage_offset() % 2 else x).view(torch.int32)
