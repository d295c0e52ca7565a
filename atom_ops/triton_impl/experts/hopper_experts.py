"""Grouped GEMMs of `experts` with many tokens on Hopper: WGMMA in persistent programs.

Weights have 16 bits, or 4 that are decoded to 16 first.

    gate and up    x [T, D]     -> inner [P, F], in the order of the experts; 128 rows of each in a tile
    down           inner [P, F] -> y [P, D], in the order of the pairs; 256 rows in a tile

One program runs on each SM and computes one tile of BLOCK pairs of an expert after the other:

    producer     weights by TMA; rows of x, which are gathered, by cp.async (4 warps), those of inner by
                 TMA (1 warp). Its stages run ahead into the next tile
    consumers    2 x 4 warps, for 64 pairs each. Of a block with no more than 64 pairs one has nothing to do

Launched without PDL: with it, a layer of 16,384 tokens took 30 % longer.

Written in Gluon, which has no interpreter.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_ops.ops.experts.experts import ClampedSwiglu, ExpertActivation, ExpertWeights, clamp_kind
from atom_ops.triton_impl.experts.expert_blocks import ExpertBlocks, sort_by_expert
from atom_ops.triton_impl.experts.expert_wgmma import _gated
from atom_ops.triton_impl.hardware.hopper_pipeline import load_tile, make_barriers, release
from atom_ops.triton_impl.hardware.persistent import programs_for
from atom_ops.triton_impl.quantized.four_bit_linear import dequantized
from atom_ops.weights import FourBitWords, Weight

BLOCK = 128
"""Pairs of a tile."""
COLUMNS = 64
"""Columns of a stage: as wide as shared memory is swizzled."""
_STAGES = 4
_GROUP = 16
"""Blocks whose tiles of the same weight rows are neighbours, where an expert's matrix does not fit the L2
cache along with the activations."""
_CACHED_BYTES = 8 << 20
"""Most bytes of an expert's matrix that stay in the L2 cache."""
_MOST_DECODED_BYTES = 2 << 30
"""Most bytes of the larger of a layer's matrices, decoded."""
_HALF = gl.constexpr(BLOCK // 2)
_ROWS = gl.constexpr(256)
"""Weight rows of a tile."""
_SIDE = gl.constexpr(128)
_COLUMNS = gl.constexpr(COLUMNS)
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_SIDES_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_GATHERED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _tile_of(blocks, number, tiles, tiles_of_block, OUTPUTS: gl.constexpr, GROUP: gl.constexpr):
    """Expert, first pair, end of the pairs and first output of a tile."""
    first_block = number // (GROUP * tiles_of_block) * GROUP
    size = gl.minimum(GROUP, tiles // tiles_of_block - first_block)
    place = number - first_block * tiles_of_block
    block = blocks + 4 + (first_block + place % size) * 4
    return gl.load(block), gl.load(block + 1), gl.load(block + 2), place // size * OUTPUTS


@gluon.jit
def _rows_of(x, order, first, end, inputs, top_k):
    """Pointers to the first columns of the rows of _HALF pairs; after the last pair, again to its row."""
    at_M = gl.minimum(first + gl.arange(0, _HALF, gl.SliceLayout(1, _GATHERED)), end - 1)
    row_M = gl.load(order + at_M) // top_k
    column_C = gl.arange(0, _COLUMNS, gl.SliceLayout(0, _GATHERED))
    return x + row_M.to(gl.int64)[:, None] * inputs + column_C[None, :]


@gluon.jit
def _copy(
    x, weight, x_tiles, weights, ready, free, order, blocks, tiles_of_block, outputs, inputs, top_k,
    GATED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    OUTPUTS: gl.constexpr = _SIDE if GATED else _ROWS
    tiles = gl.load(blocks) * tiles_of_block
    loaded = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, end, first_output = _tile_of(blocks, number, tiles, tiles_of_block, OUTPUTS, GROUP)
        if GATED:
            halves = x_tiles._reinterpret(x_tiles.dtype, [STAGES * 2, _HALF, _COLUMNS], _SWIZZLED)
            first_MC = _rows_of(x, order, first, end, inputs, top_k)
            second_MC = _rows_of(x, order, first + _HALF, end, inputs, top_k)
        for start in range(0, inputs, _COLUMNS):
            slot = loaded % STAGES
            barrier = ready.index(slot)
            mbarrier.wait(free.index(slot), (loaded // STAGES & 1) ^ 1)
            if GATED:
                mbarrier.expect(barrier, weight.block_type.nbytes)
                load_tile(weight, [expert * 2, first_output, start], barrier, weights.index(slot))
                async_copy.async_copy_global_to_shared(halves.index(slot * 2), first_MC + start)
                async_copy.async_copy_global_to_shared(halves.index(slot * 2 + 1), second_MC + start)
                async_copy.mbarrier_arrive(barrier, increment_count=False)
            else:
                mbarrier.expect(barrier, weight.block_type.nbytes + x.block_type.nbytes)
                load_tile(weight, [expert * outputs + first_output, start], barrier, weights.index(slot))
                load_tile(x, [first, start], barrier, x_tiles.index(slot))
            loaded += 1


@gluon.jit
def _biased(total_MN, bias, first, output_N, outputs, HAS_BIAS: gl.constexpr):
    if HAS_BIAS:
        bias_N = gl.load(bias + first + output_N, mask=output_N < outputs, other=0.0)
        total_MN += bias_N.to(gl.float32)[None, :]
    return total_MN


@gluon.jit
def _store(total_MN, out, place_M, exists_M, first_output, outputs):
    output_N = first_output + gl.arange(0, _SIDE, gl.SliceLayout(0, _STORED))
    out_MN = gl.convert_layout(total_MN.to(out.dtype.element_ty), _STORED)
    at_MN = place_M.to(gl.int64)[:, None] * outputs + output_N[None, :]
    gl.store(out + at_MN, out_MN, mask=exists_M[:, None] & (output_N < outputs)[None, :])


@gluon.jit
def _multiply(
    x_tiles, weights, ready, free, bias, order, blocks, out, tiles_of_block, outputs, inputs, limit, alpha,
    HALF_NUMBER: gl.constexpr, GATED: gl.constexpr, CLAMPED: gl.constexpr, HAS_BIAS: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One half of the pairs of each tile."""
    OUTPUTS: gl.constexpr = _SIDE if GATED else _ROWS
    x_tiles = x_tiles._reinterpret(x_tiles.dtype, [STAGES * 2, _HALF, _COLUMNS], _SWIZZLED)
    weights = weights._reinterpret(weights.dtype, [STAGES, _ROWS, _COLUMNS], _SWIZZLED)
    tiles = gl.load(blocks) * tiles_of_block
    used = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, end, first_output = _tile_of(blocks, number, tiles, tiles_of_block, OUTPUTS, GROUP)
        at_M = first + HALF_NUMBER * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, _STORED))
        exists_M = at_M < end
        place_M = at_M if GATED else gl.load(order + at_M, mask=exists_M, other=0)
        if first + HALF_NUMBER * _HALF < end:
            total_MN = gl.zeros([_HALF, _ROWS], gl.float32, _SUMS)
            for start in range(0, inputs, _COLUMNS):
                slot = used % STAGES
                mbarrier.wait(ready.index(slot), used // STAGES & 1)
                if GATED:
                    # What cp.async wrote must be visible to WGMMA.
                    fence_async_shared()
                total_MN = warpgroup_mma(
                    x_tiles.index(slot * 2 + HALF_NUMBER), weights.index(slot).permute((1, 0)), total_MN,
                    is_async=True,
                )  # fmt: skip
                # All but the newest have ended: the slot before it can be loaded again.
                total_MN = warpgroup_mma_wait(1, deps=[total_MN])
                release(free.index((used + STAGES - 1) % STAGES), start > 0)
                used += 1
            total_MN = warpgroup_mma_wait(0, deps=[total_MN])
            release(free.index((used + STAGES - 1) % STAGES))
            left_MN, right_MN = total_MN.reshape([_HALF, 2, _SIDE]).permute((0, 2, 1)).split()
            output_N = first_output + gl.arange(0, _SIDE, gl.SliceLayout(0, left_MN.type.layout))
            right_N = output_N if GATED else output_N + _SIDE
            bias_at = expert.to(gl.int64) * (2 * outputs if GATED else outputs)
            left_MN = _biased(left_MN, bias, bias_at, output_N, outputs, HAS_BIAS)
            right_MN = _biased(
                right_MN, bias, bias_at + outputs if GATED else bias_at, right_N, outputs, HAS_BIAS
            )
            if GATED:
                inner_MN = _gated(left_MN, right_MN, CLAMPED, limit, alpha)
                _store(inner_MN, out, place_M, exists_M, first_output, outputs)
            else:
                _store(left_MN, out, place_M, exists_M, first_output, outputs)
                _store(right_MN, out, place_M, exists_M, first_output + _SIDE, outputs)
        else:
            for _ in range(0, inputs, _COLUMNS):
                mbarrier.wait(ready.index(used % STAGES), used // STAGES & 1)
                release(free.index(used % STAGES))
                used += 1


@gluon.jit(do_not_specialize=["top_k", "tiles_of_block"])
def _grouped(
    x, weight, bias, order, blocks, out, tiles_of_block, outputs, inputs, top_k, limit, alpha,
    GATED: gl.constexpr, CLAMPED: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Grid (at most one program for each SM,)."""
    x_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, 2 * _HALF, _COLUMNS], _SWIZZLED)
    if GATED:
        weights = gl.allocate_shared_memory(weight.dtype, [STAGES, 2, _SIDE, _COLUMNS], weight.layout)
    else:
        weights = gl.allocate_shared_memory(weight.dtype, [STAGES, _ROWS, _COLUMNS], weight.layout)
    # An arrival for what TMA loads, and one of each thread that gathers.
    ready = make_barriers(STAGES, 129 if GATED else 1)
    free = make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                x_tiles, weights, ready, free, bias, order, blocks, out, tiles_of_block, outputs, inputs,
                limit, alpha, 0, GATED, CLAMPED, HAS_BIAS, GROUP, STAGES,
            )),
            (_multiply, (
                x_tiles, weights, ready, free, bias, order, blocks, out, tiles_of_block, outputs, inputs,
                limit, alpha, 1, GATED, CLAMPED, HAS_BIAS, GROUP, STAGES,
            )),
            (_copy, (
                x, weight, x_tiles, weights, ready, free, order, blocks, tiles_of_block, outputs, inputs,
                top_k, GATED, GROUP, STAGES,
            )),
        ],
        # Warps and registers per thread of all partitions but the first.
        [4, 4 if GATED else 1],
        [216, 72] if GATED else [232, 40],
    )  # fmt: skip


