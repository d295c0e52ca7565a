"""Kernels of paged attention: one online softmax, for rows of few tokens and for rows of many.

The G query heads of a key/value head are computed together, so that keys and values are read once
for all of them: query m of a program is token m // G, head m % G of the group.

    G = 2    m      0       1       2       3
             query  t0 h0   t0 h1   t1 h0   t1 h1   …

A program of a layer with a sliding window begins at the first token that one of its queries sees,
and reads no block table entry before it. Attention sinks are merged once, after the whole context.
"""

import triton
import triton.language as tl

from atom_ops.triton_impl.hardware.pdl import pdl_begin
from atom_ops.triton_impl.hardware.tiles import is_padding, row_of_tile
from atom_ops.triton_impl.quantized.fp8 import (
    SMALLEST,
    decode_fp8_pairs,
    in_float16,
    larger_of_both,
    largest_of,
)

LOG2_E = tl.constexpr(1.4426950408889634)
# Slices of a larger upload: their alignment changes and must not cause a recompilation.
_ANY_ALIGNMENT = ["table", "contexts", "starts", "scales", "sinks"]
# The running maximum before any score: finite, because inf - inf would be NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def oldest_seen(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first token that a query at `position` sees, in a layer with a window: see `AttentionRule`."""
    return position // WINDOW * WINDOW if CHUNKED else position - WINDOW + 1


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SPLIT_TOKENS: tl.constexpr):
    """The first token that a query at `position` sees, and where the first split or block begins."""
    oldest = tl.maximum(oldest_seen(position, WINDOW, CHUNKED), 0) if WINDOW > 0 else 0
    return oldest, oldest // SPLIT_TOKENS * SPLIT_TOKENS if SPLIT_TOKENS > 0 else oldest


@triton.jit
def _within(token_N, oldest, stop, WINDOW: tl.constexpr):
    """The tokens, but in place of one outside of `oldest` … `stop` - 1 the nearest inside; 0 where none is.

    Kernels load the nearest instead of masking loads: it is there, where unused slots may hold NaN, and
    0 * NaN would be NaN. Scores are masked, so no query sees it twice.
    """
    token_N = tl.minimum(token_N, tl.maximum(stop - 1, 0))
    return tl.maximum(token_N, oldest) if WINDOW > 0 else token_N


