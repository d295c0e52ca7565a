# ruff: noqa: RUF005 - Triton unpacks no tuple within another
# mypy: disable-error-code="assignment, misc, var-annotated"
"""`linear` of up to 8 tokens with a 4-bit weight (`FourBitWords`) on Hopper, by persistent programs.

A program multiplies the same number of tiles of 16 rows as the others, with the instructions of
`four_bit_mma`. One warp, the producer, copies words and scales by TMA into a ring of stages in shared memory:

    tiles     |     0     |     1     |   of a program, one after another
    stages    |  0  |  1  |  2  |  3  |   4096 columns each, which all other warps multiply together
    warps     | 0 .. 7 |                  512 columns each: four chunks; of 16 warps 256: two chunks

The first stages are on their way before the previous kernel ends (PDL), and the next kernel may start once
the last ones are. Two programs of one kernel must not meet on an SM: the rows are shared out before the
launch, and the rest would wait for that SM. With 3 stages two fit: 24576 x 4096 took 15 us after itself, but
25 after a norm, whose program leaves one SM no room. Programs of 8 warps and 4 stages, and of 16 warps and 2,
fit an SM together, but no two of a kind: the former fill its shared memory, the latter its registers. So the
ring of the next kernel can fill while this one multiplies its last stages.

The producer is a warp of its own because Triton orders the barriers and copies of one warp by barriers of all
warps of its partition: five in each stage without a producer.

A stage lies in the order in which threads read it: chunk of a warp, upper or lower 8 rows, warp, row, words.
TMA reads the weight in pieces of 64 bytes for that; a weight in the order of the stages took as long.

For one token every program also computes the norm or the activation before, and rounds where their own
kernels round; program 0 stores the residual sum. See `four_bit_ring_input`.

Written in Gluon, which has no interpreter.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_ops.triton_impl.hardware.gluon_pdl import pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.hopper_pipeline import load_tile, make_barriers, release
from atom_ops.triton_impl.hardware.pdl import launch_options
from atom_ops.triton_impl.quantized.four_bit import settings_of
from atom_ops.triton_impl.quantized.four_bit_mma import (
    MOST_TOKENS,
    _activations,
    _decoded,
    _multiplied,
    _one_of,
    _pairs,
    _scale_bits,
)
from atom_ops.triton_impl.quantized.four_bit_ring_input import (
    added,
    gated,
    load_pairs,
    normed,
    own_layout,
    store_pairs,
)
from atom_ops.triton_impl.quantized.quantized_plans import PROGRAMS, RingPlan
from atom_ops.weights import FourBitWords

_ROWS = gl.constexpr(16)
"""Rows of a tile: as many as an instruction multiplies."""
_STAGE_CHUNKS = gl.constexpr(32)
"""Chunks of 128 columns in a stage."""
_WORDS = 16
"""int32 of a chunk, which is two 16-bit words each."""
_COLUMNS = 4096
"""Columns of a stage."""
_MOST_INPUTS = 4 * _COLUMNS
"""Most inputs of one token, which stay in registers or shared memory."""
_PRODUCER_REGISTERS = gl.constexpr(24)
_REGISTERS = 96
"""Per thread, on average: the producer has fewer."""
_REGISTERS_OF_ONE = {(8, False): 72, (8, True): 80, (16, False): 56, (16, True): 56}
"""Register limit for one token, by (multiplying warps, is MXFP4). INT4's programs of 8 and 16 fit an SM."""
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
_FLAT_CUBE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))


@gluon.jit
def _copy(copied, STEPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr):
    """The producer."""
    words_desc, scales_desc, words, scales, ready, free, first, stop = copied
    for i in range((stop - first) * STEPS):
        tile = first + i // STEPS
        step = i % STEPS
        slot = i % STAGES
        barrier = ready.index(slot)
        mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(barrier, words_desc.block_type.nbytes + scales_desc.block_type.nbytes)
        warps: gl.constexpr = words_desc.block_type.shape[2]
        load_tile(words_desc, [0, tile * 2, step * warps, 0, 0], barrier, words.index(slot))
        load_tile(scales_desc, [tile * _ROWS, step * _STAGE_CHUNKS], barrier, scales.index(slot))
    pdl_launch_dependents(PDL)


