"""Paged attention in Triton: two kernels around one online softmax.

The G query heads of a key/value head stand as queries side by side, so that keys and values are
read once for all of them: query m of a program is token m // G, head m % G of the group.

    _short_rows   rows of few tokens (decodes). Bound by memory, so each context is also cut into
                  splits, a program each; the last one of a row to arrive merges them, in order.
    _long_rows    tiles of rows of many tokens. Bound by arithmetic; a program for each tile.

A step takes either or both; each kernel passes over the other's rows. What is launched follows
from the numbers of the plan alone, what is read and computed from its tensors. On Hopper GPUs a
third kernel takes long prompts that a step brings whole, where the plan has host rows to find
them by (`hopper_attention`).

Under a window a program begins with the first token that one of its queries sees, and reads no
entry of a table before that. Sinks join once, when all of a context is summed.

With `split_tokens` both kernels cut every context at the same places, use the same blocks and
merge in the same order: then the bits of a token depend on neither its batch nor its phase.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention import AttentionRule, paged_attention
from atom_ops.ops.attention_plan import AttentionPlan
from atom_ops.ops.kv_cache import KVLayer
from atom_ops.triton_impl import INTERPRETED, NEEDS, runs_on
from atom_ops.triton_impl.new_token import keep_token, turned_heads
from atom_ops.triton_impl.overlap import begin, launch_options

_ANY_ALIGNMENT = ["table", "contexts", "starts", "scales", "sinks"]
_LOG2_E = tl.constexpr(1.4426950408889634)
# Stands for the highest of no scores: finite, for the difference of two must not be NaN.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def widen(code, dtype: tl.constexpr):
    """The numbers of float8_e4m3fn codes.

    A code moved to the top of a wider number (sign, four exponent bits, mantissa) is off by a
    power of two; the mask takes out the copies that widening makes of the sign.
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


@triton.jit
def _reach(position, WINDOW: tl.constexpr, SPLIT_TOKENS: tl.constexpr):
    """The first token that a query at `position` sees, and where its first split or block begins."""
    oldest = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
    return oldest, oldest // SPLIT_TOKENS * SPLIT_TOKENS if SPLIT_TOKENS > 0 else oldest


@triton.jit
def _exists(token_N, oldest, stop, WINDOW: tl.constexpr):
    return (token_N >= oldest) & (token_N < stop) if WINDOW > 0 else token_N < stop


