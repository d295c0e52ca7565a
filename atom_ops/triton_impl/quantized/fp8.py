"""float8_e4m3fn in kernels, without the conversions that some GPUs lack.

Attention over a float8 cache multiplies in float16, which holds every code exactly, and into which NVIDIA
GPUs convert two codes in one instruction. Queries, and weights times scales, are divided by the largest of
them, so that float16 holds them too; float32 ones stay as they are.
"""

import torch
import triton
import triton.language as tl

from atom_ops.triton_impl.hardware.target import INTERPRETED

_ADA = (8, 9)
SMALLEST = tl.constexpr(1.0e-30)
"""In place of 0, to divide by."""

# Two words at once: the 7 low bits of a code go to the low end of bfloat16's exponent, the sign to bit 15.
_PAIRS_BF16 = tl.constexpr(
    """{
    .reg .b32 t, u, scale, zero;
    mov.b32 scale, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    shl.b32 t, $2, 4;
    and.b32 t, t, 0x07F007F0;
    shl.b32 u, $2, 8;
    lop3.b32 t, u, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $0, t, scale, zero;
    shr.b32 t, $2, 4;
    and.b32 t, t, 0x07F007F0;
    lop3.b32 t, $2, 0x80008000, t, 0xEA;
    fma.rn.bf16x2 $1, t, scale, zero;
    }"""
)
# The same in float16, by the GPU's own conversion: the low bytes of two words, then the high bytes.
PAIRS_F16 = tl.constexpr(
    """{
    .reg .b32 t;
    .reg .b16 low, high;
    prmt.b32 t, $2, 0, 0x3120;
    mov.b32 {low, high}, t;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)


def converts_float8(device: torch.device) -> bool:
    """Whether the GPU has NVIDIA's conversions of float8_e4m3fn: PTX of `decode_fp8_pairs`."""
    if INTERPRETED or torch.version.hip is not None:
        return False
    return device.type == "meta" or torch.cuda.get_device_capability(device) >= _ADA


@triton.jit
def decode_fp8(code, dtype: tl.constexpr):
    """The values of float8_e4m3fn codes as `dtype`.

    The code's bits move to the top of the wider type (sign, exponent, mantissa), which leaves the
    value off by a power of two. The mask clears the copies of the sign that widening makes.
    """
    signed = code.to(tl.int8, bitcast=True)
    if dtype == tl.bfloat16:
        bits = (signed.to(tl.int16) << 4) & -0x7810
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True) * 2.0**120
    elif dtype == tl.float16:
        bits = (signed.to(tl.int16) << 7) & -0x4080
        return bits.to(tl.int16).to(tl.float16, bitcast=True) * 2.0**8
    else:
        bits = (signed.to(tl.int32) << 20) & -0x78100000
        return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def decode_fp8_pairs(word, dtype: tl.constexpr, PTX: tl.constexpr):
    """The values of the low and of the high byte of int16 words, which hold two float8_e4m3fn codes each.

    Tiles of words move through shared memory as those of 16-bit values do, transposed ones too; tiles of
    bytes are read from it byte by byte.
    """
    if PTX and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _PAIRS_BF16, "=r,=r,r", [word], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif PTX and dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            PAIRS_F16, "=r,=r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        bits = word.to(tl.int32)
        low = decode_fp8((bits & 0xFF).to(tl.uint8), dtype)
        high = decode_fp8(((bits >> 8) & 0xFF).to(tl.uint8), dtype)
    return low, high


@triton.jit
def largest_of(q_ME):
    """The largest absolute value of queries; 1 for float32, which needs no other unit."""
    if q_ME.dtype == tl.float32:
        return 1.0
    else:
        return tl.maximum(tl.max(tl.abs(q_ME.to(tl.float32))), SMALLEST)


@triton.jit
def in_float16(q_ME, unit):
    """Queries in multiples of `unit`, as float16; float32 as they are."""
    if q_ME.dtype == tl.float32:
        return q_ME
    else:  # without it, Triton compiles both
        return (q_ME.to(tl.float32) / unit).to(tl.float16)


@triton.jit
def larger_of_both(a, b, other_a, other_b):
    """To reduce two tensors at once."""
    return tl.maximum(a, other_a), tl.maximum(b, other_b)