@gluon.jit
def _scales_of(scales, slot, half: gl.constexpr, CHUNKS: gl.constexpr):
    """[threads, 4]: of a warp's chunks, if two are all twice, and of the row that four lanes share."""
    WARPS: gl.constexpr = gl.num_warps()
    by_row: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 4 // CHUNKS, CHUNKS], [1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    of_rows: gl.constexpr = gl.SliceLayout(3, by_row)
    own = scales.index(slot * 2 + half).permute((1, 0, 2)).load(gl.SliceLayout(2, of_rows))
    wide = gl.expand_dims(gl.expand_dims(own, 2), 3)
    wide += gl.zeros([WARPS, 8, 4, 4 // CHUNKS, CHUNKS], own.dtype, by_row)
    return gl.convert_layout(gl.reshape(wide, [WARPS * 32, 4]), own_layout(4, gl.num_warps()))


@gluon.jit
def _products(low, high, activations, part, c: gl.constexpr):
    """part + the products of a chunk, of up to 8 tokens."""
    for q in gl.static_range(4):
        part = _multiplied(low[q], high[q], activations[4 * c + q], part)
    return part


@gluon.jit
def _products_of_one(low, high, pairs, zeros):
    """The products of a chunk: sums of a quarter's columns, where its column of the instruction is."""
    parts = ()
    for q in gl.static_range(4):
        parts = parts + (_multiplied(low[q], high[q], pairs, zeros),)
    reg = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, own_layout(4, gl.num_warps()))), 0)
    lane = gl.expand_dims(gl.arange(0, zeros.shape[0], gl.SliceLayout(1, own_layout(4, gl.num_warps()))), 1)
    first = gl.where(reg % 2 == 0, parts[0], parts[1])
    last = gl.where(reg % 2 == 0, parts[2], parts[3])
    return gl.where(lane % 2 == 0, first, last)


