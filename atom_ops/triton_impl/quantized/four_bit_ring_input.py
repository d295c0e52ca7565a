# ruff: noqa: RUF005 - Triton unpacks no tuple within another
# mypy: disable-error-code="assignment, misc, var-annotated"
"""The input of one token in the registers of `four_bit_ring`, alone or after a norm or a gated activation.

mma.m16n8k16 multiplies 16 rows by 8 columns, of which one token would use one, with its activations in eight
times as many registers as they need. So the columns are the quarters of two chunks: an instruction for one of
them gives its sums in one column, and what no one needs in the others. Then lane L holds the pairs of
activations 4 L .. 4 L + 3 of two chunks, as they lie in memory:

    column   0   1   2   3     4   5   6   7
    chunk    |    even    |    |    odd     |
    quarter  0   1   2   3     0   1   2   3
    lanes    0-3 4-7 ...                 28-31

A warp has 16-byte loads of neighbouring lanes, and no number moves between threads but the sum of squares.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_STAGE_PAIRS = gl.constexpr(2048)
"""Pairs of bfloat16 that all warps multiply in a stage."""
_SILU = gl.constexpr(
    """{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 t, t;
    mul.f32 $0, $1, t;
    }"""
)
"""x / (1 + 2 ** (x * -log2 e)). Every program computes it for all inputs: single instructions count."""


@gluon.constexpr_function
def own_layout(count, warps):
    """Layout of [threads, count]: each thread has its own numbers."""
    return gl.BlockedLayout([1, count], [32, 1], [warps, 1], [1, 0])


@gluon.jit
def _low(pairs):
    return (pairs << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _high(pairs):
    return (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _pairs_of(low, high):
    """Rounded to bfloat16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _silu(gate):
    return gl.inline_asm_elementwise(_SILU, "=&f,f", [gate], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _place(step: gl.constexpr, two: gl.constexpr):
    """Where the thread's four pairs of two chunks of its warp are, [threads, 4]."""
    WARPS: gl.constexpr = gl.num_warps()
    thread = gl.expand_dims(gl.arange(0, WARPS * 32, gl.SliceLayout(1, own_layout(4, WARPS))), 1)
    reg = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, own_layout(4, WARPS))), 0)
    in_warp = two * 128 + thread % 32 * 4 + reg
    return step * _STAGE_PAIRS + thread // 32 * (_STAGE_PAIRS // WARPS) + in_warp


@gluon.jit
def load_pairs(x, STEPS: gl.constexpr):
    """The thread's pairs of x: for each stage, and each two chunks of its warp, int32 [threads, 4]."""
    found = ()
    for step in gl.static_range(STEPS):
        for two in gl.static_range(_STAGE_PAIRS // gl.num_warps() // 128):
            found = found + (gl.load(x + _place(step, two)),)
    return found


@gluon.jit
def store_pairs(out, pairs, STEPS: gl.constexpr):
    """Where `load_pairs` found them."""
    EACH: gl.constexpr = _STAGE_PAIRS // gl.num_warps() // 128
    for step in gl.static_range(STEPS):
        for two in gl.static_range(EACH):
            gl.store(out + _place(step, two), pairs[step * EACH + two])


@gluon.jit
def added(x, residual):
    """Rounded, as the residual sum is stored."""
    found = ()
    for k in gl.static_range(len(x)):
        low, high = _low(x[k]) + _low(residual[k]), _high(x[k]) + _high(residual[k])
        found = found + (_pairs_of(low, high),)
    return found


@gluon.jit
def normed(x, norm_weight, eps, INPUTS: gl.constexpr):
    """RMS norm, rounded as by its own kernel."""
    squares = gl.zeros_like(_low(x[0]))
    for k in gl.static_range(len(x)):
        squares += _low(x[k]) * _low(x[k]) + _high(x[k]) * _high(x[k])
    scale = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / INPUTS + eps)
    found = ()
    for k in gl.static_range(len(x)):
        low = _low(x[k]) * scale * _low(norm_weight[k])
        high = _high(x[k]) * scale * _high(norm_weight[k])
        found = found + (_pairs_of(low, high),)
    return found


@gluon.jit
def gated(gate, up):
    """silu(gate) * up, rounded as by its own kernel."""
    found = ()
    for k in gl.static_range(len(gate)):
        low = _silu(_low(gate[k])) * _low(up[k])
        high = _silu(_high(gate[k])) * _high(up[k])
        found = found + (_pairs_of(low, high),)
    return found
