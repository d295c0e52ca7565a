"""Prefill attention on Hopper for long prompts that are computed in one step: WGMMA fed by TMA.

The keys of such a row are those of its own queries. A first kernel gathers them from the paged
cache into contiguous tiles of the queries' dtype. The rest of a row's last tile is zero, because a
weight of 0 times NaN would be NaN:

    gathered [numbers x TILE, 2, K, E]        row r begins at tile starts[r] // TILE + r

The second kernel is warp-specialized. One program computes one query head of one tile of queries:

    producer    1 warp     loads keys and values into a ring of stages in shared memory (TMA)
    consumers   2 x 4      64 queries each; the scores of a tile overlap with the product of the
                           previous tile's weights and values

Written in Gluon, which has no interpreter. Other devices run these rows in `attention_kernels`.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
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

from atom_ops.ops.attention import AttentionRule
from atom_ops.ops.attention_plan import AttentionPlan
from atom_ops.ops.kv_cache import KVLayer
from atom_ops.triton_impl import is_hopper
from atom_ops.triton_impl.fp8 import decode_fp8
from atom_ops.triton_impl.tiles import row_of_tile

WORTH_LAUNCHING = 4096
"""Fewest tokens of whole prompts in a step: the two launches take 100 us more on the host."""
FEW_ROWS = 16
"""Most rows of a captured step: it launches programs for all of them, whichever its prompts are."""

_TILE = 128
_HALF = 64
_STAGES = 2
_GATHERED_TOKENS = 8
_GATHERED_CHUNK = 2048
_LOG2_E = 1.4426950408889634
# These two have other names in later versions of Triton.
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# The running maximum before any score: finite, because inf - inf would be NaN.
_LOWEST = gl.constexpr(-1.0e30)


@triton.jit(
    do_not_specialize=["rows", "begin", "table_stride"],
    do_not_specialize_on_alignment=["table", "starts", "scales"],
)
def _gather_kv(
    kv, scales, table, starts, gathered, rows, begin, table_stride,
    BLOCK_SIZE: tl.constexpr, SLOT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, CHUNK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid (tile numbers, TILE // TOKENS)."""
    number = tl.program_id(0)
    row = row_of_tile(number, starts, begin, rows, TILE)
    first_token = tl.load(starts + row)
    length = tl.load(starts + row + 1) - first_token
    tile_start = (number - (first_token - begin) // TILE - row) * TILE
    if tile_start >= length:
        return

    within_T = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    token_T = tile_start + within_T
    exists_T = token_T < length
    row_table = table + row.to(tl.int64) * table_stride
    block_T = tl.load(row_table + token_T // BLOCK_SIZE, mask=exists_T, other=0).to(tl.int64)
    slot_T = block_T * BLOCK_SIZE + token_T % BLOCK_SIZE
    to_T = number.to(tl.int64) * TILE + within_T
    for chunk in tl.static_range(0, SLOT, CHUNK):
        at_P = chunk + tl.arange(0, CHUNK)
        inside_P = at_P < SLOT
        wanted_TP = exists_T[:, None] & inside_P[None, :]
        x_TP = tl.load(kv + slot_T[:, None] * SLOT + at_P[None, :], mask=wanted_TP, other=0)
        if SCALED:
            scale_at_TP = slot_T[:, None] * (SLOT // WIDTH) + (at_P // WIDTH)[None, :]
            scale_TP = tl.load(scales + scale_at_TP, mask=wanted_TP, other=0.0)
            x_TP = decode_fp8(x_TP, tl.float32) * scale_TP
        x_TP = x_TP.to(gathered.dtype.element_ty)
        tl.store(gathered + to_T[:, None] * SLOT + at_P[None, :], x_TP, mask=inside_P[None, :])


@gluon.jit
def _copy_tiles(
    kv_desc, keys, values, barriers, first, tiles, key_column, value_column,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the tiles, the last one first: it alone needs the causal mask."""
    keys_ready, keys_free, values_ready, values_free = barriers
    for i in range(tiles):
        slot, phase = i % STAGES, i // STAGES % 2
        at = first + (tiles - 1 - i) * TILE
        mbarrier.wait(keys_free.index(slot), phase ^ 1)
        mbarrier.expect(keys_ready.index(slot), kv_desc.block_type.nbytes)
        _load_tile(kv_desc, [at, key_column], keys_ready.index(slot), keys.index(slot))
        mbarrier.wait(values_free.index(slot), phase ^ 1)
        mbarrier.expect(values_ready.index(slot), kv_desc.block_type.nbytes)
        _load_tile(kv_desc, [at, value_column], values_ready.index(slot), values.index(slot))


@gluon.jit
def _release(barrier):
    """Arrive at the barrier once all four warps are done with its stage."""
    _thread_barrier()
    mbarrier.arrive(barrier)


@gluon.jit
def _softmax_step(score_MN, top_M, total_M, scale):
    """One step of the online softmax: new maximum, new total, factor of earlier sums, weights."""
    new_top_M = gl.maximum(top_M, gl.max(score_MN, 1) * scale)
    weight_MN = gl.exp2(score_MN * scale - new_top_M[:, None])
    rescale_M = gl.exp2(top_M - new_top_M)
    return new_top_M, total_M * rescale_M + gl.sum(weight_MN, 1), rescale_M, weight_MN


@gluon.jit
def _consume(
    q_ME, keys, values, barriers, q_ready, out, first_query, length, token_stride, tiles, scale,
    HALF: gl.constexpr, TILE: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of HALF queries from `first_query` on over `tiles` tiles; `out`: the row's first token."""
    keys_ready, keys_free, values_ready, values_free = barriers
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    sum_rows: gl.constexpr = gl.SliceLayout(1, sums)
    none_MN = gl.zeros([HALF, TILE], gl.float32, scores)
    sum_ME = gl.zeros([HALF, WIDTH], gl.float32, sums)
    top_M = gl.full([HALF], _LOWEST, gl.float32, score_rows)
    total_M = gl.zeros([HALF], gl.float32, score_rows)

    mbarrier.wait(q_ready, 0)
    mbarrier.wait(keys_ready.index(0), 0)
    score_MN = warpgroup_mma(q_ME, keys.index(0).permute((1, 0)), none_MN, use_acc=False)
    _release(keys_free.index(0))
    query_M = first_query % TILE + gl.arange(0, HALF, score_rows)
    token_N = gl.arange(0, TILE, gl.SliceLayout(0, scores))
    score_MN = gl.where(token_N[None, :] <= query_M[:, None], score_MN, float("-inf"))
    top_M, total_M, rescale_M, weight_MN = _softmax_step(score_MN, top_M, total_M, scale)
    weight_MN = gl.convert_layout(weight_MN.to(q_ME.dtype), factor)
    for i in range(1, tiles):
        slot, before = i % STAGES, (i - 1) % STAGES
        mbarrier.wait(keys_ready.index(slot), i // STAGES % 2)
        coming_MN = warpgroup_mma(
            q_ME, keys.index(slot).permute((1, 0)), none_MN, use_acc=False, is_async=True
        )
        mbarrier.wait(values_ready.index(before), (i - 1) // STAGES % 2)
        coming_ME = warpgroup_mma(weight_MN, values.index(before), sum_ME, is_async=True)
        score_MN = warpgroup_mma_wait(1, deps=[coming_MN])
        _release(keys_free.index(slot))
        top_M, total_M, rescale_M, next_weight_MN = _softmax_step(score_MN, top_M, total_M, scale)
        sum_ME = warpgroup_mma_wait(0, deps=[coming_ME])
        _release(values_free.index(before))
        sum_ME = sum_ME * gl.convert_layout(rescale_M, sum_rows)[:, None]
        weight_MN = gl.convert_layout(next_weight_MN.to(q_ME.dtype), factor)
    slot = (tiles - 1) % STAGES
    mbarrier.wait(values_ready.index(slot), (tiles - 1) // STAGES % 2)
    sum_ME = warpgroup_mma(weight_MN, values.index(slot), sum_ME)

    out_ME = sum_ME / gl.convert_layout(total_M, sum_rows)[:, None]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row_M = first_query + gl.arange(0, HALF, gl.SliceLayout(1, stored))
    feature_E = gl.arange(0, WIDTH, gl.SliceLayout(0, stored))
    at_ME = row_M.to(gl.int64)[:, None] * token_stride + feature_E[None, :]
    gl.store(out + at_ME, gl.convert_layout(out_ME.to(q_ME.dtype), stored), mask=(row_M < length)[:, None])


@gluon.jit
def _row_of_tile(number, starts, begin, rows, TILE: gl.constexpr):
    """`tiles.row_of_tile`, which Gluon cannot call."""
    row = 0
    end = rows
    while end - row > 1:
        middle = (row + end) // 2
        reached = (gl.load(starts + middle) - begin) // TILE + middle <= number
        row = gl.where(reached, middle, row)
        end = gl.where(reached, end, middle)
    return row


@gluon.jit
def _barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(made.index(slot), count=COUNT)
    return made


@gluon.jit(
    do_not_specialize=["rows", "begin", "min_tokens"],
    do_not_specialize_on_alignment=["contexts", "starts"],
)
def _whole_prompts(
    q_desc, kv_desc, out, contexts, starts, score_scale, rows, begin, min_tokens,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr,
    TILE: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid (H, tile numbers). The last tiles of a row take longest and are launched first."""
    number = gl.num_programs(1) - 1 - gl.program_id(1)
    head = gl.program_id(0)
    row = _row_of_tile(number, starts, begin, rows, TILE)
    first_token = gl.load(starts + row)
    length = gl.load(starts + row + 1) - first_token
    first_tile = (first_token - begin) // TILE + row
    tile = number - first_tile
    if (length < min_tokens) | (tile * TILE >= length) | (gl.load(contexts + row) != length):
        return

    q = gl.allocate_shared_memory(q_desc.dtype, [2, HALF, WIDTH], q_desc.layout)
    keys = gl.allocate_shared_memory(q_desc.dtype, [STAGES, TILE, WIDTH], kv_desc.layout)
    values = gl.allocate_shared_memory(q_desc.dtype, [STAGES, TILE, WIDTH], kv_desc.layout)
    q_ready = _barriers(1, 1).index(0)
    # A stage is free once both consumers have arrived.
    barriers = _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1), _barriers(STAGES, 2)
    fence_async_shared()
    at = first_token + tile * TILE
    mbarrier.expect(q_ready, 2 * q_desc.block_type.nbytes)
    _load_tile(q_desc, [at, head * WIDTH], q_ready, q.index(0))
    _load_tile(q_desc, [at + HALF, head * WIDTH], q_ready, q.index(1))
    token_stride = KV_HEADS * GROUP * WIDTH
    row_out = out + first_token.to(gl.int64) * token_stride + head * WIDTH
    key_column = head // GROUP * WIDTH
    gl.warp_specialize(
        [
            (_consume, (
                q.index(0), keys, values, barriers, q_ready, row_out, tile * TILE, length, token_stride,
                tile + 1, score_scale, HALF, TILE, WIDTH, STAGES,
            )),
            (_consume, (
                q.index(1), keys, values, barriers, q_ready, row_out, tile * TILE + HALF, length,
                token_stride, tile + 1, score_scale, HALF, TILE, WIDTH, STAGES,
            )),
            (_copy_tiles, (
                kv_desc, keys, values, barriers, first_tile * TILE, tile + 1,
                key_column, KV_HEADS * WIDTH + key_column, TILE, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompts:
    """Rows first … stop - 1 of a step: the range that holds all rows `attend` computes."""

    first: int
    stop: int
    begin: int
    """First token of the first row."""
    num_tokens: int
    min_tokens: int
    """Whole prompts of fewer tokens are not computed here."""
    longest_other: int
    """Most tokens of any row that is not computed here."""


def find_prompts(
    q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule, min_tokens: int
) -> Prompts | None:
    """The rows that `attend` computes: whole prompts of at least `min_tokens` tokens.

    Of a plan without host rows any row may be one, and any other as long as the longest. None if they
    have too few tokens, or the device, the tensors or the rule are not supported.
    """
    width = q_THE.shape[2]
    rows = len(plan.context_lens_R)
    supported = (
        (plan.host is not None or rows <= FEW_ROWS)
        and plan.num_tokens >= WORTH_LAUNCHING
        and not plan.split_tokens
        and not rule.window
        and rule.sinks_H is None
        and q_THE.dtype in (torch.bfloat16, torch.float16)
        and width in (64, 128)
        and q_THE.stride(1) == width
        and q_THE.stride(0) % 8 == q_THE.data_ptr() % 16 == 0
        and cache.kv.is_contiguous()
        and is_hopper(q_THE.device)
    )
    if not supported:
        return None
    if plan.host is None:  # the kernel finds the whole prompts
        return Prompts(0, rows, 0, plan.num_tokens, min_tokens, plan.max_query_len)
    query_lens = plan.host.query_lens
    whole = (query_lens >= min_tokens) & (query_lens == plan.host.context_lens)
    if query_lens[whole].sum() < WORTH_LAUNCHING:
        return None
    chosen = np.flatnonzero(whole)
    first, stop = int(chosen[0]), int(chosen[-1]) + 1
    begin, num_tokens = int(query_lens[:first].sum()), int(query_lens[first:stop].sum())
    return Prompts(first, stop, begin, num_tokens, min_tokens, int(query_lens[~whole].max(initial=0)))


def attend(
    out_THE: Tensor, q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, prompts: Prompts, scale: float
) -> None:
    """Write the prompts' tokens of `out_THE`, which must be contiguous."""
    tokens, heads, width = q_THE.shape
    kv_heads, rows = cache.kv.shape[3], prompts.stop - prompts.first
    numbers, slot = prompts.num_tokens // _TILE + rows, 2 * kv_heads * width
    table_RW = plan.block_table_RW[prompts.first : prompts.stop]
    starts_R1 = plan.query_starts_R1[prompts.first : prompts.stop + 1]
    gathered = q_THE.new_empty(numbers * _TILE, slot)
    _gather_kv[(numbers, _TILE // _GATHERED_TOKENS)](
        cache.kv if cache.scale is None else cache.kv.view(torch.uint8),
        starts_R1 if cache.scale is None else cache.scale,
        table_RW,
        starts_R1,
        gathered,
        rows,
        prompts.begin,
        table_RW.stride(0),
        BLOCK_SIZE=cache.kv.shape[1],
        SLOT=slot,
        WIDTH=width,
        TILE=_TILE,
        TOKENS=_GATHERED_TOKENS,
        CHUNK=min(triton.next_power_of_2(slot), _GATHERED_CHUNK),
        SCALED=cache.scale is not None,
    )
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_shape, q_strides = [tokens, heads * width], [q_THE.stride(0), 1]
    _whole_prompts[(heads, numbers)](
        TensorDescriptor(q_THE, q_shape, q_strides, [_HALF, width], swizzled),
        TensorDescriptor(gathered, list(gathered.shape), [slot, 1], [_TILE, width], swizzled),
        out_THE,
        plan.context_lens_R[prompts.first : prompts.stop],
        starts_R1,
        scale * _LOG2_E,
        rows,
        prompts.begin,
        prompts.min_tokens,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        WIDTH=width,
        TILE=_TILE,
        HALF=_HALF,
        STAGES=_STAGES,
        num_warps=4,
    )
