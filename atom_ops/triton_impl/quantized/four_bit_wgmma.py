# ruff: noqa: RUF005 - Triton unpacks no tuple within another
# mypy: disable-error-code="assignment, has-type"
"""Tiles of GEMMs of 4-bit weights (`FourBitWords`) on Hopper: TMA, codes decoded in registers, WGMMA.

    words  [128, 32 * SPAN]       int16: SPAN chunks of 128 rows, or 64; read from shared memory into the
                                  registers of WGMMA's first operand, which decodes without moving a number
    x      [tokens, 128 * SPAN]   the same columns: WGMMA reads them from shared memory

A stage of both is loaded while others are multiplied. Half a chunk is decoded while the tensor cores
multiply the half before it; its registers stay in use until they have. Three or four programs fit an
SM, which hides more than more stages would.

Written in Gluon, which has no interpreter.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_ops.triton_impl.hardware.gluon_pdl import pdl_wait
from atom_ops.triton_impl.hardware.hopper_pipeline import load_tile, thread_barrier
from atom_ops.triton_impl.quantized.four_bit import COLUMNS, E2M1_QUARTERS, INT4_QUARTERS, WORDS
from atom_ops.weights import FourBitWords

ROWS = gl.constexpr(128)
STAGES = gl.constexpr(2)
_STORED = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
_E2M1 = gl.constexpr(E2M1_QUARTERS.value)
_INT4_32 = gl.constexpr(INT4_QUARTERS[32].value)
_INT4_64 = gl.constexpr(INT4_QUARTERS[64].value)
_INT4_128 = gl.constexpr(INT4_QUARTERS[128].value)
_WORDS = gl.constexpr(WORDS)
_COLUMNS = gl.constexpr(COLUMNS)
_E2M1_SCALES = gl.constexpr(
    """{
    .reg .b32 t;
    shl.b32 t, $2, 7;
    and.b32 $0, t, 0x7F807F80;
    shr.b32 t, $2, 1;
    and.b32 $1, t, 0x7F807F80;
    }"""
)
"""From the exponents of a chunk's quarters: bfloat16 of the even ones, and of the odd ones."""


@gluon.constexpr_function
def _sums(TOKENS):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])


@gluon.constexpr_function
def rows_layout(TOKENS):
    """Layout of the row numbers that `products` takes."""
    return gl.SliceLayout(1, gl.DotOperandLayout(0, _sums(TOKENS), 2))


@gluon.constexpr_function
def words_layout(SPAN):
    """Layout of the packed weights in shared memory."""
    return gl.NVMMASharedLayout(64 * SPAN, 16, 2)