@triton.jit
def _fold(
    top_M, total_M, sum_ME, q_ME, seen_M, oldest, start, stop, block_N, keys, scales,
    block_stride, token_stride, half_stride, kv_heads, score_scale,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take tokens start … start + BLOCK_N - 1 of the context, in their blocks, into the softmax.

    MASKED: some of these may not exist (before `oldest`, from `stop` on) or not be seen by every query.
    """
    token_N = start + tl.arange(0, BLOCK_N)
    feature_E = tl.arange(0, BLOCK_E)
    exists_N = _exists(token_N, oldest, stop, WINDOW)
    wanted_NE = exists_N[:, None] & (feature_E[None, :] < WIDTH)
    offset_N = token_N % BLOCK_SIZE
    at_NE = (block_N * block_stride + offset_N * token_stride)[:, None] + feature_E[None, :]
    # What lies outside may be NaN, so it is not read: 0 * NaN would be NaN.
    if MASKED or WIDTH != BLOCK_E:
        k_NE = tl.load(keys + at_NE, mask=wanted_NE, other=0)
        v_NE = tl.load(keys + half_stride + at_NE, mask=wanted_NE, other=0)
    else:
        k_NE = tl.load(keys + at_NE)
        v_NE = tl.load(keys + half_stride + at_NE)
    if SCALED:
        k_NE = widen(k_NE, q_ME.dtype)
        v_NE = widen(v_NE, q_ME.dtype)
    score_MN = tl.dot(q_ME, tl.trans(k_NE.to(q_ME.dtype)), input_precision="ieee") * score_scale
    if SCALED:
        scale_at_N = (block_N * BLOCK_SIZE + offset_N) * 2 * kv_heads
        key_scale_N = tl.load(scales + scale_at_N, mask=exists_N, other=0.0)
        score_MN = score_MN * key_scale_N[None, :]
    if MASKED:
        score_MN = tl.where(token_N[None, :] <= seen_M[:, None], score_MN, float("-inf"))
    if WINDOW > 0:
        score_MN = tl.where(token_N[None, :] > seen_M[:, None] - WINDOW, score_MN, float("-inf"))

    new_top_M = tl.maximum(top_M, tl.max(score_MN, 1))
    kept_M = tl.exp2(top_M - new_top_M)
    weight_MN = tl.exp2(score_MN - new_top_M[:, None])
    total_M = total_M * kept_M + tl.sum(weight_MN, 1)
    if SCALED:
        value_scale_N = tl.load(scales + kv_heads + scale_at_N, mask=exists_N, other=0.0)
        weight_MN = weight_MN * value_scale_N[None, :]
    sum_ME = tl.dot(
        weight_MN.to(q_ME.dtype), v_NE.to(q_ME.dtype), acc=sum_ME * kept_M[:, None], input_precision="ieee"
    )
    return new_top_M, total_M, sum_ME


@triton.jit
def _blocks_of(
    oldest, start, stop, table, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    token_N = start + tl.arange(0, BLOCK_N)
    exists_N = _exists(token_N, oldest, stop, WINDOW)
    return tl.load(table + token_N // BLOCK_SIZE, mask=exists_N, other=0).to(tl.int64)


@triton.jit
def _attend(
    q_ME, seen_M, oldest, first, seen_by_all, stop, table, keys, scales,
    block_stride, token_stride, half_stride, kv_heads, score_scale,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Highest score, sum of weights and weighted sum of values over tokens first … stop - 1.

    Tokens before `seen_by_all`, whole blocks of them, exist and are seen by every query; under a
    window that is `first`. No query sees a token before `oldest`.
    """
    top_M = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total_M = tl.zeros((BLOCK_M,), tl.float32)
    sum_ME = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    # One step ahead, so that keys and values need not wait for their addresses.
    next_block_N = _blocks_of(oldest, first, stop, table, BLOCK_SIZE, BLOCK_N, WINDOW)
    for start in range(first, seen_by_all, BLOCK_N):
        block_N = next_block_N
        next_block_N = _blocks_of(oldest, start + BLOCK_N, stop, table, BLOCK_SIZE, BLOCK_N, WINDOW)
        top_M, total_M, sum_ME = _fold(
            top_M, total_M, sum_ME, q_ME, seen_M, oldest, start, stop, block_N, keys, scales,
            block_stride, token_stride, half_stride, kv_heads, score_scale,
            WIDTH, BLOCK_SIZE, BLOCK_N, BLOCK_E, SCALED, WINDOW, False,
        )  # fmt: skip
    for start in range(seen_by_all, stop, BLOCK_N):
        block_N = next_block_N
        next_block_N = _blocks_of(oldest, start + BLOCK_N, stop, table, BLOCK_SIZE, BLOCK_N, WINDOW)
        top_M, total_M, sum_ME = _fold(
            top_M, total_M, sum_ME, q_ME, seen_M, oldest, start, stop, block_N, keys, scales,
            block_stride, token_stride, half_stride, kv_heads, score_scale,
            WIDTH, BLOCK_SIZE, BLOCK_N, BLOCK_E, SCALED, WINDOW, True,
        )  # fmt: skip
    return top_M, total_M, sum_ME


@triton.jit
def _merge(top_M, total_M, sum_ME, more_top_M, more_total_M, more_sum_ME):
    """The softmax over two pieces of a context."""
    new_top_M = tl.maximum(top_M, more_top_M)
    kept_M = tl.exp2(top_M - new_top_M)
    taken_M = tl.exp2(more_top_M - new_top_M)
    total_M = total_M * kept_M + more_total_M * taken_M
    sum_ME = sum_ME * kept_M[:, None] + more_sum_ME * taken_M[:, None]
    return new_top_M, total_M, sum_ME


@triton.jit
def _merge_parts(
    parts, part_states, first_part, splits, wanted_M, wanted_ME,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Highest score, sum of weights and weighted sum of values over all splits of a row, in their order."""
    m = tl.arange(0, BLOCK_M)
    part_ME = m[:, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    top_M = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total_M = tl.zeros((BLOCK_M,), tl.float32)
    sum_ME = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for first_split in range(0, splits, MERGED):
        # Several at a time, for their loads to overlap; one that is not there changes nothing.
        for next_split in tl.static_range(MERGED):
            there = first_split + next_split < splits
            part_at = (first_part + first_split + next_split) * BLOCK_M
            states = part_states + part_at * 2 + m
            more_top_M = tl.load(states, mask=wanted_M & there, other=_LOWEST, cache_modifier=".cg")
            more_total_M = tl.load(states + BLOCK_M, mask=wanted_M & there, other=0.0, cache_modifier=".cg")
            more_sum_ME = tl.load(
                parts + part_at * BLOCK_E + part_ME, mask=wanted_ME & there, other=0.0, cache_modifier=".cg"
            )
            top_M, total_M, sum_ME = _merge(top_M, total_M, sum_ME, more_top_M, more_total_M, more_sum_ME)
    return top_M, total_M, sum_ME


@triton.jit
def _store_output(out, at_ME, wanted_ME, top_M, total_M, sum_ME, sinks, head_M):
    if sinks is not None:
        sink_M = tl.load(sinks + head_M).to(tl.float32) * _LOG2_E
        top_M, total_M, sum_ME = _merge(top_M, total_M, sum_ME, sink_M, 1.0, tl.zeros_like(sum_ME))
    out_ME = sum_ME / tl.where(total_M > 0.0, total_M, 1.0)[:, None]
    tl.store(out + at_ME, out_ME.to(out.dtype.element_ty), mask=wanted_ME)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=[*_ANY_ALIGNMENT, "slots"])
def _short_rows(
    q, out, kv, scales, table, contexts, starts, sinks, parts, part_states, arrived,
    q_token_stride, q_head_stride, table_stride, block_stride, token_stride, half_stride, head_stride,
    score_scale, cos, sin, slots, q_weight, k_weight, eps, cos_stride, sin_stride,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, OVERLAP: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Grid (K, splits, R); a row of at most TILE tokens is one tile.

    With `slots`, rows are of one token and `q` is the fused projection: queries get normalised
    and turned on their way in, and the last split first stores the token's key and value.
    """
    begin(OVERLAP)
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(starts + row)
    length = tl.load(starts + row + 1) - first_token
    context = tl.load(contexts + row)
    oldest, origin = _reach(context - length, WINDOW, SPLIT_TOKENS)
    blocks = tl.cdiv(context - origin, BLOCK_N)
    if SPLIT_TOKENS > 0:
        blocks_each = SPLIT_TOKENS // BLOCK_N
    else:
        blocks_each = tl.maximum(tl.cdiv(blocks, tl.num_programs(1)), 1)
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
    if slots is None:
        q_ME = tl.load(q + q_at_M[:, None] + feature_E[None, :], mask=wanted_ME, other=0.0)
    else:
        at = first_token.to(tl.int64)
        cos += at * cos_stride
        sin += at * sin_stride
        if split == splits - 1:
            keep_token(
                q + at * q_token_stride, tl.load(slots + at), kv, head, token_stride, half_stride,
                head_stride, cos, sin, k_weight, eps, GROUP, WIDTH, BLOCK_E,
            )  # fmt: skip
        q_ME = turned_heads(q + q_at_M, wanted_M, cos, sin, q_weight, eps, WIDTH, BLOCK_E)
    first = origin + split * blocks_each * BLOCK_N
    stop = tl.minimum(context, first + blocks_each * BLOCK_N)
    top_M, total_M, sum_ME = _attend(
        q_ME, context - length + m // GROUP, oldest, first, first, stop,
        table + row.to(tl.int64) * table_stride, kv + head * head_stride, scales + head,
        block_stride, token_stride, half_stride, tl.num_programs(0), score_scale,
        WIDTH, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_E, SCALED, WINDOW,
    )  # fmt: skip

    heads = tl.num_programs(0)
    out_at_ME = ((token_M * heads * GROUP + head_M) * WIDTH)[:, None] + feature_E[None, :]
    if splits == 1:
        _store_output(out, out_at_ME, wanted_ME, top_M, total_M, sum_ME, sinks, head_M)
        return

    # parts [R, K, splits, BLOCK_M, BLOCK_E]; part_states [R, K, splits, 2, BLOCK_M]
    pair = row * heads + head
    part_at = (pair.to(tl.int64) * tl.num_programs(1) + split) * BLOCK_M
    part_ME = m[:, None] * BLOCK_E + feature_E[None, :]
    tl.store(parts + part_at * BLOCK_E + part_ME, sum_ME, mask=wanted_ME)
    tl.store(part_states + part_at * 2 + m, top_M, mask=wanted_M)
    tl.store(part_states + part_at * 2 + BLOCK_M + m, total_M, mask=wanted_M)
    # All threads' stores come before the one thread's release, and its acquire before their loads.
    tl.debug_barrier()
    before = tl.atomic_add(arrived + pair, 1, sem="acq_rel")
    tl.debug_barrier()
    if before == splits - 1:
        top_M, total_M, sum_ME = _merge_parts(
            parts, part_states, pair.to(tl.int64) * tl.num_programs(1), splits, wanted_M, wanted_ME,
            BLOCK_M, BLOCK_E, MERGED,
        )  # fmt: skip
        _store_output(out, out_at_ME, wanted_ME, top_M, total_M, sum_ME, sinks, head_M)
        tl.store(arrived + pair, 0)


@triton.jit
def row_of(number, starts, begin, rows, TILE: tl.constexpr):
    """The row that owns tile `number`: row r's first tile is (starts[r] - begin) // TILE + r.

    So each row has at least as many numbers as tiles, and their sum is known without looking.
    `begin` is starts[0].
    """
    row = tl.full((), 0, tl.int32)
    behind = rows
    while behind - row > 1:
        middle = (row + behind) // 2
        reached = (tl.load(starts + middle) - begin) // TILE + middle <= number
        row = tl.where(reached, middle, row)
        behind = tl.where(reached, behind, middle)
    return row


@triton.jit(
    do_not_specialize=["table_stride", "rows", "shortest", "whole"],
    do_not_specialize_on_alignment=_ANY_ALIGNMENT,
)
def _long_rows(
    q, out, kv, scales, table, contexts, starts, sinks,
    q_token_stride, q_head_stride, table_stride, block_stride, token_stride, half_stride, head_stride,
    score_scale, rows, shortest, whole,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (numbers of tiles, K). The last tiles of a row have the most to do and come first.

    Passes over rows of fewer than `shortest` tokens, and over those of `whole` and more that are
    their own context.
    """
    begin(OVERLAP)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = row_of(number, starts, 0, rows, TILE)
    first_token = tl.load(starts + row)
    length = tl.load(starts + row + 1) - first_token
    context = tl.load(contexts + row)
    tile_start = (number - first_token // TILE - row) * TILE
    elsewhere = (length < shortest) | ((length >= whole) & (length == context))
    if elsewhere | (tile_start >= length):
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
    stop = tl.minimum(before + TILE, context)
    oldest, origin = _reach(before, WINDOW, SPLIT_TOKENS)
    seen_by_all = origin if WINDOW > 0 else tl.maximum(before + 1, 0) // BLOCK_N * BLOCK_N
    row_table = table + row.to(tl.int64) * table_stride

    if SPLIT_TOKENS > 0:
        top_M = tl.full((BLOCK_M,), _LOWEST, tl.float32)
        total_M = tl.zeros((BLOCK_M,), tl.float32)
        sum_ME = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        for first in range(origin, stop, SPLIT_TOKENS):
            more_top_M, more_total_M, more_sum_ME = _attend(
                q_ME, before + m // GROUP, oldest, first, first, tl.minimum(first + SPLIT_TOKENS, stop),
                row_table, kv + head * head_stride, scales + head,
                block_stride, token_stride, half_stride, tl.num_programs(1), score_scale,
                WIDTH, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_E, SCALED, WINDOW,
            )  # fmt: skip
            top_M, total_M, sum_ME = _merge(top_M, total_M, sum_ME, more_top_M, more_total_M, more_sum_ME)
    else:
        top_M, total_M, sum_ME = _attend(
            q_ME, before + m // GROUP, oldest, origin, seen_by_all, stop,
            row_table, kv + head * head_stride, scales + head,
            block_stride, token_stride, half_stride, tl.num_programs(1), score_scale,
            WIDTH, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_E, SCALED, WINDOW,
        )  # fmt: skip
    out_at_ME = ((token_M * tl.num_programs(1) * GROUP + head_M) * WIDTH)[:, None] + feature_E[None, :]
    _store_output(out, out_at_ME, wanted_ME, top_M, total_M, sum_ME, sinks, head_M)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How a kernel is cut and compiled; the numbers below were the fastest on an H200."""

    queries: int
    """BLOCK_M: query heads x tokens of a program."""
    tokens: int
    """BLOCK_N: tokens of the context at a time."""
    warps: int
    stages: int
    programs: int = 0
    """For each processor, that splits make up where rows and heads are fewer."""


NewToken = tuple[Tensor | float | None, ...]
# The kernel's parameters from `cos` on.
_NO_TOKEN: NewToken = (None, None, None, None, None, 0.0, 0, 0)
_MERGED = 8
_MOST_PAIRS = 1 << 18
WHOLE_PROMPT = 512
"""Tokens from which on a prompt that a step brings whole is worth gathering, on a Hopper."""
_NO_ROW = (1 << 31) - 1


def _short_blocks(group: int, width: int, dtype: torch.dtype, few: bool) -> _Blocks:
    """`few` programs wait for memory in turn, so each asks for much at once; many hide it."""
    queries = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return _Blocks(queries, 32, 4, 2 if width <= 128 else 1, 2)
    if few:
        return _Blocks(queries, 128 if width <= 128 else 64, 4, 1, 2)
    return _Blocks(queries, 32, 4, 3, 4)


def _long_blocks(group: int, width: int, dtype: torch.dtype) -> _Blocks:
    least = triton.next_power_of_2(group)
    if dtype == torch.float32:
        return _Blocks(max(32, least), 32, 4, 1)
    if width > 128:
        return _Blocks(max(64, least), 32, 4, 2)
    # An MI300's local memory (64 KiB) holds one stage fewer.
    return _Blocks(max(128, least), 64, 8, 3 if torch.version.hip is None else 2)


def supports(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule) -> bool:
    kv_heads, width = cache.kv.shape[3:]
    if INTERPRETED and q_THE.dtype == torch.bfloat16:
        return False  # the interpreter's bfloat16 products are wrong
    return (
        16 <= width <= 256
        and q_THE.stride(2) == 1
        and q_THE.shape[1] <= 128 * kv_heads
        and len(plan.context_lens_R) * kv_heads <= _MOST_PAIRS
    )


@paged_attention.provider("triton", needs=NEEDS, supported=runs_on, supports=supports)
def _paged_attention(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule) -> Tensor:
    (_, heads, width), kv_heads = q_THE.shape, cache.kv.shape[3]
    group = heads // kv_heads
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    long = _long_blocks(group, width, q_THE.dtype)
    if plan.split_tokens:
        short, short_tile = long, 1
    else:
        short, short_tile = short_for(q_THE, cache, plan)
    if plan.min_query_len <= short_tile:
        launch_short(out_THE, q_THE, cache, plan, rule, short, short_tile)
    most, whole = _attend_to_prompts(out_THE, q_THE, cache, plan, rule)
    if most > short_tile:
        _launch_long(out_THE, q_THE, cache, plan, rule, long, short_tile + 1, whole)
    return out_THE


def _attend_to_prompts(
    out_THE: Tensor, q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule
) -> tuple[int, int]:
    """Let a kernel made for this device take what rows it can.

    Returns the most tokens of the other rows, and of how many tokens on a row that is its own
    context was taken.
    """
    if plan.max_query_len >= WHOLE_PROMPT and q_THE.is_cuda and torch.version.hip is None:
        # Its language comes with the Triton of NVIDIA GPUs alone.
        from atom_ops.triton_impl import hopper_attention

        prompts = hopper_attention.whole_prompts(q_THE, cache, plan, rule)
        if prompts is not None:
            hopper_attention.attend(out_THE, q_THE, cache, plan, prompts, rule.scale)
            return prompts.others, WHOLE_PROMPT
    return plan.max_query_len, _NO_ROW


def short_for(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan) -> tuple[_Blocks, int]:
    """How short rows are cut, and the most tokens of such a row."""
    (_, heads, width), kv_heads = q_THE.shape, cache.kv.shape[3]
    few = 2 * len(plan.context_lens_R) * kv_heads <= _processors(q_THE.device)
    blocks = _short_blocks(heads // kv_heads, width, q_THE.dtype, few)
    return blocks, blocks.queries // (heads // kv_heads)


def launch_short(
    out_THE: Tensor,
    q_THE: Tensor,
    cache: KVLayer,
    plan: AttentionPlan,
    rule: AttentionRule,
    blocks: _Blocks,
    tile: int,
    token: NewToken = _NO_TOKEN,
) -> None:
    kv_heads, rows = cache.kv.shape[3], len(plan.context_lens_R)
    seen = rule.window + tile - 1 if rule.window else plan.max_context_len
    splits = _splits(plan, seen, rows * kv_heads, blocks, q_THE.device)
    padded = triton.next_power_of_2(q_THE.shape[2])
    parts = rows * kv_heads * splits * blocks.queries if splits > 1 else 0
    _short_rows[(kv_heads, splits, rows)](
        *_tensors(q_THE, out_THE, cache, plan, rule),
        torch.empty(parts * padded, dtype=torch.float32, device=q_THE.device),
        torch.empty(parts * 2, dtype=torch.float32, device=q_THE.device),
        _arrived(q_THE.device),
        *_strides(q_THE, cache, plan),
        rule.scale * _LOG2_E.value,
        *token,
        **_constants(q_THE, cache, plan, rule, blocks, tile),
        MERGED=_MERGED,
    )


def _launch_long(
    out_THE: Tensor, q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule, blocks: _Blocks,
    shortest: int, whole: int,
) -> None:  # fmt: skip
    kv_heads, rows = cache.kv.shape[3], len(plan.context_lens_R)
    tile = blocks.queries * kv_heads // q_THE.shape[1]
    _long_rows[(plan.num_tokens // tile + rows, kv_heads)](
        *_tensors(q_THE, out_THE, cache, plan, rule),
        *_strides(q_THE, cache, plan),
        rule.scale * _LOG2_E.value,
        rows,
        shortest,
        whole,
        **_constants(q_THE, cache, plan, rule, blocks, tile),
    )


def _splits(plan: AttentionPlan, seen: int, pairs: int, blocks: _Blocks, device: torch.device) -> int:
    """Programs for each (row, key/value head); no row sees more than `seen` tokens."""
    if plan.split_tokens:
        touched = triton.cdiv(seen - 1, plan.split_tokens) + 1  # begun anywhere in a piece
        return min(touched, triton.cdiv(plan.max_context_len, plan.split_tokens))
    wanted = blocks.programs * _processors(device) // pairs
    return max(1, min(wanted, triton.cdiv(min(seen, plan.max_context_len), blocks.tokens)))


def _tensors(
    q_THE: Tensor, out_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule
) -> tuple[Tensor | None, ...]:
    return (
        q_THE,
        out_THE,
        cache.kv.view(torch.uint8) if cache.scale is not None else cache.kv,
        # Without scales any tensor does: the kernel is compiled not to look at it.
        plan.context_lens_R if cache.scale is None else cache.scale,
        plan.block_table_RW,
        plan.context_lens_R,
        plan.query_starts_R1,
        rule.sinks_H,
    )


def _strides(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan) -> tuple[int, ...]:
    return *q_THE.stride()[:2], plan.block_table_RW.stride(0), *cache.kv.stride()[:4]


def _constants(
    q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule, blocks: _Blocks, tile: int
) -> dict[str, int | bool]:
    heads, width = q_THE.shape[1:]
    return {
        "GROUP": heads // cache.kv.shape[3],
        "WIDTH": width,
        "BLOCK_SIZE": cache.kv.shape[1],
        "TILE": tile,
        "SPLIT_TOKENS": plan.split_tokens,
        "BLOCK_M": blocks.queries,
        "BLOCK_N": blocks.tokens,
        "BLOCK_E": triton.next_power_of_2(width),
        "SCALED": cache.scale is not None,
        "WINDOW": rule.window,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        **launch_options(q_THE.device),
    }


@cache
def _arrived(device: torch.device) -> Tensor:
    """Splits of each (row, head) that are done; 0 between launches, which share one stream."""
    return torch.zeros(_MOST_PAIRS, dtype=torch.int32, device=device)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # interpreted: enough for several splits
    return torch.cuda.get_device_properties(device).multi_processor_count
