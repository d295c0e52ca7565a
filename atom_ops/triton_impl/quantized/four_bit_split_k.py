# mypy: disable-error-code="assignment, has-type"
"""GEMM of 4-bit weights (`FourBitWords`) and up to 128 tokens at a time on Hopper: TMA, WGMMA, split-K.

A program on each SM multiplies one tile, or its share of a tile's columns. A ring of stages in shared memory
holds the words and tokens of a step of SPAN chunks; the words of the first stages are on their way before
the previous kernel ends (PDL).

    producer     1 warp
    consumers    4 warps for each block of 64 rows, or 2 x 4 that take turns at its steps (PHASES). Words go
                 from shared memory into the registers of WGMMA's first operand, which decodes without
                 moving a number; half a chunk is decoded while the tensor cores multiply the half before

A tile has 2 or 3 blocks: the tokens come from the L2 cache for each tile, and with 64 tokens they are as many
bytes as the words of 256 rows. But partial sums cost more than tokens: with tiles of 256 rows and 8 programs
a GEMM of 4096 x 4096 took 21 us instead of 11.

The programs of a tile each reduce the sums of some of its tokens, always in the order of the programs: their
own from registers, those of others from partials. As in `hopper_linear` readers poll the values themselves:
between launches the workspace holds EMPTY, a NaN that no sum yields.

Written in Gluon, which has no interpreter.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom_ops.triton_impl.hardware.device_state import kept
from atom_ops.triton_impl.hardware.gluon_pdl import pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.hopper_pipeline import load_tile, make_barriers, release
from atom_ops.triton_impl.hardware.pdl import launch_options
from atom_ops.triton_impl.hardware.persistent import num_sms
from atom_ops.triton_impl.linear.hopper_linear import _EMPTY
from atom_ops.triton_impl.quantized.four_bit import COLUMNS, WORDS
from atom_ops.triton_impl.quantized.four_bit_wgmma import (
    _of_quarters,
    _scales_of,
    _sums,
    decoded_half,
    described,
    reads,
    rows_layout,
    scale_words,
)
from atom_ops.triton_impl.quantized.quantized_plans import WgmmaPlan
from atom_ops.weights import FourBitWords

_ROWS = gl.constexpr(64)
"""Rows of a block: as many as WGMMA multiplies."""
_COLUMNS = gl.constexpr(COLUMNS)
_WORDS = gl.constexpr(WORDS)
_STORED = gl.constexpr(gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1]))
"""Layout of sums as they are stored: a warp has the rows that it multiplied."""
_EXCHANGED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0]))
"""Layout of sums in shared memory, without bank conflicts."""
_MAX_PROGRAMS = 132
_MAX_SUMS = 3 * 64 * 128
"""Most sums of a tile."""
_SHARED_BYTES = 200 << 10
"""The rest of an SM's shared memory is for the previous kernel."""
_PRODUCER_REGISTERS = 24
_REGISTERS = {2: 128, 3: 96, 4: 88}
"""Per thread, by the number of consumers, on average; the rest of an SM's are for the previous kernel."""
_REGISTERS_OF_MANY = {2: 168, 3: 112}
"""The same for tiles of 128 tokens."""


@gluon.jit
def _copy(copied, BLOCKS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr):
    """The producer."""
    weight, x, words, parts, ready, free, row, first_token, first, steps = copied
    size: gl.constexpr = BLOCKS * weight.block_type.nbytes + x.block_type.nbytes
    early = gl.minimum(steps, STAGES)
    for i in range(early):
        mbarrier.expect(ready.index(i), size)
        for b in gl.static_range(BLOCKS):
            at = [row + b * _ROWS, (first + i) * (SPAN * _WORDS)]
            load_tile(weight, at, ready.index(i), words.index(i * BLOCKS + b))
    pdl_wait(PDL)
    for i in range(early):
        load_tile(x, [first_token, (first + i) * (SPAN * _COLUMNS)], ready.index(i), parts.index(i))
    for i in range(early, steps):
        slot = i % STAGES
        mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(slot), size)
        for b in gl.static_range(BLOCKS):
            at = [row + b * _ROWS, (first + i) * (SPAN * _WORDS)]
            load_tile(weight, at, ready.index(slot), words.index(slot * BLOCKS + b))
        load_tile(x, [first_token, (first + i) * (SPAN * _COLUMNS)], ready.index(slot), parts.index(slot))
    pdl_launch_dependents(PDL)