def fits(x_TD: Tensor, weights: ExpertWeights) -> bool:
    """Whether stages are whole, rows of x begin at multiples of 16 bytes, and decoded matrices are small."""
    experts, hidden, features = weights.down_XDF.shape
    decoded = not isinstance(weights.down_XDF, Tensor)
    if decoded and 2 * experts * features * hidden * x_TD.element_size() > _MOST_DECODED_BYTES:
        return False
    return hidden % COLUMNS == features % COLUMNS == x_TD.data_ptr() % 16 == 0


def by_expert(
    x_TD: Tensor, topk_ids_TJ: Tensor, weights: ExpertWeights, activation: ExpertActivation
) -> Tensor:
    """The rows of all pairs [P, D], in the order of the pairs; see `fits`."""
    experts_X, hidden, features = weights.down_XDF.shape
    pairs = topk_ids_TJ.numel()
    blocks = sort_by_expert(topk_ids_TJ, experts_X, BLOCK, weights.first)
    inner_PF = x_TD.new_empty(pairs, features)
    gate_up = _in_16_bits(weights.gate_up_XOD, x_TD.dtype).view(-1, features, hidden)
    sides = TensorDescriptor.from_tensor(gate_up, [2, _SIDE.value, COLUMNS], _SIDES_SWIZZLED.value)
    _launch(
        x_TD, sides, weights.gate_up_bias_XO, blocks, inner_PF, hidden, topk_ids_TJ.shape[1], activation,
        gated=True,
    )  # fmt: skip
    del gate_up, sides  # a decoded matrix leaves its memory to the next one
    y_PD = x_TD.new_empty(pairs, hidden)
    rows = TensorDescriptor.from_tensor(inner_PF, [BLOCK, COLUMNS], _SWIZZLED.value)
    down = _in_16_bits(weights.down_XDF, x_TD.dtype).flatten(0, 1)
    matrix = TensorDescriptor.from_tensor(down, [_ROWS.value, COLUMNS], _SWIZZLED.value)
    _launch(rows, matrix, weights.down_bias_XD, blocks, y_PD, features, 1, None, gated=False)
    return y_PD


