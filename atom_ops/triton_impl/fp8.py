"""float8_e4m3fn in kernels, without the conversions that some GPUs lack."""

import triton
import triton.language as tl


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