@gluon.jit
def _products(
    words, parts, ready, free, place_R, first, steps,
    BLOCK: gl.constexpr, PHASE: gl.constexpr, BLOCKS: gl.constexpr, PHASES: gl.constexpr,
    TOKENS: gl.constexpr, CHUNKS: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """float32 [_ROWS, TOKENS]: every PHASES-th of the steps. `place_R` is where the rows' scales begin."""
    sums: gl.constexpr = _sums(TOKENS)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    of_step = _scales_of(place_R, first + PHASE, CHUNKS, SPAN, GROUP)
    of_next = _scales_of(place_R, first + PHASE + PHASES, CHUNKS, SPAN, GROUP)
    pdl_wait(PDL)
    total_RT = gl.zeros([_ROWS, TOKENS], gl.float32, sums)
    for i in range(PHASE, steps, PHASES):
        slot = i % STAGES
        now = of_step
        of_step = of_next
        of_next = _scales_of(place_R, first + i + 2 * PHASES, CHUNKS, SPAN, GROUP)
        mbarrier.wait(ready.index(slot), i // STAGES & 1)
        for c in gl.static_range(SPAN):
            words_RC = words.index(slot * BLOCKS + BLOCK).slice(c * _WORDS, _WORDS, dim=1).load(left)
            of_quarters = _of_quarters(now, c, GROUP)
            for half in gl.static_range(2):
                numbers_RC = decoded_half(words_RC, of_quarters, half, GROUP, left)
                part_TC = parts.index(slot).slice(c * _COLUMNS + half * 64, 64, dim=1)
                total_RT = warpgroup_mma(numbers_RC, part_TC.permute((1, 0)), total_RT, is_async=True)
                if c + half > 0:
                    # The registers of the half before may be overwritten.
                    total_RT, _ = warpgroup_mma_wait(1, deps=[total_RT, before_RC])  # noqa: F821
                before_RC = numbers_RC
        total_RT, _ = warpgroup_mma_wait(0, deps=[total_RT, before_RC])
        release(free.index(slot))
    return total_RT


@gluon.jit
def _store(total_RT, bias, out, first_output, first_token, outputs, tokens, HAS_BIAS: gl.constexpr):
    if HAS_BIAS:
        output_R = first_output + gl.arange(0, _ROWS, gl.SliceLayout(1, total_RT.type.layout))
        bias_R = gl.load(bias + output_R, mask=output_R < outputs, other=0.0)
        total_RT += bias_R.to(gl.float32)[:, None]
    output_R = first_output + gl.arange(0, _ROWS, gl.SliceLayout(1, _STORED))
    token_T = first_token + gl.arange(0, total_RT.shape[1], gl.SliceLayout(0, _STORED))
    out_RT = gl.convert_layout(total_RT.to(out.dtype.element_ty), _STORED)
    inside_RT = (output_R < outputs)[:, None] & (token_T < tokens)[None, :]
    gl.store(out + token_T.to(gl.int64)[None, :] * outputs + output_R[:, None], out_RT, mask=inside_RT)


@gluon.jit
def _shares_of(total_RT, COUNT: gl.constexpr):
    """The sums of COUNT equal shares of the tokens."""
    if COUNT == 1:
        return (total_RT,)
    else:
        HALF: gl.constexpr = total_RT.shape[1] // 2
        left, right = total_RT.reshape([_ROWS, 2, HALF]).permute((0, 2, 1)).split()
        return _shares_of(left, COUNT // 2) + _shares_of(right, COUNT // 2)


@gluon.jit
def _places(share_RT):
    """Places of the sums of a share in a partial result."""
    own: gl.constexpr = share_RT.type.layout
    WIDTH: gl.constexpr = share_RT.shape[1]
    row_R = gl.arange(0, _ROWS, gl.SliceLayout(1, own))
    return row_R[:, None] * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, own))[None, :]


@gluon.jit
def _reduce(own_RT, partials, split, SPLIT_K: gl.constexpr):
    """The sum of the program's own share and those in `partials` [SPLIT_K, _ROWS, tokens]; resets these."""
    own: gl.constexpr = own_RT.type.layout
    WIDTH: gl.constexpr = own_RT.shape[1]
    at_RT = _places(own_RT)
    total_RT = own_RT
    missing = 1
    while missing > 0:
        total_RT = gl.zeros_like(own_RT)
        missing_RT = gl.zeros([_ROWS, WIDTH], gl.int32, own)
        for s in gl.static_range(SPLIT_K):
            others_RT = (at_RT >= 0) & (split != s)
            part_RT = gl.load(partials + s * (_ROWS * WIDTH) + at_RT, others_RT, 0, volatile=True)
            missing_RT |= (part_RT == _EMPTY).to(gl.int32)
            total_RT += gl.where(others_RT, part_RT.to(gl.float32, bitcast=True), own_RT)
        missing = gl.max(gl.max(missing_RT, 1), 0)
    for s in gl.static_range(SPLIT_K):
        empty_RT = gl.full([_ROWS, WIDTH], _EMPTY, gl.int32, own)
        gl.store(partials + s * (_ROWS * WIDTH) + at_RT, empty_RT, (at_RT >= 0) & (split != s))
    return total_RT


@gluon.jit
def _finish(
    total_RT, partials, bias, out, first_output, first_token, outputs, tokens, split,
    SPLIT_K: gl.constexpr, SHARES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Store a block. Of several programs each stores a share of its tokens; `partials`: of this block."""
    if SPLIT_K == 1:
        _store(total_RT, bias, out, first_output, first_token, outputs, tokens, HAS_BIAS)
    else:
        WIDTH: gl.constexpr = total_RT.shape[1] // SHARES
        shares = _shares_of(total_RT, SHARES)
        own_RT = shares[0]
        at_RT = _places(own_RT)
        for k in gl.static_range(SHARES):
            own_RT = gl.where((at_RT >= 0) & (split == k), shares[k], own_RT)
            if split != k:
                partial = partials + (k * SPLIT_K + split) * (_ROWS * WIDTH)
                gl.store(partial + at_RT, shares[k].to(gl.int32, bitcast=True))
        if split < SHARES:
            sum_RT = _reduce(own_RT, partials + split * (SPLIT_K * _ROWS * WIDTH), split, SPLIT_K)
            token = first_token + split * WIDTH
            _store(sum_RT, bias, out, first_output, token, outputs, tokens, HAS_BIAS)


@gluon.jit
def _consume(
    shared,
    NUMBER: gl.constexpr, BLOCKS: gl.constexpr, PHASES: gl.constexpr, TOKENS: gl.constexpr,
    CHUNKS: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr, SHARES: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A consumer: block NUMBER % BLOCKS of the tile, in phase NUMBER // BLOCKS."""
    BLOCK: gl.constexpr = NUMBER % BLOCKS
    PHASE: gl.constexpr = NUMBER // BLOCKS
    words, parts, ready, free, sums, summed, scales, partials, bias, out = shared[:10]
    tile, row, first_token, first, steps, outputs, tokens, groups = shared[10:]
    first_output = row + BLOCK * _ROWS
    row_R = gl.minimum(first_output + gl.arange(0, _ROWS, rows_layout(TOKENS)), outputs - 1)
    total_RT = _products(
        words, parts, ready, free, scales + row_R.to(gl.int64) * groups, first, steps,
        BLOCK, PHASE, BLOCKS, PHASES, TOKENS, CHUNKS, SPAN, GROUP, STAGES, PDL,
    )  # fmt: skip
    if PHASE > 0:
        sums.index(BLOCK).store(total_RT)
        release(summed.index(BLOCK))
    else:
        if PHASES > 1:
            mbarrier.wait(summed.index(BLOCK), 0)
            total_RT += sums.index(BLOCK).load(total_RT.type.layout)
        partials += (tile * BLOCKS + BLOCK) * (SPLIT_K * _ROWS * TOKENS)
        _finish(
            total_RT, partials, bias, out, first_output, first_token, outputs, tokens, gl.program_id(1),
            SPLIT_K, SHARES, HAS_BIAS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens", "share"])
def _split_k(
    weight, x, scales, partials, bias, out, outputs, tokens, token_tiles, share, groups,
    BLOCKS: gl.constexpr, PHASES: gl.constexpr, TOKENS: gl.constexpr, CHUNKS: gl.constexpr,
    SPAN: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    SHARES: gl.constexpr, HAS_BIAS: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (tiles, splits of `share` steps); with several splits all programs must be resident at once."""
    words = gl.allocate_shared_memory(gl.int16, [STAGES * BLOCKS, _ROWS, SPAN * _WORDS], weight.layout)
    parts = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, SPAN * _COLUMNS], x.layout)
    ready, free = make_barriers(STAGES, 1), make_barriers(STAGES, BLOCKS)
    sums = gl.allocate_shared_memory(
        gl.float32, [BLOCKS if PHASES > 1 else 1, _ROWS, TOKENS if PHASES > 1 else 8], _EXCHANGED
    )  # fmt: skip
    summed = make_barriers(BLOCKS, 1)
    fence_async_shared()
    tile = gl.program_id(0)
    row = tile // token_tiles * (BLOCKS * _ROWS)
    first_token = tile % token_tiles * TOKENS
    first = gl.program_id(1) * share
    steps = gl.minimum(share, (CHUNKS + SPAN - 1) // SPAN - first)
    copied = (weight, x, words, parts, ready, free, row, first_token, first, steps)
    shared = (
        words, parts, ready, free, sums, summed, scales, partials, bias, out, tile, row, first_token, first,
        steps, outputs, tokens, groups,
    )  # fmt: skip
    if BLOCKS * PHASES == 2:
        gl.warp_specialize(
            [
                (_consume, (shared, 0, BLOCKS, PHASES, TOKENS, CHUNKS, SPAN, GROUP, STAGES, SPLIT_K,
                            SHARES, HAS_BIAS, PDL)),
                (_consume, (shared, 1, BLOCKS, PHASES, TOKENS, CHUNKS, SPAN, GROUP, STAGES, SPLIT_K,
                            SHARES, HAS_BIAS, PDL)),
                (_copy, (copied, BLOCKS, SPAN, STAGES, PDL)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    elif BLOCKS * PHASES == 3:
        gl.warp_specialize(
            [
                (_consume, (shared, 0, BLOCKS, PHASES, TOKENS, CHUNKS, SPAN, GROUP, STAGES, SPLIT_K,
                            SHARES, HAS_BIAS, PDL)),
                (_consume, (shared, 1, BLOCKS, PHASES, TOKENS, CHUNKS, SPAN, GROUP, STAGES, SPLIT_K,
                            SHARES, HAS_BIAS, PDL)),
                (_consume, (shared, 2, BLOCKS, PHASES, TOKENS, CHUNKS, SPAN, GROUP, STAGES, SPLIT_K,
                            SHARES, HAS_BIAS, PDL)),
                (_copy, (copied, BLOCKS, SPAN, STAGES, PDL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (shared, 0, BLOCKS, PHASES, TOKENS, CHUNKS, SPAN, GROUP, STAGES, SPLIT_K,
                            SHARES, HAS_BIAS, PDL)),
                (_consume, (shared, 1, BLOCKS, PHASES, TOKENS, CHUNKS, SPAN, GROUP, STAGES, SPLIT_K,
                            SHARES, HAS_BIAS, PDL)),
                (_consume, (shared, 2, BLOCKS, PHASES, TOKENS, CHUNKS, SPAN, GROUP, STAGES, SPLIT_K,
                            SHARES, HAS_BIAS, PDL)),
                (_consume, (shared, 3, BLOCKS, PHASES, TOKENS, CHUNKS, SPAN, GROUP, STAGES, SPLIT_K,
                            SHARES, HAS_BIAS, PDL)),
                (_copy, (copied, BLOCKS, SPAN, STAGES, PDL)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip


@cache
def _programs(device: torch.device) -> int:
    """At most so many wait for each other."""
    return min(num_sms(device), _MAX_PROGRAMS) if device.type == "cuda" else _MAX_PROGRAMS


def _workspace(device: torch.device) -> Tensor:
    """Partials: EMPTY between launches."""
    return kept("four_bit_split_k", device, _MAX_PROGRAMS * _MAX_SUMS, _EMPTY.value)


def multiply(plan: WgmmaPlan, x_TI: Tensor, weight: FourBitWords, bias: Tensor | None) -> Tensor:
    """[T, O]; everything in bfloat16. See `four_bit_wgmma.reads`."""
    outputs = weight.shape[0]
    tokens = len(x_TI)
    span = plan.chunks
    assert reads(weight), "not a plan for this weight"
    x_TI = x_TI.contiguous()
    if x_TI.data_ptr() % 16:
        x_TI = x_TI.clone()  # TMA needs it
    out_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
    scales, settings = scale_words(weight)
    rows = _ROWS.value
    blocks = plan.blocks
    consumers = plan.blocks * plan.phases
    token_tiles = triton.cdiv(tokens, plan.tile)
    tiles = triton.cdiv(outputs, blocks * rows) * token_tiles
    steps = triton.cdiv(settings["CHUNKS"], span)
    # With more tiles than a GPU has SMs programs would wait for others that do not run yet.
    share = triton.cdiv(steps, min(plan.split_k, max(_programs(x_TI.device) // tiles, 1)))
    split_k = triton.cdiv(steps, share)
    stage = 2 * span * (blocks * rows * WORDS + plan.tile * COLUMNS)
    exchanged = 4 * blocks * rows * plan.tile if plan.phases > 1 else 0
    registers = (_REGISTERS if plan.tile <= 64 else _REGISTERS_OF_MANY)[consumers]
    own = (registers * (consumers + 1) - _PRODUCER_REGISTERS) // consumers
    _split_k[(tiles, split_k)](
        described(weight.words, [rows, span * WORDS]), described(x_TI, [plan.tile, span * COLUMNS]),
        scales, _workspace(x_TI.device), out_TO if bias is None else bias, out_TO,
        outputs, tokens, token_tiles, share, scales.shape[1],
        BLOCKS=blocks, PHASES=plan.phases, TOKENS=plan.tile, SPAN=span,
        STAGES=(_SHARED_BYTES - exchanged) // stage, SPLIT_K=split_k, SHARES=_shares(split_k, plan.tile),
        HAS_BIAS=bias is not None, REGISTERS=own // 8 * 8, num_warps=4, maxnreg=registers,
        **settings, **launch_options(x_TI.device),
    )  # fmt: skip
    return out_TO


def _shares(split_k: int, tile: int) -> int:
    """How many programs of a tile reduce 8 of its tokens or more."""
    return min(1 << split_k.bit_length() - 1, tile // 8)