@triton.jit
def soft_capped(score, SOFT_CAP: tl.constexpr):
    """SOFT_CAP * tanh(score), where scores come divided by the cap; SOFT_CAP is times LOG2_E."""
    return SOFT_CAP - 2.0 * SOFT_CAP / (tl.exp2(score * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def _attend_block(
    top_M, unit_M, total_MN, sum_ME, odd_ME, q_ME, q_odd_ME, own_M, seen_M, oldest, start, stop, block_N,
    keys, scales, block_stride, token_stride, half_stride, kv_heads, score_scale,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFT_CAP: tl.constexpr,
    PTX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One iteration of the online softmax, over tokens start … start + BLOCK_N - 1 of the context.

    Queries are at `own_M`, and see no token after `seen_M`.

    MASKED: some of them lie before `oldest` or from `stop` on, or are hidden from some queries.
    SCALED: `keys` are words of two float8 codes, WIDTH and BLOCK_E count words, `q_ME` and `sum_ME` are
    the even features, `q_odd_ME` and `odd_ME` the odd ones. `unit_M` is the largest scale of a value so far;
    sums are multiples of it, so that float16 holds the weights times the scales.
    """
    token_N = start + tl.arange(0, BLOCK_N)
    feature_E = tl.arange(0, BLOCK_E)
    offset_N = (_within(token_N, oldest, stop, WINDOW) if MASKED else token_N) % BLOCK_SIZE
    at_NE = (block_N * block_stride + offset_N * token_stride)[:, None] + feature_E[None, :]
    if WIDTH != BLOCK_E:
        inside_E = feature_E[None, :] < WIDTH
        k_NE = tl.load(keys + at_NE, mask=inside_E, other=0)
        v_NE = tl.load(keys + half_stride + at_NE, mask=inside_E, other=0)
    else:
        k_NE = tl.load(keys + at_NE)
        v_NE = tl.load(keys + half_stride + at_NE)
    if SCALED:
        k_NE, k_odd_NE = decode_fp8_pairs(k_NE, q_ME.dtype, PTX)
    score_MN = tl.dot(q_ME, tl.trans(k_NE.to(q_ME.dtype)), input_precision="ieee")
    if SCALED:
        score_MN = tl.dot(q_odd_ME, tl.trans(k_odd_NE), acc=score_MN, input_precision="ieee")
        scale_at_N = (block_N * BLOCK_SIZE + offset_N) * 2 * kv_heads
        key_scale_N = tl.load(scales + scale_at_N)
        score_MN = score_MN * (key_scale_N * score_scale)[None, :]
    else:
        score_MN = score_MN * score_scale
    if SOFT_CAP > 0.0:
        score_MN = soft_capped(score_MN, SOFT_CAP)
    if MASKED:
        score_MN = tl.where(token_N[None, :] <= seen_M[:, None], score_MN, float("-inf"))
    if WINDOW > 0:
        oldest_M = oldest_seen(own_M, WINDOW, CHUNKED)
        score_MN = tl.where(token_N[None, :] >= oldest_M[:, None], score_MN, float("-inf"))

    if SCALED:
        value_scale_N = tl.load(scales + kv_heads + scale_at_N)
        value_scale_MN = tl.broadcast_to(value_scale_N[None, :], score_MN.shape)
        block_top_M, block_unit_M = tl.reduce((score_MN, value_scale_MN), 1, larger_of_both)
        new_unit_M = tl.maximum(unit_M, block_unit_M)
    else:
        block_top_M = tl.max(score_MN, 1)
        new_unit_M = unit_M
    new_top_M = tl.maximum(top_M, block_top_M)
    rescale_M = tl.exp2(top_M - new_top_M)
    weight_MN = tl.exp2(score_MN - new_top_M[:, None])
    total_MN = total_MN * rescale_M[:, None] + weight_MN
    if SCALED:
        in_units_M = 1.0 / new_unit_M
        weight_MN = weight_MN * (value_scale_MN * in_units_M[:, None])
        rescale_M = rescale_M * (unit_M * in_units_M)
        v_NE, v_odd_NE = decode_fp8_pairs(v_NE, q_ME.dtype, PTX)
    weight_MN = weight_MN.to(q_ME.dtype)
    sum_ME = tl.dot(weight_MN, v_NE.to(q_ME.dtype), acc=sum_ME * rescale_M[:, None], input_precision="ieee")
    if SCALED:
        odd_ME = tl.dot(weight_MN, v_odd_NE, acc=odd_ME * rescale_M[:, None], input_precision="ieee")
    return new_top_M, new_unit_M, total_MN, sum_ME, odd_ME


@triton.jit
def _load_block_ids(
    oldest, start, stop, table, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    token_N = _within(start + tl.arange(0, BLOCK_N), oldest, stop, WINDOW)
    return tl.load(table + token_N // BLOCK_SIZE).to(tl.int64)


@triton.jit
def _attend(
    q_ME, own_M, seen_M, oldest, first, seen_by_all, stop, table, keys, scales,
    block_stride, token_stride, half_stride, kv_heads, score_scale,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    SOFT_CAP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Maximum score, sum of weights and weighted sum of values over tokens first … stop - 1.

    Every query sees all tokens before `seen_by_all`, a multiple of BLOCK_N (with a window it is
    `first`). No query sees a token before `oldest`.
    """
    top_M = tl.full((BLOCK_M,), LOWEST, tl.float32)
    unit_M = tl.full((BLOCK_M,), SMALLEST, tl.float32)
    total_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # added up once, at the end
    # Float8: even and odd features apart, as words hold them.
    CODES: tl.constexpr = 2 if SCALED else 1
    WORDS: tl.constexpr = BLOCK_E // CODES
    sum_ME = tl.zeros((BLOCK_M, WORDS), tl.float32)
    odd_ME = tl.zeros((BLOCK_M, WORDS if SCALED else 1), tl.float32)
    if SCALED:
        unit = largest_of(q_ME)
        q_ME = in_float16(q_ME, unit)
        score_scale = score_scale * unit
        q_ME, q_odd_ME = tl.split(tl.reshape(q_ME, (BLOCK_M, WORDS, 2)))
    else:
        q_odd_ME = q_ME
    # Block ids are loaded one iteration ahead, to hide the latency of the indirection.
    next_block_N = _load_block_ids(oldest, first, stop, table, BLOCK_SIZE, BLOCK_N, WINDOW)
    for start in range(first, seen_by_all, BLOCK_N):
        block_N = next_block_N
        next_block_N = _load_block_ids(oldest, start + BLOCK_N, stop, table, BLOCK_SIZE, BLOCK_N, WINDOW)
        top_M, unit_M, total_MN, sum_ME, odd_ME = _attend_block(
            top_M, unit_M, total_MN, sum_ME, odd_ME, q_ME, q_odd_ME, own_M, seen_M, oldest, start, stop,
            block_N, keys, scales, block_stride, token_stride, half_stride, kv_heads, score_scale,
            WIDTH // CODES, BLOCK_SIZE, BLOCK_N, WORDS, SCALED, WINDOW, CHUNKED, SOFT_CAP,
            PTX, False,
        )  # fmt: skip
    for start in range(seen_by_all, stop, BLOCK_N):
        block_N = next_block_N
        next_block_N = _load_block_ids(oldest, start + BLOCK_N, stop, table, BLOCK_SIZE, BLOCK_N, WINDOW)
        top_M, unit_M, total_MN, sum_ME, odd_ME = _attend_block(
            top_M, unit_M, total_MN, sum_ME, odd_ME, q_ME, q_odd_ME, own_M, seen_M, oldest, start, stop,
            block_N, keys, scales, block_stride, token_stride, half_stride, kv_heads, score_scale,
            WIDTH // CODES, BLOCK_SIZE, BLOCK_N, WORDS, SCALED, WINDOW, CHUNKED, SOFT_CAP,
            PTX, True,
        )  # fmt: skip
    if SCALED:
        sum_ME = tl.interleave(sum_ME, odd_ME) * unit_M[:, None]
    return top_M, tl.sum(total_MN, 1), sum_ME


@triton.jit
def _merge(top_M, total_M, sum_ME, more_top_M, more_total_M, more_sum_ME):
    """Merge the softmax of two splits of a context."""
    new_top_M = tl.maximum(top_M, more_top_M)
    rescale_M = tl.exp2(top_M - new_top_M)
    more_rescale_M = tl.exp2(more_top_M - new_top_M)
    total_M = total_M * rescale_M + more_total_M * more_rescale_M
    sum_ME = sum_ME * rescale_M[:, None] + more_sum_ME * more_rescale_M[:, None]
    return new_top_M, total_M, sum_ME


@triton.jit
def merge_splits(
    partial_sums, partial_states, first_partial, splits, wanted_M, wanted_ME,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, MERGED_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Maximum score, sum of weights and weighted sum of values over all splits of a row, in order."""
    m = tl.arange(0, BLOCK_M)
    partial_ME = m[:, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    top_M = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total_M = tl.zeros((BLOCK_M,), tl.float32)
    sum_ME = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for first_split in range(0, splits, MERGED_AT_ONCE):
        # Several at a time, so that their loads overlap; a split that does not exist changes nothing. Loads
        # bypass the L1 cache (.cg), which other SMs' stores do not update.
        for next_split in tl.static_range(MERGED_AT_ONCE):
            there = first_split + next_split < splits
            partial_at = (first_partial + first_split + next_split) * BLOCK_M
            states = partial_states + partial_at * 2 + m
            more_top_M = tl.load(states, mask=wanted_M & there, other=LOWEST, cache_modifier=".cg")
            more_total_M = tl.load(states + BLOCK_M, mask=wanted_M & there, other=0.0, cache_modifier=".cg")
            more_sum_ME = tl.load(
                partial_sums + partial_at * BLOCK_E + partial_ME,
                mask=wanted_ME & there,
                other=0.0,
                cache_modifier=".cg",
            )
            top_M, total_M, sum_ME = _merge(top_M, total_M, sum_ME, more_top_M, more_total_M, more_sum_ME)
    return top_M, total_M, sum_ME


@triton.jit
def store_output(out, at_ME, wanted_ME, top_M, total_M, sum_ME, sinks, head_M):
    if sinks is not None:
        sink_M = tl.load(sinks + head_M).to(tl.float32) * LOG2_E
        top_M, total_M, sum_ME = _merge(top_M, total_M, sum_ME, sink_M, 1.0, tl.zeros_like(sum_ME))
    out_ME = sum_ME / tl.where(total_M > 0.0, total_M, 1.0)[:, None]
    tl.store(out + at_ME, out_ME.to(out.dtype.element_ty), mask=wanted_ME)


@triton.jit
def _tokens_of(contexts, rows):
    """The tokens of all contexts, float32, which a sum of int32 might not hold."""
    row_R = tl.arange(0, 128)
    tokens_R = tl.load(contexts + row_R, mask=row_R < rows, other=0).to(tl.float32)
    for first in range(128, rows, 128):
        tokens_R += tl.load(contexts + first + row_R, mask=row_R < rows - first, other=0).to(tl.float32)
    return tl.sum(tokens_R, 0)


@triton.jit
def _limited_splits(splits, context, contexts, rows, heads, FILLED: tl.constexpr):
    """At most a split for each program's share of all tokens: see `_blocks_of_split`."""
    if splits > 1:
        shares = context * (FILLED / (_tokens_of(contexts, rows) * heads))
        splits = tl.minimum(tl.maximum((shares + 0.5).to(tl.int32), 1), splits)
    return splits


@triton.jit
def _blocks_of_split(
    context, blocks, contexts, rows, heads, most,
    FIXED: tl.constexpr, LEAST_BLOCKS: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """The blocks of each split of a context, at least LEAST_BLOCKS; a context has at most `most` splits.

    FIXED: the blocks of every split, whatever the context; 0: as follows.
    FILLED: how many programs use all of the memory's bandwidth; 0: unknown. A context has at most a split
    for each share that one of so many programs has of all tokens: equal contexts have few, a long one
    among short ones has many.
    """
    splits = tl.minimum(tl.maximum(blocks // LEAST_BLOCKS, 1), most)
    if FILLED > 0:
        splits = _limited_splits(splits, context, contexts, rows, heads, FILLED)
    return FIXED if FIXED > 0 else tl.maximum(tl.cdiv(blocks, splits), 1)


@triton.jit
def store_partial(
    partial_sums, partial_states, at, top_M, total_M, sum_ME, wanted_M, wanted_ME,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """partial_sums [R, K, splits, BLOCK_M, BLOCK_E]; partial_states [R, K, splits, 2, BLOCK_M]."""
    m = tl.arange(0, BLOCK_M)
    partial_ME = m[:, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    tl.store(partial_sums + at * BLOCK_M * BLOCK_E + partial_ME, sum_ME, mask=wanted_ME)
    tl.store(partial_states + at * BLOCK_M * 2 + m, top_M, mask=wanted_M)
    tl.store(partial_states + at * BLOCK_M * 2 + BLOCK_M + m, total_M, mask=wanted_M)


@triton.jit
def merge_last(
    partial_sums, partial_states, arrived, pair, split, splits, top_M, total_M, sum_ME, wanted_M, wanted_ME,
    out, out_at_ME, sinks, head_M,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Store a split; the program that stores the last one of its pair merges all of them."""
    first_partial = pair.to(tl.int64) * tl.num_programs(2)
    store_partial(
        partial_sums, partial_states, first_partial + split, top_M, total_M, sum_ME, wanted_M, wanted_ME,
        BLOCK_M, BLOCK_E,
    )  # fmt: skip
    # The barriers order all threads' stores before the release, and the acquire before their loads.
    tl.debug_barrier()
    before = tl.atomic_add(arrived + pair, 1, sem="acq_rel")
    tl.debug_barrier()
    if before == splits - 1:
        top_M, total_M, sum_ME = merge_splits(
            partial_sums, partial_states, first_partial, splits, wanted_M, wanted_ME,
            BLOCK_M, BLOCK_E, AT_ONCE,
        )  # fmt: skip
        store_output(out, out_at_ME, wanted_ME, top_M, total_M, sum_ME, sinks, head_M)
        # For the next launch; all programs of this row and head have counted.
        tl.store(arrived + pair, 0)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def decode_attention(
    q, out, kv, scales, table, contexts, starts, sinks, partial_sums, partial_states, arrived,
    q_token_stride, q_head_stride, table_stride, block_stride, token_stride, half_stride, head_stride,
    score_scale,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFT_CAP: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
    MERGED_AT_ONCE: tl.constexpr, LEAST_BLOCKS: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """Grid (K, R, splits), for rows of at most TILE tokens. Programs without a split come last."""
    pdl_begin(PDL)
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(starts + row)
    length = tl.load(starts + row + 1) - first_token
    context = tl.load(contexts + row)
    oldest, origin = _first_seen(context - length, WINDOW, CHUNKED, SPLIT_TOKENS)
    blocks = tl.cdiv(context - origin, BLOCK_N)
    blocks_each = _blocks_of_split(
        context, blocks, contexts, tl.num_programs(1), tl.num_programs(0), tl.num_programs(2),
        SPLIT_TOKENS // BLOCK_N, LEAST_BLOCKS, FILLED,
    )  # fmt: skip
    splits = tl.maximum(tl.cdiv(blocks, blocks_each), 1)
    if (length <= 0) | (length > TILE) | (split >= splits):
        return

    m = tl.arange(0, BLOCK_M)
    feature_E = tl.arange(0, BLOCK_E)
    wanted_M = m < length * GROUP
    wanted_ME = wanted_M[:, None] & (feature_E[None, :] < WIDTH)
    token_M = (first_token + m // GROUP).to(tl.int64)
    head_M = head * GROUP + m % GROUP
    q_at_M = token_M * q_token_stride + head_M * q_head_stride
    q_ME = tl.load(q + q_at_M[:, None] + feature_E[None, :], mask=wanted_ME, other=0.0)
    first = origin + split * blocks_each * BLOCK_N
    stop = tl.minimum(context, first + blocks_each * BLOCK_N)
    own_M = context - length + m // GROUP
    top_M, total_M, sum_ME = _attend(
        q_ME, own_M, own_M, oldest, first, first, stop,
        table + row.to(tl.int64) * table_stride, kv + head * head_stride, scales + head,
        block_stride, token_stride, half_stride, tl.num_programs(0), score_scale,
        WIDTH, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_E, SCALED, WINDOW, CHUNKED, SOFT_CAP, PTX,
    )  # fmt: skip

    heads = tl.num_programs(0)
    out_at_ME = ((token_M * heads * GROUP + head_M) * WIDTH)[:, None] + feature_E[None, :]
    if splits == 1:
        store_output(out, out_at_ME, wanted_ME, top_M, total_M, sum_ME, sinks, head_M)
        return
    merge_last(
        partial_sums, partial_states, arrived, row * heads + head, split, splits, top_M, total_M, sum_ME,
        wanted_M, wanted_ME, out, out_at_ME, sinks, head_M, BLOCK_M, BLOCK_E, MERGED_AT_ONCE,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride", "rows", "min_tokens"],
    do_not_specialize_on_alignment=[*_ANY_ALIGNMENT, "ahead"],
)
def prefill_attention(
    q, out, kv, scales, table, contexts, starts, sinks, ahead,
    q_token_stride, q_head_stride, table_stride, block_stride, token_stride, half_stride, head_stride,
    score_scale, rows, min_tokens,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFT_CAP: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tile numbers, K). The last tiles of a row take longest and are launched first.

    Skips rows of fewer than `min_tokens` tokens.
    `ahead`: as `AttentionPlan.ahead_T`; what a query sees never ends before what an earlier one sees.
    """
    pdl_begin(PDL)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    if is_padding(number, starts, rows, TILE):
        return
    row = row_of_tile(number, starts, 0, rows, TILE)
    first_token = tl.load(starts + row)
    length = tl.load(starts + row + 1) - first_token
    context = tl.load(contexts + row)
    tile_start = (number - first_token // TILE - row) * TILE
    if (length < min_tokens) | (tile_start >= length):
        return

    m = tl.arange(0, BLOCK_M)
    feature_E = tl.arange(0, BLOCK_E)
    inside_M = tile_start + m // GROUP
    wanted_M = (m < TILE * GROUP) & (inside_M < length)
    wanted_ME = wanted_M[:, None] & (feature_E[None, :] < WIDTH)
    token_M = (first_token + inside_M).to(tl.int64)
    head_M = head * GROUP + m % GROUP
    q_at_M = token_M * q_token_stride + head_M * q_head_stride
    q_ME = tl.load(q + q_at_M[:, None] + feature_E[None, :], mask=wanted_ME, other=0.0)
    before = context - length + tile_start
    own_M = before + m // GROUP
    seen_M = own_M
    stop = tl.minimum(before + TILE, context)
    if ahead is not None:
        seen_M += tl.load(ahead + token_M, mask=wanted_M, other=0)
        stop += tl.load(ahead + first_token + tl.minimum(tile_start + TILE, length) - 1)
    oldest, origin = _first_seen(before, WINDOW, CHUNKED, SPLIT_TOKENS)
    seen_by_all = origin if WINDOW > 0 else tl.maximum(before + 1, 0) // BLOCK_N * BLOCK_N
    row_table = table + row.to(tl.int64) * table_stride

    if SPLIT_TOKENS > 0:
        top_M = tl.full((BLOCK_M,), LOWEST, tl.float32)
        total_M = tl.zeros((BLOCK_M,), tl.float32)
        sum_ME = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        for first in range(origin, stop, SPLIT_TOKENS):
            more_top_M, more_total_M, more_sum_ME = _attend(
                q_ME, own_M, seen_M, oldest, first, first, tl.minimum(first + SPLIT_TOKENS, stop),
                row_table, kv + head * head_stride, scales + head,
                block_stride, token_stride, half_stride, tl.num_programs(1), score_scale,
                WIDTH, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_E, SCALED, WINDOW, CHUNKED, SOFT_CAP, PTX,
            )  # fmt: skip
            top_M, total_M, sum_ME = _merge(top_M, total_M, sum_ME, more_top_M, more_total_M, more_sum_ME)
    else:
        top_M, total_M, sum_ME = _attend(
            q_ME, own_M, seen_M, oldest, origin, seen_by_all, stop,
            row_table, kv + head * head_stride, scales + head,
            block_stride, token_stride, half_stride, tl.num_programs(1), score_scale,
            WIDTH, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_E, SCALED, WINDOW, CHUNKED, SOFT_CAP, PTX,
        )  # fmt: skip
    out_at_ME = ((token_M * tl.num_programs(1) * GROUP + head_M) * WIDTH)[:, None] + feature_E[None, :]
    store_output(out, out_at_ME, wanted_ME, top_M, total_M, sum_ME, sinks, head_M)
