"""Decode attention over a float8 cache on Hopper, in Gluon, which has no interpreter.

    score_NM  = K_NE q_EM         up to 8 queries, which fill the narrow side of an MMA
    sum_EM   += V_EN weight_NM    keys and values come from shared memory as its wide operand

One program is one warp, so that nothing but its own loads makes it wait, and many of them fit an SM. A
word of the cache holds two float8 codes, which one instruction converts to float16 (`fp8`). Keys keep
their order in a word: their "low" tile holds features 0, 1, 4, 5 …, their "high" one 2, 3, 6, 7 …, which
queries follow. Values become even and odd features. Other rows, devices and rules use
`attention_kernels`, which explains the splits.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from atom_ops.ops.attention.attention import AttentionRule
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.kv_cache import KVLayer
from atom_ops.triton_impl.hardware.gluon_pdl import pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.hopper_pipeline import thread_barrier
from atom_ops.triton_impl.hardware.pdl import launch_options
from atom_ops.triton_impl.hardware.target import is_hopper
from atom_ops.triton_impl.quantized.fp8 import PAIRS_F16

QUERIES = 8
"""Most query heads x tokens of a program."""
_TOKENS = 32
_STAGES = 2
_PROGRAMS = 24
"""Most programs per SM."""
_FILLED = 8
"""Programs per SM that together use all of the memory's bandwidth."""
_LEAST_BLOCKS = 8
"""Fewest iterations of a split."""
_WIDTH = 128
_LOG2_E = 1.4426950408889634
# The running maximum before any score: finite, because inf - inf would be NaN.
_LOWEST = gl.constexpr(-1.0e30)
_SMALLEST = gl.constexpr(1.0e-30)
_ROWS = gl.constexpr(16)
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _MMA.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _MMA.value, 2))
_OF_ROWS = gl.constexpr(gl.SliceLayout(1, _MMA.value))
_OF_COLUMNS = gl.constexpr(gl.SliceLayout(0, _MMA.value))
# Both codes of two words each: as they are, and the low ones apart from the high ones.
_IN_ORDER = gl.constexpr(
    """{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
_APART = gl.constexpr(PAIRS_F16.value)


@gluon.jit
def _decode(word, ASM: gl.constexpr):
    both: gl.constexpr = (gl.float16, gl.float16)
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [word], dtype=both, is_pure=True, pack=2)


@gluon.jit
def _block_ids(table, start, last, token_N, BLOCK_SIZE: gl.constexpr):
    """The blocks of the first and of the second 16 tokens from `start` on, and of each of the 32."""
    low = gl.load(table + gl.minimum(start, last) // BLOCK_SIZE).to(gl.int64)
    high = gl.load(table + gl.minimum(start + _ROWS, last) // BLOCK_SIZE).to(gl.int64)
    block_N = gl.load(table + gl.minimum(start + token_N, last) // BLOCK_SIZE).to(gl.int64)
    return low, high, block_N


@gluon.jit
def _copy_half(
    kv, block, tiles, slot, start, last, row_T, word_W, block_stride, token_stride, half_stride,
    HALF: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy keys and values of 16 tokens of one block; `last` in place of those after it."""
    start = gl.minimum(start, last) // _ROWS * _ROWS
    at = kv + block * block_stride + start % BLOCK_SIZE * token_stride
    at_TW = (gl.minimum(row_T, last - start) * token_stride)[:, None] + word_W[None, :]
    keys = tiles.index(slot * 2)
    values = tiles.index(slot * 2 + 1)
    async_copy.async_copy_global_to_shared(keys.slice(HALF * _ROWS, _ROWS), at + at_TW)
    async_copy.async_copy_global_to_shared(values.slice(HALF * _ROWS, _ROWS), at + half_stride + at_TW)


@gluon.jit
def _copy(
    kv, scales, ids, tiles, scale_tiles, slot, start, last, row_T, word_W, token_N,
    block_stride, token_stride, half_stride, heads, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    low, high, block_N = ids
    _copy_half(
        kv, low, tiles, slot, start, last, row_T, word_W, block_stride, token_stride, half_stride,
        0, BLOCK_SIZE,
    )  # fmt: skip
    _copy_half(
        kv, high, tiles, slot, start + _ROWS, last, row_T, word_W, block_stride, token_stride, half_stride,
        1, BLOCK_SIZE,
    )  # fmt: skip
    scale_N = (block_N * BLOCK_SIZE + gl.minimum(start + token_N, last) % BLOCK_SIZE) * 2 * heads
    async_copy.async_copy_global_to_shared(scale_tiles.index(slot * 2), scales + scale_N)
    async_copy.async_copy_global_to_shared(scale_tiles.index(slot * 2 + 1), scales + heads + scale_N)
    async_copy.commit_group()


@gluon.jit
def _merge_splits(
    sums, states, first_partial, splits, at_WM, m_M, wanted_M, M: gl.constexpr, WIDTH: gl.constexpr
):
    """Sum of weights and weighted sums of values over all splits of a row, in order."""
    top_M = gl.full([M], _LOWEST, gl.float32, _OF_COLUMNS)
    total_M = gl.zeros([M], gl.float32, _OF_COLUMNS)
    even_WM = gl.zeros([WIDTH // 2, M], gl.float32, _MMA)
    odd_WM = gl.zeros([WIDTH // 2, M], gl.float32, _MMA)
    for split in range(splits):
        at_M = (first_partial + split) * M
        split_M = states + at_M * 2 + m_M
        sum_WM = sums + at_M * WIDTH + at_WM
        more_top_M = gl.load(split_M, mask=wanted_M, other=_LOWEST, cache_modifier=".cg")
        more_total_M = gl.load(split_M + M, mask=wanted_M, other=0.0, cache_modifier=".cg")
        more_even_WM = gl.load(sum_WM, mask=wanted_M[None, :], other=0.0, cache_modifier=".cg")
        more_odd_WM = gl.load(sum_WM + 1, mask=wanted_M[None, :], other=0.0, cache_modifier=".cg")
        new_top_M = gl.maximum(top_M, more_top_M)
        rescale_M, more_rescale_M = gl.exp2(top_M - new_top_M), gl.exp2(more_top_M - new_top_M)
        total_M = total_M * rescale_M + more_total_M * more_rescale_M
        even_WM = even_WM * rescale_M[None, :] + more_even_WM * more_rescale_M[None, :]
        odd_WM = odd_WM * rescale_M[None, :] + more_odd_WM * more_rescale_M[None, :]
        top_M = new_top_M
    return total_M, even_WM, odd_WM


@gluon.jit
def _load_queries(
    q, first_token, length, head, q_token_stride, q_head_stride,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, M: gl.constexpr,
):  # fmt: skip
    """Queries in the order of the keys' low and high tiles, in multiples of the largest, and the largest."""
    query_M = gl.arange(0, M, gl.SliceLayout(0, _RIGHT))
    word_W = gl.arange(0, WIDTH // 2, gl.SliceLayout(1, _RIGHT))
    token_M = (first_token + query_M // GROUP).to(gl.int64)
    q_M = q + token_M * q_token_stride + (head * GROUP + query_M % GROUP) * q_head_stride
    q_WM = q_M[None, :] + (word_W // 2 * 4 + word_W % 2)[:, None]
    wanted_WM = (query_M < length * GROUP)[None, :]
    low_WM = gl.load(q_WM, mask=wanted_WM, other=0.0).to(gl.float32)
    high_WM = gl.load(q_WM + 2, mask=wanted_WM, other=0.0).to(gl.float32)
    # Multiples of the largest query, which float16 holds.
    largest = gl.max(gl.max(gl.maximum(gl.abs(low_WM), gl.abs(high_WM)), 0), 0)
    largest = gl.maximum(largest, _SMALLEST)
    return (low_WM / largest).to(gl.float16), (high_WM / largest).to(gl.float16), largest


@gluon.jit
def _attend(
    low_WM, high_WM, score_scale, seen_M, first, stop, kv, scales, table,
    block_stride, token_stride, half_stride, heads,
    WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and weighted sums of values over tokens first … stop - 1."""
    W: gl.constexpr = WIDTH // 2
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [512 // WIDTH, WIDTH // 16], [1, 1], [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    last = gl.maximum(stop - 1, 0)
    tiles = gl.allocate_shared_memory(gl.int16, [2 * STAGES, N, W], swizzled)
    scale_tiles = gl.allocate_shared_memory(
        gl.float32, [2 * STAGES, N], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    row_T = gl.arange(0, _ROWS, gl.SliceLayout(1, loaded))
    word_W = gl.arange(0, W, gl.SliceLayout(0, loaded))
    lane_N = gl.arange(0, N, gl.BlockedLayout([1], [32], [1], [0]))
    token_N = gl.arange(0, N, _OF_ROWS)
    top_M = gl.full([M], _LOWEST, gl.float32, _OF_COLUMNS)
    total_NM = gl.zeros([N, M], gl.float32, _MMA)  # added up once, at the end
    even_WM = gl.zeros([W, M], gl.float32, _MMA)
    odd_WM = gl.zeros([W, M], gl.float32, _MMA)
    # The largest scale of a value so far: sums are multiples of it, as in `attention_kernels`.
    unit = gl.to_tensor(_SMALLEST)

    for i in gl.static_range(STAGES):
        ids = _block_ids(table, first + i * N, last, lane_N, BLOCK_SIZE)
        _copy(
            kv, scales, ids, tiles, scale_tiles, i, first + i * N, last, row_T, word_W, lane_N,
            block_stride, token_stride, half_stride, heads, BLOCK_SIZE,
        )  # fmt: skip
    # Block ids are loaded one iteration before the tiles, to hide the latency of the indirection.
    ids = _block_ids(table, first + STAGES * N, last, lane_N, BLOCK_SIZE)
    slot = 0
    for start in range(first, stop, N):
        async_copy.wait_group(STAGES - 1)
        keys_NW = tiles.index(slot * 2).load(_LEFT)
        values_WN = tiles.index(slot * 2 + 1).permute((1, 0)).load(_LEFT)
        key_scale_N = scale_tiles.index(slot * 2).load(_OF_ROWS)
        value_scale_N = scale_tiles.index(slot * 2 + 1).load(_OF_ROWS)
        # The stage is in registers, so that the next copy into it takes as long as STAGES iterations.
        _copy(
            kv, scales, ids, tiles, scale_tiles, slot, start + STAGES * N, last, row_T, word_W, lane_N,
            block_stride, token_stride, half_stride, heads, BLOCK_SIZE,
        )  # fmt: skip
        ids = _block_ids(table, start + (STAGES + 1) * N, last, lane_N, BLOCK_SIZE)
        k_low_NW, k_high_NW = _decode(keys_NW, _IN_ORDER)
        score_NM = mma_v2(k_low_NW, low_WM, gl.zeros([N, M], gl.float32, _MMA))
        score_NM = mma_v2(k_high_NW, high_WM, score_NM)
        score_NM = score_NM * (key_scale_N * score_scale)[:, None]
        score_NM = gl.where((start + token_N)[:, None] <= seen_M[None, :], score_NM, float("-inf"))
        new_top_M = gl.maximum(top_M, gl.max(score_NM, 0))
        new_unit = gl.maximum(unit, gl.max(value_scale_N, 0))
        in_units = 1.0 / new_unit
        weight_NM = gl.exp2(score_NM - new_top_M[None, :])
        rescale_M = gl.exp2(top_M - new_top_M)
        total_NM = total_NM * rescale_M[None, :] + weight_NM
        weight_NM = (weight_NM * (value_scale_N * in_units)[:, None]).to(gl.float16)
        weight_NM = gl.convert_layout(weight_NM, _RIGHT)
        rescale_M = rescale_M * (unit * in_units)
        v_even_WN, v_odd_WN = _decode(values_WN, _APART)
        even_WM = mma_v2(v_even_WN, weight_NM, even_WM * rescale_M[None, :])
        odd_WM = mma_v2(v_odd_WN, weight_NM, odd_WM * rescale_M[None, :])
        top_M, unit = new_top_M, new_unit
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    return top_M, gl.sum(total_NM, 0), even_WM * unit, odd_WM * unit


@gluon.jit
def _tokens_of(contexts, rows):
    """The tokens of all contexts, float32."""
    row_R = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    tokens_R = gl.load(contexts + row_R, mask=row_R < rows, other=0).to(gl.float32)
    for first in range(128, rows, 128):
        tokens_R += gl.load(contexts + first + row_R, mask=row_R < rows - first, other=0).to(gl.float32)
    return gl.sum(tokens_R, 0)


@gluon.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table", "contexts", "starts", "scales"],
)
def decode_attention(
    q, out, kv, scales, table, contexts, starts, partial_sums, partial_states, arrived,
    q_token_stride, q_head_stride, table_stride, block_stride, token_stride, half_stride, head_stride,
    score_scale,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, LEAST_BLOCKS: gl.constexpr,
    FILLED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (K, R, splits), for rows of at most TILE tokens."""
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    head, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    heads = gl.num_programs(0)
    first_token = gl.load(starts + row)
    length = gl.load(starts + row + 1) - first_token
    context = gl.load(contexts + row)
    blocks = (context + N - 1) // N
    splits = gl.minimum(gl.maximum(blocks // LEAST_BLOCKS, 1), gl.num_programs(2))
    if splits > 1:
        shares = context * (FILLED / (_tokens_of(contexts, gl.num_programs(1)) * heads))
        splits = gl.minimum(gl.maximum((shares + 0.5).to(gl.int32), 1), splits)
    blocks_each = (blocks + splits - 1) // splits
    splits = gl.maximum((blocks + blocks_each - 1) // gl.maximum(blocks_each, 1), 1)
    if (length <= 0) | (length > TILE) | (split >= splits):
        return

    low_WM, high_WM, largest = _load_queries(
        q, first_token, length, head, q_token_stride, q_head_stride, GROUP, WIDTH, M
    )
    m_M = gl.arange(0, M, _OF_COLUMNS)
    first = split * blocks_each * N
    stop = gl.minimum(context, first + blocks_each * N)
    top_M, total_M, even_WM, odd_WM = _attend(
        low_WM, high_WM, score_scale * largest, context - length + m_M // GROUP, first, stop,
        kv + head * head_stride, scales + head, table + row.to(gl.int64) * table_stride,
        block_stride, token_stride, half_stride, heads, WIDTH, BLOCK_SIZE, M, N, STAGES,
    )  # fmt: skip

    feature_W = gl.arange(0, WIDTH // 2, _OF_ROWS) * 2
    wanted_M = m_M < length * GROUP
    if splits > 1:
        # partial_sums [R, K, splits, M, WIDTH]; partial_states [R, K, splits, 2, M]
        pair = row * heads + head
        first_partial = pair.to(gl.int64) * gl.num_programs(2)
        at_M = (first_partial + split) * M
        at_WM = (m_M * WIDTH)[None, :] + feature_W[:, None]
        sum_WM = partial_sums + at_M * WIDTH + at_WM
        gl.store(sum_WM, even_WM, mask=wanted_M[None, :])
        gl.store(sum_WM + 1, odd_WM, mask=wanted_M[None, :])
        gl.store(partial_states + at_M * 2 + m_M, top_M, mask=wanted_M)
        gl.store(partial_states + at_M * 2 + M + m_M, total_M, mask=wanted_M)
        # The barriers order all threads' stores before the release, and the acquire before their loads.
        thread_barrier()
        before = gl.atomic_add(arrived + pair, 1, sem="acq_rel")
        thread_barrier()
        if before != splits - 1:
            return
        total_M, even_WM, odd_WM = _merge_splits(
            partial_sums, partial_states, first_partial, splits, at_WM, m_M, wanted_M, M, WIDTH
        )
        gl.store(arrived + pair, 0)
    token_M = (first_token + m_M // GROUP).to(gl.int64)
    out_M = out + (token_M * heads * GROUP + head * GROUP + m_M % GROUP) * WIDTH
    out_WM = out_M[None, :] + feature_W[:, None]
    share_M = 1.0 / gl.where(total_M > 0.0, total_M, 1.0)
    gl.store(out_WM, (even_WM * share_M[None, :]).to(out.dtype.element_ty), mask=wanted_M[None, :])
    gl.store(out_WM + 1, (odd_WM * share_M[None, :]).to(out.dtype.element_ty), mask=wanted_M[None, :])


def supports(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule) -> bool:
    """Whether `attend` computes the decoding rows of a step."""
    _, heads, width = q_THE.shape
    _, block_size, _, kv_heads, _ = cache.kv.shape
    return (
        cache.scale is not None
        and width == _WIDTH
        and block_size % _ROWS.value == 0
        and heads // kv_heads * max(plan.decode_query_len, plan.min_query_len) <= QUERIES
        and not plan.split_tokens
        and not rule.window
        and rule.sinks_H is None
        and not rule.soft_cap
        and q_THE.dtype in (torch.bfloat16, torch.float16)
        and cache.kv.is_contiguous()
        and is_hopper(q_THE.device)
    )


def attend(
    out_THE: Tensor, q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule,
    arrived: Tensor, num_sms: int,
) -> int:  # fmt: skip
    """Write the rows of few tokens of `out_THE`, which must be contiguous; returns the most tokens of them.

    `arrived`: a counter for each row and key/value head, 0 before and after.
    """
    _, heads, width = q_THE.shape
    _, block_size, _, kv_heads, _ = cache.kv.shape
    assert cache.scale is not None
    words = cache.kv.view(torch.int16)
    rows = len(plan.context_lens_R)
    group = heads // kv_heads
    longest = triton.cdiv(plan.max_context_len, _TOKENS * _LEAST_BLOCKS)
    splits = max(1, min(_PROGRAMS * num_sms // (rows * kv_heads), longest))
    partials = rows * kv_heads * splits * QUERIES if splits > 1 else 0
    decode_attention[(kv_heads, rows, splits)](
        q_THE, out_THE, words, cache.scale,
        plan.block_table_RW, plan.context_lens_R, plan.query_starts_R1,
        torch.empty(partials * width, dtype=torch.float32, device=q_THE.device),
        torch.empty(partials * 2, dtype=torch.float32, device=q_THE.device),
        arrived,
        *q_THE.stride()[:2], plan.block_table_RW.stride(0), *words.stride()[:4],
        rule.scale * _LOG2_E,
        GROUP=group, WIDTH=width, BLOCK_SIZE=block_size, TILE=QUERIES // group,
        M=QUERIES, N=_TOKENS, STAGES=_STAGES, LEAST_BLOCKS=_LEAST_BLOCKS, FILLED=_FILLED * num_sms,
        num_warps=1, **launch_options(q_THE.device),
    )  # fmt: skip
    return QUERIES // group