@gluon.jit
def _chunk(
    total, low_words, high_words, scales, activations, c: gl.constexpr, l4,
    GROUP: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """The total of a tile, with the products of a warp's chunk c."""
    LATE: gl.constexpr = GROUP >= 128
    reg = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, own_layout(4, gl.num_warps()))), 0)
    low = _decoded(low_words, scales, scales, c, 0, reg, l4, 2, GROUP, 1, LATE, False)
    high = _decoded(high_words, scales, scales, c, 1, reg, l4, 2, GROUP, 1, LATE, False)
    if ONE:
        part = _products_of_one(low, high, activations[c // 2], gl.zeros_like(total))
    else:
        part = _products(low, high, activations, gl.zeros_like(total) if LATE else total, c)
    if LATE:
        of_low = _one_of(_scale_bits(scales[0], GROUP, LATE), c, reg)
        of_high = _one_of(_scale_bits(scales[1], GROUP, LATE), c, reg)
        part = total + part * gl.where(reg < 2, of_low, of_high).to(gl.float32, bitcast=True)
    elif ONE:
        part += total
    return part


@gluon.jit
def _store(sums, total, bias, out, first_row, tokens, outputs, ONE: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Add the totals of all warps, for one token also of its quarters and chunks, and store a tile."""
    WARPS: gl.constexpr = gl.num_warps()
    if ONE:
        by_lane = gl.reshape(total, [WARPS, 8, 4, 2, 2])
        total = gl.reshape(gl.sum(gl.sum(by_lane, 4), 2), [WARPS, 16])
    else:
        total = gl.reshape(total, [WARPS, 128])
    sums.store(total)
    by_warp: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [0, 1])
    sum_V = gl.sum(sums.load(by_warp), 0)
    place = gl.arange(0, sums.shape[1], gl.SliceLayout(0, by_warp))
    if ONE:
        token = place * 0
        output = first_row + place // 2 + place % 2 * 8
    else:
        # A lane has four sums: of two rows, and of two tokens each.
        lane = place // 4
        reg = place % 4
        token = lane % 4 * 2 + reg % 2
        output = first_row + lane // 4 + reg // 2 * 8
    inside = token < tokens
    if HAS_BIAS:
        sum_V += gl.load(bias + output, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + token * outputs + output, sum_V.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _input_of_one(
    x, residual, norm_weight, total_x, eps, BEFORE: gl.constexpr, INPUTS: gl.constexpr,
    STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Pairs of the one token's input, as `load_pairs` gives them."""
    NORM: gl.constexpr = BEFORE == "norm" or BEFORE == "add_norm"
    of_norm = load_pairs(norm_weight, STEPS if NORM else 0)
    pdl_wait(PDL)
    pairs = load_pairs(x, STEPS)
    if BEFORE == "gate":
        pairs = gated(pairs, load_pairs(x + INPUTS // 2, STEPS))
    if BEFORE == "add_norm":
        pairs = added(pairs, load_pairs(residual, STEPS))
        if gl.program_id(0) == 0:
            store_pairs(total_x, pairs, STEPS)
    if NORM:
        pairs = normed(pairs, of_norm, eps, INPUTS)
    return pairs


@gluon.jit
def _of_step(kept, step, CHUNKS: gl.constexpr):
    """The pairs of a stage."""
    found = ()
    for k in gl.static_range(CHUNKS // 2):
        found = found + (kept.index(step * (CHUNKS // 2) + k).load(own_layout(4, gl.num_warps())),)
    return found


@gluon.jit
def _multiply(
    shared, INPUTS: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    ONE: gl.constexpr, BEFORE: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The consumers."""
    words, scales, ready, free, sums, kept, x, residual, norm_weight, bias, out, total_x = shared[:12]
    eps, tokens, outputs, first, stop = shared[12:]
    WARPS: gl.constexpr = gl.num_warps()
    CHUNKS: gl.constexpr = _STAGE_CHUNKS // WARPS
    own: gl.constexpr = own_layout(4, WARPS)
    pieces = words._reinterpret(gl.int32, [STAGES * 2 * CHUNKS, WARPS * 32, 4], _FLAT)
    entries = scales._reinterpret(scales.dtype, [STAGES * 2, 8, WARPS, CHUNKS], _FLAT_CUBE)
    thread = gl.expand_dims(gl.arange(0, WARPS * 32, gl.SliceLayout(1, own)), 1)
    reg = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, own)), 0)
    lead = thread % 32 // 4
    l4 = thread % 4 * 4 + reg
    chunk = thread // 32 * CHUNKS
    if ONE:
        activations = _input_of_one(x, residual, norm_weight, total_x, eps, BEFORE, INPUTS, STEPS, PDL)
        if STEPS > 1:
            for k in gl.static_range(STEPS * CHUNKS // 2):
                kept.index(k).store(activations[k])
    else:
        pdl_wait(PDL)
        activations = _activations(x, chunk, lead, l4, tokens, INPUTS, True)
    i = 0
    for tile in range(first, stop):
        even = gl.zeros([WARPS * 32, 4], gl.float32, own)
        odd = gl.zeros_like(even)
        for step in range(STEPS):
            slot = i % STAGES
            now = _of_step(kept, step, CHUNKS) if ONE and STEPS > 1 else activations
            mbarrier.wait(ready.index(slot), i // STAGES & 1)
            of_rows = (_scales_of(entries, slot, 0, CHUNKS), _scales_of(entries, slot, 1, CHUNKS))
            found = ()
            for piece in gl.static_range(2 * CHUNKS):
                found = found + (pieces.index(slot * (2 * CHUNKS) + piece).load(own),)
            release(free.index(slot))
            for c in gl.static_range(CHUNKS):
                total = _chunk(
                    odd if ONE and c % 2 == 1 else even, found[2 * c], found[2 * c + 1], of_rows, now,
                    c, l4, GROUP, ONE,
                )  # fmt: skip
                if ONE and c % 2 == 1:
                    odd = total
                else:
                    even = total
            if not ONE and STEPS > 1:
                # They arrive while the program waits for the next stage.
                next_chunk = chunk + (step + 1) % STEPS * _STAGE_CHUNKS
                activations = _activations(x, next_chunk, lead, l4, tokens, INPUTS, True)
            i += 1
        if ONE:
            even = gl.where(thread % 4 < 2, even, odd)
        _store(sums, even, bias, out, tile * _ROWS, tokens, outputs, ONE, HAS_BIAS)


@gluon.jit(do_not_specialize=["tokens"])
def _multiply_few(
    words_desc, scales_desc, x, residual, norm_weight, bias, out, total_x, eps, tokens, outputs, tiles,
    INPUTS: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    KEPT: gl.constexpr, ONE: gl.constexpr, BEFORE: gl.constexpr, HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,), at most one for each SM. KEPT: tensors [threads, 4] of the input in shared memory."""
    first = gl.program_id(0) * tiles // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * tiles // gl.num_programs(0)
    WARPS: gl.constexpr = gl.num_warps()
    words = gl.allocate_shared_memory(
        words_desc.dtype, [STAGES] + words_desc.block_type.shape, words_desc.layout
    )
    scales = gl.allocate_shared_memory(
        scales_desc.dtype, [STAGES] + scales_desc.block_type.shape, scales_desc.layout
    )
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, 16 if ONE else 128], _FLAT)
    kept = gl.allocate_shared_memory(gl.int32, [KEPT, WARPS * 32, 4] if KEPT > 0 else [1, 1, 4], _FLAT)
    ready, free = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    fence_async_shared()
    copied = (words_desc, scales_desc, words, scales, ready, free, first, stop)
    shared = (
        words, scales, ready, free, sums, kept, x, residual, norm_weight, bias, out, total_x,
        eps, tokens, outputs, first, stop,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (shared, INPUTS, GROUP, STEPS, STAGES, ONE, BEFORE, HAS_BIAS, PDL)),
            (_copy, (copied, STEPS, STAGES, PDL)),
        ],
        [1],
        [_PRODUCER_REGISTERS],
    )


def reads(weight: FourBitWords) -> bool:
    """Whether stages and tiles are whole, and scales are of 128 inputs, or MXFP4's; without zero points."""
    outputs, inputs = weight.shape
    whole = inputs % _COLUMNS == 0 and inputs <= _MOST_INPUTS and outputs % _ROWS.value == 0
    return whole and weight.zeros is None and weight.group in (0, 128)


def multiply(
    plan: RingPlan,
    x: Tensor,
    weight: FourBitWords,
    bias: Tensor | None,
    out_TO: Tensor,
    *,
    gated: bool = False,
    residual_TI: Tensor | None = None,
    norm_weight_I: Tensor | None = None,
    eps: float = 0.0,
    total_TI: Tensor | None = None,
) -> None:
    """Fill `out_TO` [T, O], and `total_TI` with x + residual; everything in bfloat16. See `reads`.

    Only one token may have a norm or an activation before; `gated`: x is [1, 2I].
    """
    outputs, inputs = weight.shape
    tokens = len(x)
    one = len(x) == 1
    assert tokens <= MOST_TOKENS, "not a plan for so many tokens"
    assert reads(weight), "not a plan for this weight"
    assert one or not (gated or norm_weight_I is not None), "only for one token"
    before = "gate" if gated else "nothing" if norm_weight_I is None else "norm"
    if residual_TI is not None:
        before = "add_norm"
    tiles = outputs // _ROWS.value
    steps = inputs // _COLUMNS
    warps = plan.warps if one else 8
    registers = _REGISTERS_OF_ONE[warps, weight.group == 0] if one else _REGISTERS
    pairs = _pairs(x)  # in place of what is missing: a tuple of arguments of a partition holds no None
    _multiply_few[(min(PROGRAMS, tiles),)](
        _word_stages(weight.words.view(torch.int32), warps), _scale_stages(weight.scales), pairs,
        pairs if residual_TI is None else _pairs(residual_TI),
        pairs if norm_weight_I is None else _pairs(norm_weight_I), out_TO if bias is None else bias, out_TO,
        pairs if total_TI is None else _pairs(total_TI), eps, tokens, outputs, tiles,
        INPUTS=inputs, GROUP=settings_of(weight)["GROUP"], STEPS=steps, STAGES=plan.stages,
        KEPT=16 * steps // warps if one and steps > 1 else 0, ONE=one, BEFORE=before,
        HAS_BIAS=bias is not None, num_warps=warps, maxnreg=registers,
        **launch_options(x.device),
    )  # fmt: skip


def _word_stages(words: Tensor, warps: int) -> TensorDescriptor:
    """The words of a row are seen as chunks of a warp and warps, and rows as halves of tiles."""
    outputs, stored = words.shape
    chunks = _STAGE_CHUNKS.value // warps
    half = _ROWS.value // 2
    return TensorDescriptor(
        words,
        [chunks, outputs // half, stored // (chunks * _WORDS), half, _WORDS],
        [_WORDS, half * stored, chunks * _WORDS, stored, 1],
        [chunks, 2, warps, half, _WORDS],
        gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=5),
    )


def _scale_stages(scales: Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * scales.element_size(), rank=2)
    return TensorDescriptor.from_tensor(scales, [_ROWS.value, _STAGE_CHUNKS.value], layout)
