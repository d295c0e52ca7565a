"""4-bit weights in kernels: e2m1 (MXFP4) and integers with a scale for each group (INT4).

The kernels read `FourBitWords`: a row is cut into chunks of 128 columns, and the 16-bit word j of a chunk
holds the codes of its columns j, 32 + j, 64 + j and 96 + j: one of each quarter. Decoding a tile of words
[.., 32] thus gives four tiles [.., 32], each of 32 neighbouring columns, which share their scale. No number
moves between threads, and one instruction decodes two codes:

    int4    quarter q in bits 4q .. 4q + 3. Below the bits of 128.0 a code is 128 + code in bfloat16.
    e2m1    the sign at bit 15 and the magnitude at bits 8 .. 6, where bfloat16 has its sign, the low end of
            its exponent and the top of its mantissa, give 2^-126 times the number; the scales hold 2^126.
            The first three quarters are there after a shift by 0, 3 and 6 bits; the last one has the bits
            that these leave: its sign at bit 14, its magnitude at bits 11, 10 and 13.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.hardware.target import INTERPRETED
from atom_ops.weights import FourBitWords

COLUMNS = 128
"""Columns of a chunk."""
WORDS = 32
"""16-bit words of a chunk."""
_BF16X2_CAPABILITY = (8, 0)

_E2M1_MOVED = (
    "and.b32 t, {word}, 0x81C081C0;",
    "shl.b32 t, {word}, 3; and.b32 t, t, 0x81C081C0;",
    "shl.b32 t, {word}, 6; and.b32 t, t, 0x81C081C0;",
    """
    shr.b32 u, {word}, 7;
    and.b32 t, u, 0x00980098;
    mul.lo.u32 t, t, 272;
    and.b32 u, u, 0x00400040;
    lop3.b32 t, t, 0x81808180, u, 0xEA;
    """,
)
"""t: two numbers of each quarter. The last one's sign is at bit 7 after the shift, and the upper two bits of
its magnitude at 4 and 3: 272 times them has these at 15, 8 and 7, and a carry goes no further than bit 13."""
_E2M1 = "{moved} fma.rn.bf16x2 {number}, t, {scale}, zero;"
_INT4 = """
    shr.b32 t, {word}, {shift};
    lop3.b32 t, t, 0x000F000F, magic, 0xEA;
    fma.rn.bf16x2 t, t, one, {offset};
    fma.rn.bf16x2 {number}, t, {scale}, zero;