@gluon.jit
def _load_words(weight, words, barrier, step, matrix, row, GATED: gl.constexpr):
    if GATED:
        halves = words.reshape([2, words.shape[0] // 2, words.shape[1]])
        load_tile(weight, [matrix, row, step * words.shape[1]], barrier, halves)
    else:
        load_tile(weight, [row, step * words.shape[1]], barrier, words)


@gluon.jit
def _scales_of(place_R, step, CHUNKS: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr):
    """Scales of a stage: int32 [ROWS] of four exponents or of two scales, or else bfloat16."""
    found = ()
    for c in gl.static_range(SPAN):
        chunk = gl.minimum(step * SPAN + c, CHUNKS - 1)
        if GROUP == 32:
            found = found + (gl.load(place_R + chunk * 2), gl.load(place_R + chunk * 2 + 1))
        elif GROUP < 128:
            found = found + (gl.load(place_R + chunk),)
        else:
            found = found + (gl.load(place_R + chunk * 128 // GROUP),)
    return found


@gluon.jit
def _of_quarters(scales, c: gl.constexpr, GROUP: gl.constexpr):
    """int32 [ROWS] for each quarter of a stage's chunk c: a half of it is the scale, see `E2M1_QUARTERS`."""
    if GROUP == 0:
        two: gl.constexpr = (gl.int32, gl.int32)
        even, odd = gl.inline_asm_elementwise(
            _E2M1_SCALES, "=&r,=&r,r", [scales[c]], dtype=two, is_pure=True, pack=1
        )
        return even, odd, even, odd
    elif GROUP == 32:
        return scales[2 * c], scales[2 * c], scales[2 * c + 1], scales[2 * c + 1]
    elif GROUP == 64:
        return scales[c], scales[c], scales[c], scales[c]
    else:
        bits_R = scales[c].to(gl.int16, bitcast=True).to(gl.int32)
        return bits_R, bits_R, bits_R, bits_R


@gluon.constexpr_function
def _instructions(quarter, GROUP):
    if GROUP == 0:
        return _E2M1[quarter]
    return (_INT4_32 if GROUP == 32 else _INT4_64 if GROUP == 64 else _INT4_128)[quarter]


@gluon.jit
def _decoded(words_RC, scale_R, quarter: gl.constexpr, GROUP: gl.constexpr):
    """bfloat16 [ROWS, 32]. The instructions take two words and, for both, the first of two equal scales."""
    ASM: gl.constexpr = _instructions(quarter, GROUP)
    scale_RC = gl.expand_dims(scale_R, 1) + gl.zeros_like(words_RC).to(gl.int32)
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [words_RC, scale_RC], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def decoded_half(words_RC, of_quarters, half: gl.constexpr, GROUP: gl.constexpr, left: gl.constexpr):
    """bfloat16 [ROWS, 64]: two quarters of a chunk, in the layout `left` of its words."""
    even_RC = _decoded(words_RC, of_quarters[2 * half], 2 * half, GROUP)
    odd_RC = _decoded(words_RC, of_quarters[2 * half + 1], 2 * half + 1, GROUP)
    numbers_RC = gl.join(even_RC, odd_RC).permute((0, 2, 1))
    numbers_RC = numbers_RC.reshape([words_RC.shape[0], 2 * words_RC.shape[1]])
    return gl.convert_layout(numbers_RC, left, assert_trivial=True)


@gluon.jit
def products(
    weight, x, words, parts, ready, matrix, row, place_R, first_token, first_step, steps,
    NUMBER: gl.constexpr, TOKENS: gl.constexpr, CHUNKS: gl.constexpr, SPAN: gl.constexpr,
    GROUP: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """float32 [NUMBER, TOKENS]: `steps` stages of rows of the weight times tokens.

    The rows are NUMBER from `row` on, if GATED half as many in `matrix` and in the next one; `place_R` is
    where each one's scales begin. `words`, `parts` and `ready` are the shared memory of STAGES stages. Only
    x may still be written by the previous kernel.
    """
    sums: gl.constexpr = _sums(TOKENS)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    size: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes
    for i in gl.static_range(STAGES):
        if i < steps:
            mbarrier.expect(ready.index(i), size)
            _load_words(weight, words.index(i), ready.index(i), first_step + i, matrix, row, GATED)
    scales = _scales_of(place_R, first_step, CHUNKS, SPAN, GROUP)
    pdl_wait(PDL)
    for i in gl.static_range(STAGES):
        if i < steps:
            load_tile(x, [first_token, (first_step + i) * (SPAN * _COLUMNS)], ready.index(i), parts.index(i))
    total_RT = gl.zeros([NUMBER, TOKENS], gl.float32, sums)
    for i in range(steps):
        slot = i % STAGES
        now = scales
        scales = _scales_of(place_R, first_step + i + 1, CHUNKS, SPAN, GROUP)
        mbarrier.wait(ready.index(slot), i // STAGES & 1)
        for c in gl.static_range(SPAN):
            words_RC = words.index(slot).slice(c * _WORDS, _WORDS, dim=1).load(left)
            of_quarters = _of_quarters(now, c, GROUP)
            for half in gl.static_range(2):
                numbers_RC = decoded_half(words_RC, of_quarters, half, GROUP, left)
                if c + half > 0:
                    total_RT, _ = warpgroup_mma_wait(0, deps=[total_RT, multiplied_RC])  # noqa: F821
                part_TC = parts.index(slot).slice(c * _COLUMNS + half * 64, 64, dim=1)
                total_RT = warpgroup_mma(numbers_RC, part_TC.permute((1, 0)), total_RT, is_async=True)
                multiplied_RC = numbers_RC
        total_RT, _ = warpgroup_mma_wait(0, deps=[total_RT, multiplied_RC])
        if i + STAGES < steps:
            thread_barrier()
            step = first_step + i + STAGES
            mbarrier.expect(ready.index(slot), size)
            _load_words(weight, words.index(slot), ready.index(slot), step, matrix, row, GATED)
            load_tile(x, [first_token, step * (SPAN * _COLUMNS)], ready.index(slot), parts.index(slot))
    return total_RT


@gluon.jit
def store_rows(found_RT, out, place_T, first_output, outputs, inside_T, ROWS: gl.constexpr):
    """Store columns of `found_RT` as rows of `out`; `place_T` in the layout of `stored_tokens`."""
    output_R = first_output + gl.arange(0, ROWS, gl.SliceLayout(1, _STORED))
    out_RT = gl.convert_layout(found_RT.to(out.dtype.element_ty), _STORED)
    inside_RT = (output_R < outputs)[:, None] & inside_T[None, :]
    gl.store(out + place_T.to(gl.int64)[None, :] * outputs + output_R[:, None], out_RT, mask=inside_RT)


@gluon.jit
def stored_tokens(TOKENS: gl.constexpr):
    """0 .. TOKENS - 1 in the layout of `store_rows`."""
    return gl.arange(0, TOKENS, gl.SliceLayout(0, _STORED))


def reads(weight: FourBitWords) -> bool:
    """Whether `products` takes this weight [.., O, I]; it has no zero points."""
    if weight.scales.dtype == torch.int32:
        return weight.inputs % 8 == 0  # rows of x begin at multiples of 16 bytes
    if weight.zeros is not None or weight.scales.dtype != torch.bfloat16:
        return False
    return weight.inputs % (128 if weight.group in (32, 64) else 8) == 0


def described(matrix: Tensor, tile: list[int]) -> TensorDescriptor:
    """The descriptor by which TMA loads tiles of a 16-bit matrix."""
    layout = gl.NVMMASharedLayout(min(tile[-1] * 2, 128), 16, len(tile))
    return TensorDescriptor.from_tensor(matrix, tile, layout)


def scale_words(weight: FourBitWords) -> tuple[Tensor, dict[str, Any]]:
    """The scales as the kernels take them, and the constants that depend on them."""
    scales, group = weight.scales, weight.group
    if group in (32, 64):
        scales = scales.view(torch.int32)
    whole_rows = group == weight.inputs
    group = triton.next_power_of_2(group) * COLUMNS if whole_rows else group
    return scales, {"GROUP": group, "CHUNKS": triton.cdiv(weight.inputs, COLUMNS)}