def _in_16_bits(weight: Weight, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, FourBitWords):
        return dequantized(weight, dtype)
    assert isinstance(weight, Tensor), "checked with the plan"
    return weight


def _launch(
    x: Tensor | TensorDescriptor,
    weight: TensorDescriptor,
    bias_XO: Tensor | None,
    blocks: ExpertBlocks,
    out: Tensor,
    inputs: int,
    top_k: int,
    activation: ExpertActivation,
    gated: bool,
) -> None:
    outputs = out.shape[1]
    clamped = activation or ClampedSwiglu(0.0, 0.0)
    cached = (2 if gated else 1) * outputs * inputs * out.element_size() <= _CACHED_BYTES
    tiles_of_block = triton.cdiv(outputs, (_SIDE if gated else _ROWS).value)
    _grouped[(programs_for(blocks.most * tiles_of_block, out.device),)](
        x, weight, out if bias_XO is None else bias_XO, blocks.order_P, blocks.blocks, out, tiles_of_block,
        outputs, inputs, top_k, clamped.limit, clamped.alpha,
        GATED=gated, CLAMPED=clamp_kind(activation), HAS_BIAS=bias_XO is not None,
        GROUP=1 if cached else _GROUP, STAGES=_STAGES, num_warps=4,
    )  # fmt: skip
