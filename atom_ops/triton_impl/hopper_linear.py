"""Stream-K `linear` for up to 64 tokens on Hopper: every program reads the same share of the weight.

The number of output tiles rarely fills whole waves of SMs. So the persistent programs split the
K iterations ("steps") of all tiles evenly; a step multiplies COLUMNS columns of a tile's weights.

    tiles       |     0     |     1     |     2     |  `steps` steps each
    programs    |   0   |   1   |   2   |   3   |

A program stores tiles that it computes alone. For a tile of several programs each writes a float32
partial sum, and then reduces the partials of some of the tile's tokens, always in the order of the
programs. Readers poll the values themselves: between launches the workspace holds EMPTY, a NaN that
no sum yields, and the reader of a partial resets it. So no memory fences are needed, which would
cost more than the reads. All programs must be resident at once: at most one for each SM.

TMA loads weights and tokens into a ring of stages in shared memory; warps are specialized:

    producer     1 warp     prefetches the first steps' weights before the previous kernel ends (PDL)
    consumers    4 warps    WGMMA: weight [ROWS, COLUMNS] x tokens [COLUMNS, TOKENS]

With e4m3 weights and activations the sum of a step is scaled, and added in float32.

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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_ops.triton_impl.gluon_pdl import pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.pdl import launch_options
from atom_ops.triton_impl.rounded_rows import RoundedRows
from atom_ops.triton_impl.tuned import StreamKPlan
from atom_ops.weights import BlockFP8, ChannelFP8

_SWIZZLED = {
    bits: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)
}
_UNSCALED, _BLOCKS, _CHANNELS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""Scales of the weight: none, or of e4m3 values in blocks or for each output."""
_REGISTERS = 96
"""Per thread: few enough to share the SM with the previous kernel."""
_REGISTERS_E4M3 = {64: 128, 128: 216}
"""By the rows of a tile."""
_MAX_PROGRAMS = 132
_MAX_SUMS = 128 * 64
"""Elements of a tile."""
_EMPTY = gl.constexpr(0x7FC0_5EED)
# These two have other names in later versions of Triton.
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _copy(
    weight_desc, x_desc, weights, x, ready, free, first, stop, steps,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    size: gl.constexpr = weight_desc.block_type.nbytes + x_desc.block_type.nbytes
    early = gl.minimum(stop - first, STAGES)
    for i in range(early):
        tile, step = (first + i) // steps, (first + i) % steps
        mbarrier.expect(ready.index(i), size)
        _load_tile(weight_desc, [tile * ROWS, step * COLUMNS], ready.index(i), weights.index(i))
    pdl_wait(PDL)
    for i in range(early):
        _load_tile(x_desc, [0, (first + i) % steps * COLUMNS], ready.index(i), x.index(i))
    for i in range(early, stop - first):
        slot = i % STAGES
        tile, step = (first + i) // steps, (first + i) % steps
        barrier = ready.index(slot)
        mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(barrier, size)
        _load_tile(weight_desc, [tile * ROWS, step * COLUMNS], barrier, weights.index(slot))
        _load_tile(x_desc, [0, step * COLUMNS], barrier, x.index(slot))
    pdl_launch_dependents(PDL)


@gluon.jit
def _store(
    total_RT, bias, out, x_scales, scales, first_output, first_token, outputs, tokens,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, SCALES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Scale, add the bias, convert and store a tile of `out` [tokens, outputs]."""
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    output_R = first_output + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    token_T = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    if HAS_BIAS or SCALES != _UNSCALED:
        total_RT = gl.convert_layout(total_RT, stored)
        if SCALES != _UNSCALED:
            total_RT *= gl.load(x_scales + token_T, mask=token_T < tokens, other=0.0)[None, :]
        if SCALES == _CHANNELS:
            total_RT *= gl.load(scales + output_R, mask=output_R < outputs, other=0.0)[:, None]
        if HAS_BIAS:
            bias_R = gl.load(bias + output_R, mask=output_R < outputs, other=0.0)
            total_RT += bias_R.to(gl.float32)[:, None]
        out_RT = total_RT.to(out.dtype.element_ty)
    else:
        out_RT = gl.convert_layout(total_RT.to(out.dtype.element_ty), stored)
    inside_RT = (output_R < outputs)[:, None] & (token_T < tokens)[None, :]
    gl.store(out + token_T.to(gl.int64)[None, :] * outputs + output_R[:, None], out_RT, mask=inside_RT)


@gluon.jit
def _program_of(step, all_steps):
    """The program of this step: program p begins at step p * all_steps // programs."""
    return ((step + 1) * gl.num_programs(0) - 1) // all_steps


@gluon.jit
def _reduce_partials(
    partials, bias, out, x_scales, scales, tile, steps, all_steps, outputs, tokens,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr, MAX_PARTIALS: gl.constexpr,
    SCALES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Reduce the partials of a tile for this program's share of its tokens."""
    loaded: gl.constexpr = gl.BlockedLayout([1, 4], [128 // CHUNK, CHUNK // 4], [4, 1], [1, 0])
    first = _program_of(tile * steps, all_steps)
    count = _program_of(tile * steps + steps - 1, all_steps) - first + 1
    row_R = gl.arange(0, ROWS, gl.SliceLayout(1, loaded))
    token_C = gl.arange(0, CHUNK, gl.SliceLayout(0, loaded))
    # Slot 0 holds the partial of a program's first tile; only a tile's first program may use slot 1.
    started_before = (first * all_steps // gl.num_programs(0) < tile * steps).to(gl.int32)
    for chunk in range(gl.program_id(0) - first, TOKENS // CHUNK, count):
        at_RC = row_R[:, None] * TOKENS + chunk * CHUNK + token_C[None, :]
        total_RC = gl.zeros([ROWS, CHUNK], gl.float32, loaded)
        missing = 1
        while missing > 0:
            total_RC = gl.zeros([ROWS, CHUNK], gl.float32, loaded)
            missing_RC = gl.zeros([ROWS, CHUNK], gl.int32, loaded)
            for i in gl.static_range(MAX_PARTIALS):
                number = (first + i) * 2 + (started_before if i == 0 else 0)
                exists_RC = (at_RC >= 0) & (i < count)
                partial_RC = gl.load(partials + number * (ROWS * TOKENS) + at_RC, exists_RC, 0, volatile=True)
                missing_RC |= (partial_RC == _EMPTY).to(gl.int32)
                total_RC += partial_RC.to(gl.float32, bitcast=True)
            missing = gl.max(gl.max(missing_RC, 1), 0)
        for i in gl.static_range(MAX_PARTIALS):
            number = (first + i) * 2 + (started_before if i == 0 else 0)
            empty_RC = gl.full([ROWS, CHUNK], _EMPTY, gl.int32, loaded)
            gl.store(partials + number * (ROWS * TOKENS) + at_RC, empty_RC, (at_RC >= 0) & (i < count))
        _store(
            total_RC, bias, out, x_scales, scales, tile * ROWS, chunk * CHUNK, outputs, tokens,
            ROWS, CHUNK, SCALES, HAS_BIAS,
        )  # fmt: skip


@gluon.jit
def _multiply_accumulate(
    weights, x, ready, free, partials, bias, out, x_scales, scales,
    first, stop, steps, all_steps, outputs, tokens,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
    MAX_PARTIALS: gl.constexpr, SCALES: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, TOKENS, 16 if SCALES == _UNSCALED else 32]
    )  # fmt: skip
    pdl_wait(PDL)
    i = 0
    at = first
    while at < stop:
        tile = at // steps
        end = i + gl.minimum(tile * steps + steps, stop) - at
        start = i
        total_RT = gl.zeros([ROWS, TOKENS], gl.float32, sums)
        for i in range(start, end):
            slot = i % STAGES
            if SCALES == _UNSCALED:
                mbarrier.wait(ready.index(slot), i // STAGES & 1)
                total_RT = warpgroup_mma(
                    weights.index(slot), x.index(slot).permute((1, 0)), total_RT,
                    is_async=True,
                )  # fmt: skip
                total_RT = warpgroup_mma_wait(1, deps=[total_RT])
                _thread_barrier()
                mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=i > start)
            else:
                scale = 1.0
                if SCALES == _BLOCKS:
                    scale = gl.load(
                        scales + tile * ROWS // BLOCK_ROWS * steps + at - tile * steps + i - start
                    )
                mbarrier.wait(ready.index(slot), i // STAGES & 1)
                part_RT = gl.zeros([ROWS, TOKENS], gl.float32, sums)
                part_RT = warpgroup_mma(
                    weights.index(slot), x.index(slot).permute((1, 0)), part_RT,
                    use_acc=False, is_async=True,
                )  # fmt: skip
                part_RT = warpgroup_mma_wait(0, deps=[part_RT])
                _thread_barrier()
                mbarrier.arrive(free.index(slot))
                total_RT += part_RT * scale
        if SCALES == _UNSCALED:
            total_RT = warpgroup_mma_wait(0, deps=[total_RT])
            _thread_barrier()
            mbarrier.arrive(free.index((end + STAGES - 1) % STAGES))
        if end - start == steps:
            _store(
                total_RT, bias, out, x_scales, scales, tile * ROWS, 0, outputs, tokens,
                ROWS, TOKENS, SCALES, HAS_BIAS,
            )  # fmt: skip
        else:
            number = gl.program_id(0) * 2 + (at > first).to(gl.int32)
            row_R = gl.arange(0, ROWS, gl.SliceLayout(1, sums))
            token_T = gl.arange(0, TOKENS, gl.SliceLayout(0, sums))
            partial = partials + number * (ROWS * TOKENS)
            partial_RT = total_RT.to(gl.int32, bitcast=True)
            gl.store(partial + row_R[:, None] * TOKENS + token_T[None, :], partial_RT)
        at += end - start
        i = end

    if MAX_PARTIALS > 1:
        tile = first // steps
        if (first > tile * steps) | (stop < tile * steps + steps):
            _reduce_partials(
                partials, bias, out, x_scales, scales, tile, steps, all_steps, outputs, tokens,
                ROWS, TOKENS, CHUNK, MAX_PARTIALS, SCALES, HAS_BIAS,
            )  # fmt: skip
        last_tile = (stop - 1) // steps
        if (last_tile > tile) & (stop < last_tile * steps + steps):
            _reduce_partials(
                partials, bias, out, x_scales, scales, last_tile, steps, all_steps, outputs, tokens,
                ROWS, TOKENS, CHUNK, MAX_PARTIALS, SCALES, HAS_BIAS,
            )  # fmt: skip


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(made.index(slot), count=1)
    return made


@gluon.jit(do_not_specialize=["tokens"])
def _stream_k(
    weight_desc, x_desc, bias, out, x_scales, scales, partials, outputs, tokens, steps, all_steps,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    CHUNK: gl.constexpr, MAX_PARTIALS: gl.constexpr, SCALES: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,), at most one for each SM and for each step."""
    first = gl.program_id(0) * all_steps // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * all_steps // gl.num_programs(0)
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, ROWS, COLUMNS], weight_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, COLUMNS], x_desc.layout)
    ready, free = _barriers(STAGES), _barriers(STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_accumulate, (
                weights, x, ready, free, partials, bias, out, x_scales, scales,
                first, stop, steps, all_steps, outputs, tokens,
                ROWS, TOKENS, STAGES, CHUNK, MAX_PARTIALS, SCALES, BLOCK_ROWS, HAS_BIAS, PDL,
            )),
            (_copy, (
                weight_desc, x_desc, weights, x, ready, free, first, stop, steps,
                ROWS, COLUMNS, STAGES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


@cache
def _workspace(device: torch.device) -> Tensor:
    """Partials: EMPTY between launches, which all use one stream."""
    return torch.full((_MAX_PROGRAMS * 2 * _MAX_SUMS,), _EMPTY.value, dtype=torch.int32, device=device)


def multiply(
    plan: StreamKPlan, x_TI: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`linear` by this plan; at most `plan.tokens` tokens."""
    x_TI = x_TI.contiguous()
    out_TO = x_TI.new_empty(len(x_TI), len(weight), dtype=out_dtype or x_TI.dtype)
    _launch(plan, x_TI, weight, bias, out_TO, None, None, _UNSCALED.value, 1)
    return out_TO


def multiply_e4m3(
    plan: StreamKPlan,
    rows: RoundedRows,
    tokens: int,
    weight: BlockFP8 | ChannelFP8,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T, O] in `dtype`; a block of scales has as many columns as a step."""
    out_TO = torch.empty(tokens, weight.shape[0], dtype=dtype, device=rows.values.device)
    scales, block_rows = _CHANNELS.value, 1
    if isinstance(weight, BlockFP8):
        scales, block_rows = _BLOCKS.value, weight.block[0]
    _launch(
        plan, rows.values, weight.values, bias, out_TO, rows.scales, weight.scales, scales, block_rows
    )  # fmt: skip
    return out_TO


def _launch(
    plan: StreamKPlan,
    x_TI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_TO: Tensor,
    x_scales: Tensor | None,
    scales: Tensor | None,
    kind: int,
    block_rows: int,
) -> None:
    (tokens, outputs), inputs = out_TO.shape, weight.shape[1]
    steps = triton.cdiv(inputs, plan.columns)
    all_steps = triton.cdiv(outputs, plan.rows) * steps
    programs = min(plan.programs, all_steps)
    assert programs <= _MAX_PROGRAMS and plan.rows * plan.tokens <= _MAX_SUMS, "workspace too small"
    fewest = all_steps // programs
    max_partials = 1 if all_steps % programs == 0 and fewest % steps == 0 else (steps - 2) // fewest + 2
    layout = _SWIZZLED[8 * weight.element_size()]
    _stream_k[(programs,)](
        TensorDescriptor.from_tensor(weight, [plan.rows, plan.columns], layout),
        TensorDescriptor.from_tensor(x_TI, [plan.tokens, plan.columns], layout),
        out_TO if bias is None else bias,
        out_TO,
        out_TO if x_scales is None else x_scales,
        out_TO if scales is None else scales,
        _workspace(x_TI.device),
        outputs,
        tokens,
        steps,
        all_steps,
        ROWS=plan.rows,
        COLUMNS=plan.columns,
        TOKENS=plan.tokens,
        STAGES=plan.stages,
        CHUNK=min(16, plan.tokens // 4),
        MAX_PARTIALS=max_partials,
        SCALES=kind,
        BLOCK_ROWS=block_rows,
        HAS_BIAS=bias is not None,
        num_warps=4,
        maxnreg=_REGISTERS if kind == _UNSCALED.value else _REGISTERS_E4M3[plan.rows],
        **launch_options(x_TI.device),
    )