"""
"""128 + code, minus 128 and the zero point, times the scale."""


def _e2m1(quarter: int, number: str, word: str, scale: str) -> str:
    return _E2M1.format(moved=_E2M1_MOVED[quarter].format(word=word), number=number, scale=scale)


def _int4(quarter: int, number: str, word: str, scale: str, offset: str) -> str:
    return _INT4.format(shift=4 * quarter, number=number, word=word, scale=scale, offset=offset)


def _scoped(*instructions: str) -> str:
    head = """{
    .reg .b32 t, u, one, zero, magic, centre;
    mov.b32 one, 0x3F803F80;
    mov.b32 zero, 0x80008000;
    mov.b32 magic, 0x43004300;
    mov.b32 centre, 0xC308C308;
    """
    return head + "".join(instructions) + "}"


E2M1_BF16 = tl.constexpr(
    _scoped(*(_e2m1(quarter, f"${quarter}", "$4", f"${5 + quarter}") for quarter in range(4)))
)
"""Four quarters of a word ($4) with their scales."""
INT4_BF16 = tl.constexpr(
    _scoped(
        *(_int4(quarter, f"${quarter}", "$4", f"${5 + quarter}", f"${9 + quarter}") for quarter in range(4))
    )
)
"""The same with -128 - zero points as operands after the scales."""


def _by_half(half: str, instructions: str) -> str:
    """`instructions` with scale s: a half of $2, l or h."""
    return _scoped(
        f".reg .b16 l, h; .reg .b32 s; mov.b32 {{l, h}}, $2; mov.b32 s, {{{half}, {half}}};", instructions
    )


E2M1_QUARTERS = tl.constexpr(
    tuple(_by_half(half, _e2m1(quarter, "$0", "$1", "s")) for quarter, half in enumerate("llhh"))
)
"""One quarter of a word ($1); its scale is the lower half of $2, of the last two the upper one."""
INT4_QUARTERS = {
    group: tl.constexpr(
        tuple(
            _by_half(half, _int4(quarter, "$0", "$1", "s", "centre")) for quarter, half in enumerate(halves)
        )
    )
    for group, halves in {32: "lhlh", 64: "llhh", 128: "llll"}.items()
}
"""The same with a zero point of 8, and halves that depend on the group."""


@triton.jit
def _e2m1_number(bits, dtype: tl.constexpr):
    """2^-126 (float16: 2^-14) times the number, from its sign at bit 15 and its magnitude at bits 8 .. 6."""
    if dtype == tl.bfloat16:
        number = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        number = ((bits & 0x8000) | ((bits & 0x01C0) << 3)).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        number = (bits << 16).to(tl.float32, bitcast=True)
    return number


@triton.jit
def decode_e2m1(words, a, b, c, d, dtype: tl.constexpr, PTX: tl.constexpr):
    """The numbers of the four quarters. a .. d: `e2m1_scale` of each, whose shape fits that of `words`."""
    if PTX and dtype == tl.bfloat16:
        first, second, third, last = tl.inline_asm_elementwise(
            E2M1_BF16, "=r,=r,=r,=r,r,r,r,r,r", [words, a, b, c, d],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits = words.to(tl.int32)
        first = _e2m1_number(bits & 0x81C0, dtype) * a
        second = _e2m1_number((bits << 3) & 0x81C0, dtype) * b
        third = _e2m1_number((bits << 6) & 0x81C0, dtype) * c
        last_bits = ((bits << 1) & 0x8000) | ((bits >> 3) & 0x0180) | ((bits >> 7) & 0x0040)
        last = _e2m1_number(last_bits, dtype) * d
    return first, second, third, last


@triton.jit
def e2m1_scale(bytes, dtype: tl.constexpr):
    """What the numbers of `decode_e2m1` are multiplied by, from the stored byte: the exponent plus 253."""
    if dtype == tl.bfloat16:
        scale = (bytes << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        scale = (tl.maximum(bytes - 112, 0) << 23).to(tl.float32, bitcast=True).to(tl.float16)
    else:
        scale = (bytes << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def decode_int4(words, a, b, c, d, zero_a, zero_b, zero_c, zero_d, dtype: tl.constexpr, PTX: tl.constexpr):
    """The numbers of the four quarters; scale and zero of each in a shape that fits that of `words`."""
    if PTX and dtype == tl.bfloat16:
        first, second, third, last = tl.inline_asm_elementwise(
            INT4_BF16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [words, a, b, c, d, -128 - zero_a, -128 - zero_b, -128 - zero_c, -128 - zero_d],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        codes = words.to(tl.int32)
        first = ((codes & 15).to(dtype) - zero_a) * a
        second = (((codes >> 4) & 15).to(dtype) - zero_b) * b
        third = (((codes >> 8) & 15).to(dtype) - zero_c) * c
        last = (((codes >> 12) & 15).to(dtype) - zero_d) * d
    return first, second, third, last


@triton.jit
def _of_quarters(table, row, chunk, inside, groups, other, GROUP: tl.constexpr, dtype: tl.constexpr):
    """The entries of `table` [.., groups] for the four quarters of a chunk, each in the shape of `row`.

    All that a chunk has are loaded at once: loads of four bytes and more can be asynchronous.
    """
    if GROUP < 128:
        COUNT: tl.constexpr = 128 // GROUP
        axis: tl.constexpr = len(row.shape)
        number = tl.arange(0, COUNT)
        place = tl.expand_dims(row * groups + chunk * COUNT, axis) + number
        left = tl.expand_dims(groups - chunk * COUNT + row * 0, axis)
        entries = tl.load(table + place, mask=tl.expand_dims(inside, axis) & (number < left), other=other)
        if COUNT == 4:
            even, odd = tl.split(tl.reshape(entries, row.shape + [2, 2]))  # noqa: RUF005 - of constexprs
            a, c = tl.split(even)
            b, d = tl.split(odd)
        else:
            a, c = tl.split(entries)
            b, d = a, c
    else:
        group = chunk if GROUP == 128 else chunk * 128 // GROUP
        a = tl.load(table + row * groups + group, mask=inside & (group < groups), other=other)
        b, c, d = a, a, a
    return a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype)


@triton.jit
def decode_words(
    words, scales, zeros, row, chunk, inside, groups,
    GROUP: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The numbers of the four quarters of `words` [.., 32], each [.., 32] in `dtype`.

    `row` has the shape [..], which `chunk` (of the row) fits; `inside` says which of them exist. `groups`
    is the number of entries of a row of `scales`. GROUP: columns that share a scale (32, 64 or a multiple
    of 128), or 0 for e2m1, whose scales are 32-bit words of a chunk's four.
    """
    axis: tl.constexpr = len(words.shape) - 1
    if GROUP == 0:
        four = tl.load(scales + row * groups + chunk, mask=inside, other=0)
        a = tl.expand_dims(e2m1_scale(four & 255, dtype), axis)
        b = tl.expand_dims(e2m1_scale((four >> 8) & 255, dtype), axis)
        c = tl.expand_dims(e2m1_scale((four >> 16) & 255, dtype), axis)
        d = tl.expand_dims(e2m1_scale((four >> 24) & 255, dtype), axis)
        first, second, third, last = decode_e2m1(words, a, b, c, d, dtype, PTX)
    else:
        a, b, c, d = _of_quarters(scales, row, chunk, inside, groups, 0.0, GROUP, dtype)
        zero_a = tl.full(a.shape, 8, dtype)
        zero_b, zero_c, zero_d = zero_a, zero_a, zero_a
        if zeros is not None:
            zero_a, zero_b, zero_c, zero_d = _of_quarters(
                zeros, row, chunk, inside, groups, 0, GROUP, dtype
            )  # fmt: skip
        first, second, third, last = decode_int4(
            words, tl.expand_dims(a, axis), tl.expand_dims(b, axis), tl.expand_dims(c, axis),
            tl.expand_dims(d, axis), tl.expand_dims(zero_a, axis), tl.expand_dims(zero_b, axis),
            tl.expand_dims(zero_c, axis), tl.expand_dims(zero_d, axis), dtype, PTX,
        )  # fmt: skip
    return first, second, third, last


@triton.jit
def join_quarters(first, second, third, last):
    """The numbers of chunks [.., 4, 32] from those of their quarters; moves no number between threads."""
    joined = tl.join(tl.join(first, second), tl.join(third, last))
    if len(first.shape) == 2:
        return joined.permute(0, 3, 2, 1)
    else:
        return joined.permute(0, 1, 4, 3, 2)


def settings_of(weight: FourBitWords) -> dict[str, Any]:
    """The constants of kernels that call `decode_words`."""
    whole_rows = weight.group == weight.inputs
    group = triton.next_power_of_2(weight.inputs) * COLUMNS if whole_rows else weight.group
    return {"GROUP": group, "PTX": _has_ptx(weight.words)}


def _has_ptx(words: Tensor) -> bool:
    if INTERPRETED or torch.version.hip is not None:
        return False
    return words.is_meta or torch.cuda.get_device_capability(words.device) >= _BF16X2_CAPABILITY
