"""Stream-K `linear` for few tokens on Hopper: every program multiplies the same share of the weight.

The number of output tiles rarely fills whole waves of SMs. So the persistent programs split the
K iterations ("steps") of all tiles evenly; a step multiplies COLUMNS columns of a tile's weights. More
than 128 tokens are several tiles for the same rows of the weight, one after another.

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

With e4m3 weights and activations the sum of a step is scaled, and added in float32; of every second
step while the tensor cores multiply the next one.

Written in Gluon, which has no interpreter.
"""

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_ops.triton_impl.hardware.device_state import kept
from atom_ops.triton_impl.hardware.gluon_pdl import pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.hopper_pipeline import load_tile, make_barriers, thread_barrier
from atom_ops.triton_impl.hardware.pdl import launch_options
from atom_ops.triton_impl.plans.linear_plans import StreamKPlan
from atom_ops.triton_impl.quantized.rounded_rows import RoundedRows
from atom_ops.weights import BlockFP8, ChannelFP8

_SWIZZLED = {
    bits: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)
}
_UNSCALED = gl.constexpr(0)
"""The weight has no scales."""
_BLOCKS = gl.constexpr(1)
"""e4m3 weights have a scale for each block."""
_CHANNELS = gl.constexpr(2)
"""e4m3 weights have a scale for each output."""
_REGISTERS = 96
"""Per thread: few enough to share the SM with the previous kernel."""
_REGISTERS_E4M3 = {64 * 64: 128, 128 * 64: 216}
"""By the most elements of a tile."""
_MAX_PROGRAMS = 132
_MAX_SUMS = 128 * 64
"""Elements of a tile."""
_EMPTY = gl.constexpr(0x7FC0_5EED)


@gluon.jit
def _copy(
    weight_desc, x_desc, weights, x, ready, free, first, stop, steps, token_tiles,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    size: gl.constexpr = weight_desc.block_type.nbytes + x_desc.block_type.nbytes
    early = gl.minimum(stop - first, STAGES)
    for i in range(early):
        row_tile = (first + i) // steps // token_tiles
        step = (first + i) % steps
        mbarrier.expect(ready.index(i), size)
        load_tile(weight_desc, [row_tile * ROWS, step * COLUMNS], ready.index(i), weights.index(i))
    pdl_wait(PDL)
    for i in range(early):
        tile = (first + i) // steps
        step = (first + i) % steps
        first_token = tile % token_tiles * TOKENS
        load_tile(x_desc, [first_token, step * COLUMNS], ready.index(i), x.index(i))
    for i in range(early, stop - first):
        slot = i % STAGES
        tile = (first + i) // steps
        step = (first + i) % steps
        barrier = ready.index(slot)
        mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(barrier, size)
        row_tile = tile // token_tiles
        first_token = tile % token_tiles * TOKENS
        load_tile(weight_desc, [row_tile * ROWS, step * COLUMNS], barrier, weights.index(slot))
        load_tile(x_desc, [first_token, step * COLUMNS], barrier, x.index(slot))
    pdl_launch_dependents(PDL)


@gluon.jit
def _store(
    total_RT, bias, out, x_scales, scales, first_output, first_token, outputs, tokens,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, SCALES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Scale, add the bias, convert and store a tile of `out` [tokens, outputs]."""
    own: gl.constexpr = total_RT.type.layout
    output_R = first_output + gl.arange(0, ROWS, gl.SliceLayout(1, own))
    token_T = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, own))
    if SCALES != _UNSCALED:
        total_RT *= gl.load(x_scales + token_T, mask=token_T < tokens, other=0.0)[None, :]
    if SCALES == _CHANNELS:
        total_RT *= gl.load(scales + output_R, mask=output_R < outputs, other=0.0)[:, None]
    if HAS_BIAS:
        bias_R = gl.load(bias + output_R, mask=output_R < outputs, other=0.0)
        total_RT += bias_R.to(gl.float32)[:, None]
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    output_R = first_output + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    token_T = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    out_RT = gl.convert_layout(total_RT.to(out.dtype.element_ty), stored)
    inside_RT = (output_R < outputs)[:, None] & (token_T < tokens)[None, :]
    gl.store(out + token_T.to(gl.int64)[None, :] * outputs + output_R[:, None], out_RT, mask=inside_RT)


@gluon.constexpr_function
def reader_layout(rows, tokens):
    """Layout in which the 128 threads of the consumers read partials [rows, tokens], each place by one.

    Of two threads that poll one place, the slower may find a sum and the other still EMPTY. Triton takes
    their values for equal: it waits for those of one thread, and may store those of the other.
    """
    width = min(4, rows * tokens // 128)
    return gl.BlockedLayout([1, width], [32 * width // tokens, tokens // width], [4, 1], [1, 0])


@gluon.jit
def _program_of(step, all_steps):
    """The program of this step: program p begins at step p * all_steps // programs."""
    return ((step + 1) * gl.num_programs(0) - 1) // all_steps


@gluon.jit
def _reduce_partials(
    partials, bias, out, x_scales, scales, tile, steps, all_steps, token_tiles, outputs, tokens,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr, MAX_PARTIALS: gl.constexpr,
    SCALES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Reduce the partials of a tile for this program's share of its tokens."""
    loaded: gl.constexpr = reader_layout(ROWS, CHUNK)
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
        first_output = tile // token_tiles * ROWS
        first_token = tile % token_tiles * TOKENS
        _store(
            total_RC, bias, out, x_scales, scales, first_output, first_token + chunk * CHUNK, outputs, tokens,
            ROWS, CHUNK, SCALES, HAS_BIAS,
        )  # fmt: skip


@gluon.jit
def _start_step(
    weights, x, ready, i,
    sums: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Issue the products of a step of e4m3 values, unscaled."""
    mbarrier.wait(ready.index(i % STAGES), i // STAGES & 1)
    return warpgroup_mma(
        weights.index(i % STAGES), x.index(i % STAGES).permute((1, 0)),
        gl.zeros([ROWS, TOKENS], gl.float32, sums), use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def _add_step(
    total_RT, part_RT, scale, free, i, ISSUED: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Wait for a step, free its stage, and add it times its scale; ISSUED: steps issued after it."""
    part_RT = warpgroup_mma_wait(ISSUED, deps=[part_RT])
    thread_barrier()
    mbarrier.arrive(free.index(i % STAGES))
    return total_RT + part_RT * scale


@gluon.jit
def _scale_of(scales, i, SCALES: gl.constexpr):
    if SCALES == _BLOCKS:
        return gl.load(scales + i)
    else:
        return 1.0


@gluon.jit
def _multiply_accumulate(
    weights, x, ready, free, partials, bias, out, x_scales, scales,
    first, stop, steps, all_steps, token_tiles, outputs, tokens,
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
        first_output = tile // token_tiles * ROWS
        first_token = tile % token_tiles * TOKENS
        total_RT = gl.zeros([ROWS, TOKENS], gl.float32, sums)
        if SCALES == _UNSCALED:
            for i in range(start, end):
                slot = i % STAGES
                mbarrier.wait(ready.index(slot), i // STAGES & 1)
                total_RT = warpgroup_mma(
                    weights.index(slot), x.index(slot).permute((1, 0)), total_RT,
                    is_async=True,
                )  # fmt: skip
                total_RT = warpgroup_mma_wait(1, deps=[total_RT])
                thread_barrier()
                mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=i > start)
            total_RT = warpgroup_mma_wait(0, deps=[total_RT])
            thread_barrier()
            mbarrier.arrive(free.index((end + STAGES - 1) % STAGES))
        else:
            block = scales + first_output // BLOCK_ROWS * steps + at - tile * steps - start
            # Two steps at a time: accumulators in flight from one iteration to the next would be serialized.
            for pair in range((end - start) // 2):
                i = start + 2 * pair
                scale = _scale_of(block, i, SCALES)
                next_scale = _scale_of(block, i + 1, SCALES)
                part_RT = _start_step(weights, x, ready, i, sums, ROWS, TOKENS, STAGES)
                next_RT = _start_step(weights, x, ready, i + 1, sums, ROWS, TOKENS, STAGES)
                total_RT = _add_step(total_RT, part_RT, scale, free, i, 1, STAGES)
                total_RT = _add_step(total_RT, next_RT, next_scale, free, i + 1, 0, STAGES)
            if (end - start) % 2 == 1:
                scale = _scale_of(block, end - 1, SCALES)
                part_RT = _start_step(weights, x, ready, end - 1, sums, ROWS, TOKENS, STAGES)
                total_RT = _add_step(total_RT, part_RT, scale, free, end - 1, 0, STAGES)
        if end - start == steps:
            _store(
                total_RT, bias, out, x_scales, scales, first_output, first_token, outputs, tokens,
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
                partials, bias, out, x_scales, scales, tile, steps, all_steps, token_tiles,
                outputs, tokens, ROWS, TOKENS, CHUNK, MAX_PARTIALS, SCALES, HAS_BIAS,
            )  # fmt: skip
        last_tile = (stop - 1) // steps
        if (last_tile > tile) & (stop < last_tile * steps + steps):
            _reduce_partials(
                partials, bias, out, x_scales, scales, last_tile, steps, all_steps, token_tiles,
                outputs, tokens, ROWS, TOKENS, CHUNK, MAX_PARTIALS, SCALES, HAS_BIAS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens"])
def _stream_k(
    weight_desc, x_desc, bias, out, x_scales, scales, partials, outputs, tokens, token_tiles,
    steps, all_steps,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    CHUNK: gl.constexpr, MAX_PARTIALS: gl.constexpr, SCALES: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,), at most one for each SM and for each step."""
    first = gl.program_id(0) * all_steps // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * all_steps // gl.num_programs(0)
    weights = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, ROWS, COLUMNS], weight_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, COLUMNS], x_desc.layout)
    ready, free = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_accumulate, (
                weights, x, ready, free, partials, bias, out, x_scales, scales,
                first, stop, steps, all_steps, token_tiles, outputs, tokens,
                ROWS, TOKENS, STAGES, CHUNK, MAX_PARTIALS, SCALES, BLOCK_ROWS, HAS_BIAS, PDL,
            )),
            (_copy, (
                weight_desc, x_desc, weights, x, ready, free, first, stop, steps, token_tiles,
                ROWS, COLUMNS, TOKENS, STAGES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def _workspace(device: torch.device) -> Tensor:
    """Partials: EMPTY between launches."""
    return kept("hopper_linear", device, _MAX_PROGRAMS * 2 * _MAX_SUMS, _EMPTY.value)


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
    scales = _CHANNELS.value
    block_rows = 1
    if isinstance(weight, BlockFP8):
        scales = _BLOCKS.value
        block_rows = weight.block[0]
    _launch(
        plan, rows.values, weight.values, bias, out_TO, rows.scales, weight.scales, scales, block_rows
    )  # fmt: skip
    return out_TO


def reduced_at_once(tile: int) -> int:
    """Tokens of a tile whose partials a program reduces at once."""
    return min(16, tile // 4)


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
    tokens, outputs = out_TO.shape
    inputs = weight.shape[1]
    steps = triton.cdiv(inputs, plan.columns)
    tile = plan.tile
    token_tiles = triton.cdiv(tokens, tile)
    all_steps = triton.cdiv(outputs, plan.rows) * token_tiles * steps
    programs = min(plan.programs, all_steps)
    assert programs <= _MAX_PROGRAMS and plan.rows * tile <= _MAX_SUMS, "workspace too small"
    fewest = all_steps // programs
    max_partials = 1 if all_steps % programs == 0 and fewest % steps == 0 else (steps - 2) // fewest + 2
    layout = _SWIZZLED[8 * weight.element_size()]
    registers = min(most for most in _REGISTERS_E4M3 if most >= plan.rows * tile)
    _stream_k[(programs,)](
        TensorDescriptor.from_tensor(weight, [plan.rows, plan.columns], layout),
        TensorDescriptor.from_tensor(x_TI, [tile, plan.columns], layout),
        out_TO if bias is None else bias,
        out_TO,
        out_TO if x_scales is None else x_scales,
        out_TO if scales is None else scales,
        _workspace(x_TI.device),
        outputs,
        tokens,
        token_tiles,
        steps,
        all_steps,
        ROWS=plan.rows,
        COLUMNS=plan.columns,
        TOKENS=tile,
        STAGES=plan.stages,
        CHUNK=reduced_at_once(tile),
        MAX_PARTIALS=max_partials,
        SCALES=kind,
        BLOCK_ROWS=block_rows,
        HAS_BIAS=bias is not None,
        num_warps=4,
        maxnreg=_REGISTERS if kind == _UNSCALED.value else _REGISTERS_E4M3[registers],
        **launch_options(x_TI.device),
    )
