"""Decode attention directly from the QKV projection, for rows of one new token each.

    program (key/value head, row, split)      a split: some blocks of BLOCK_N tokens of the context
        early    before the previous kernel ends: the first block of keys and values from the cache
        then     norms and RoPE of the queries and of the new key, which the projection holds
                 attention to the split's tokens, each block loaded during the one before
        last     the last split's program writes the new token to the cache, and attends to it

All that is loaded early was complete before the step's first layer (see `pdl`), as every row decodes: in
other steps a row may share blocks with a prompt that the same step computes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.attention import AttentionRule
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.fused_attention import attend_projection
from atom_ops.ops.attention.kv_cache import KVLayer
from atom_ops.ops.attention.qkv import HeadNorms
from atom_ops.triton_impl.attention.attention import MERGED_AT_ONCE, arrival_counters, score_scale, supports
from atom_ops.triton_impl.attention.attention_kernels import (
    LOG2_E,
    LOWEST,
    merge_last,
    oldest_seen,
    soft_capped,
    store_output,
)
from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait
from atom_ops.triton_impl.hardware.persistent import num_sms
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, runs_on


@triton.jit
def _exchanged(feature_E, WIDTH: tl.constexpr):
    return tl.where(feature_E < WIDTH // 2, feature_E + WIDTH // 2, feature_E - WIDTH // 2)


@triton.jit
def _rope_heads(
    heads_M, wanted_M, cos_E, sin_E, norm_weight, eps, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr
):
    """The heads at pointers `heads_M` with RoPE, normalised before it if there is a weight; [M, E].

    A head is loaded twice, the second time with its halves exchanged: RoPE is two multiplications.
    """
    feature_E = tl.arange(0, BLOCK_E)
    other_E = _exchanged(feature_E, WIDTH)
    inside_E = feature_E < WIDTH
    wanted_ME = wanted_M[:, None] & inside_E[None, :]
    x_in_ME = tl.load(heads_M[:, None] + feature_E[None, :], mask=wanted_ME, other=0.0)
    other_ME = tl.load(heads_M[:, None] + other_E[None, :], mask=wanted_ME, other=0.0).to(tl.float32)
    x_ME = x_in_ME.to(tl.float32)
    if norm_weight is not None:
        weight_E = tl.load(norm_weight + feature_E, mask=inside_E, other=0.0).to(tl.float32)
        other_weight_E = tl.load(norm_weight + other_E, mask=inside_E, other=0.0).to(tl.float32)
        scale_M = tl.rsqrt(tl.sum(x_ME * x_ME, 1) / WIDTH + eps)
        x_ME = x_ME * scale_M[:, None] * weight_E[None, :]
        other_ME = other_ME * scale_M[:, None] * other_weight_E[None, :]
    return (x_ME * cos_E[None, :] + other_ME * sin_E[None, :]).to(x_in_ME.dtype)


@triton.jit
def _block_ids(table, start, stop, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    token_N = start + tl.arange(0, BLOCK_N)
    entries_N = table + token_N // BLOCK_SIZE
    return tl.load(entries_N, mask=token_N < stop, other=0, cache_modifier=".cg").to(tl.int64)


@triton.jit
def _keys_values(
    keys, block_N, start, stop, block_stride, token_stride, half_stride,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """[N, E] each; 0 from `stop` on. Through the L2 cache alone: early loads must find nothing older."""
    token_N = start + tl.arange(0, BLOCK_N)
    feature_E = tl.arange(0, BLOCK_E)
    at_NE = (block_N * block_stride + token_N % BLOCK_SIZE * token_stride)[:, None] + feature_E[None, :]
    inside_NE = (token_N < stop)[:, None] & (feature_E < WIDTH)[None, :]
    k_NE = tl.load(keys + at_NE, mask=inside_NE, other=0.0, cache_modifier=".cg")
    v_NE = tl.load(keys + half_stride + at_NE, mask=inside_NE, other=0.0, cache_modifier=".cg")
    return k_NE, v_NE


@triton.jit
def _attend_block(
    top_M, total_M, sum_ME, q_ME, k_NE, v_NE, inside_N, score_scale, SOFT_CAP: tl.constexpr
):  # fmt: skip
    """One iteration of the online softmax."""
    score_MN = tl.dot(q_ME, tl.trans(k_NE), input_precision="ieee") * score_scale
    if SOFT_CAP > 0.0:
        score_MN = soft_capped(score_MN, SOFT_CAP)
    score_MN = tl.where(inside_N[None, :], score_MN, float("-inf"))
    new_top_M = tl.maximum(top_M, tl.max(score_MN, 1))
    rescale_M = tl.exp2(top_M - new_top_M)
    weight_MN = tl.exp2(score_MN - new_top_M[:, None])
    total_M = total_M * rescale_M + tl.sum(weight_MN, 1)
    sum_ME = tl.dot(
        weight_MN.to(q_ME.dtype), v_NE, acc=sum_ME * rescale_M[:, None], input_precision="ieee"
    )  # fmt: skip
    return new_top_M, total_M, sum_ME


@triton.jit
def _attend_new(
    top_M, total_M, sum_ME, q_ME, key_E, value_E, score_scale, there, SOFT_CAP: tl.constexpr
):  # fmt: skip
    """The same for the new token; nothing changes unless it is `there`."""
    score_M = tl.sum(q_ME.to(tl.float32) * key_E.to(tl.float32)[None, :], 1) * score_scale
    if SOFT_CAP > 0.0:
        score_M = soft_capped(score_M, SOFT_CAP)
    score_M = tl.where(there, score_M, float("-inf"))
    new_top_M = tl.maximum(top_M, score_M)
    rescale_M, weight_M = tl.exp2(top_M - new_top_M), tl.exp2(score_M - new_top_M)
    rounded_M = weight_M.to(q_ME.dtype).to(tl.float32)
    sum_ME = sum_ME * rescale_M[:, None] + rounded_M[:, None] * value_E.to(tl.float32)[None, :]
    return new_top_M, total_M * rescale_M + weight_M, sum_ME


@triton.jit
def _blocks_of_split(blocks, most):
    """Blocks of each of at most `most` splits.

    Merging a split takes about a tenth of the time of a block: with b blocks in each split, b + blocks / 10 b
    is least at b = sqrt(blocks / 10).
    """
    each = (tl.sqrt(blocks.to(tl.float32) / 10) + 0.5).to(tl.int32)
    return tl.maximum(tl.maximum(each, tl.cdiv(blocks, most)), 1)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table", "contexts", "slots", "sinks"],
)
def attend_new_tokens(
    qkv, out, kv, table, contexts, slots, sinks, partial_sums, partial_states, arrived,
    qkv_stride, table_stride, block_stride, token_stride, half_stride, head_stride,
    score_scale, cos, sin, q_weight, k_weight, eps, cos_stride, sin_stride,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (K, R, splits). A row without context is padding: its slot is negative, its result anything."""
    head, split, heads = tl.program_id(0), tl.program_id(2), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    context = tl.load(contexts + row, cache_modifier=".cg")
    old = tl.maximum(context - 1, 0)
    oldest = tl.maximum(oldest_seen(old, WINDOW, CHUNKED), 0) if WINDOW > 0 else 0
    blocks = tl.cdiv(old - oldest, BLOCK_N)
    each = _blocks_of_split(blocks, tl.num_programs(2))
    splits = tl.maximum(tl.cdiv(blocks, each), 1)
    first = oldest + split * each * BLOCK_N
    stop = tl.minimum(old, first + each * BLOCK_N)
    table += row * table_stride
    keys = kv + head * head_stride
    block_N = _block_ids(table, first, stop, BLOCK_SIZE, BLOCK_N)
    k_NE, v_NE = _keys_values(
        keys, block_N, first, stop, block_stride, token_stride, half_stride, WIDTH, BLOCK_SIZE, BLOCK_N,
        BLOCK_E,
    )  # fmt: skip
    next_block_N = _block_ids(table, first + BLOCK_N, stop, BLOCK_SIZE, BLOCK_N)
    slot = tl.load(slots + row, cache_modifier=".cg")
    # What is read above was complete before the step; the projection is what the previous kernel writes.
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    if split >= splits:
        return

    m = tl.arange(0, BLOCK_M)
    feature_E = tl.arange(0, BLOCK_E)
    inside_E = feature_E < WIDTH
    wanted_M = m < GROUP
    wanted_ME = wanted_M[:, None] & inside_E[None, :]
    head_M = head * GROUP + m
    token = qkv + row * qkv_stride
    key = token + (heads * GROUP + head) * WIDTH
    cos_E = tl.load(cos + row * cos_stride + feature_E, mask=inside_E, other=0.0)
    sin_E = tl.load(sin + row * sin_stride + feature_E, mask=inside_E, other=0.0)
    value_E = tl.load(key + heads * WIDTH + feature_E, mask=inside_E, other=0.0)
    q_ME = _rope_heads(token + head_M * WIDTH, wanted_M, cos_E, sin_E, q_weight, eps, WIDTH, BLOCK_E)
    one_M = tl.zeros((1,), tl.int32)
    key_E = tl.sum(_rope_heads(key + one_M, one_M == 0, cos_E, sin_E, k_weight, eps, WIDTH, BLOCK_E), 0)
    is_last = split == splits - 1
    target = kv + slot * token_stride + head * head_stride + feature_E
    tl.store(target, key_E, mask=inside_E & is_last & (slot >= 0))
    tl.store(target + half_stride, value_E, mask=inside_E & is_last & (slot >= 0))

    top_M = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total_M = tl.zeros((BLOCK_M,), tl.float32)
    sum_ME = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for start in range(first, stop, BLOCK_N):
        ahead = start + BLOCK_N
        next_k_NE, next_v_NE = _keys_values(
            keys, next_block_N, ahead, stop, block_stride, token_stride, half_stride, WIDTH, BLOCK_SIZE,
            BLOCK_N, BLOCK_E,
        )  # fmt: skip
        next_block_N = _block_ids(table, ahead + BLOCK_N, stop, BLOCK_SIZE, BLOCK_N)
        inside_N = start + tl.arange(0, BLOCK_N) < stop
        top_M, total_M, sum_ME = _attend_block(
            top_M, total_M, sum_ME, q_ME, k_NE, v_NE, inside_N, score_scale, SOFT_CAP
        )
        k_NE, v_NE = next_k_NE, next_v_NE
    top_M, total_M, sum_ME = _attend_new(
        top_M, total_M, sum_ME, q_ME, key_E, value_E, score_scale, is_last, SOFT_CAP
    )

    out_at_ME = ((row * heads * GROUP + head_M) * WIDTH)[:, None] + feature_E[None, :]
    if splits == 1:
        store_output(out, out_at_ME, wanted_ME, top_M, total_M, sum_ME, sinks, head_M)
        return
    merge_last(
        partial_sums, partial_states, arrived, row * heads + head, split, splits, top_M, total_M, sum_ME,
        wanted_M, wanted_ME, out, out_at_ME, sinks, head_M, BLOCK_M, BLOCK_E, AT_ONCE,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Config:
    tokens: int
    """BLOCK_N."""
    warps: int
    programs: int
    """Most programs per SM; contexts are split where rows x heads are fewer."""


_MAX_PAIRS = 512
"""Rows x key/value heads up to which one kernel is faster than two on an H200."""


def _config(width: int, dtype: torch.dtype, pairs: int) -> _Config:
    """The fastest on an H200, measured for heads of 64 and 128 features in 16 bits."""
    if dtype == torch.float32 or width > 128:
        return _Config(32, 4, 2)
    if pairs <= _ONE_WAVE:
        return _Config(64, 8, 1)
    return _Config(64, 4, 2) if pairs <= 256 or width <= 64 else _Config(32, 4, 2)


_MAX_GROUP = 16
"""Query heads of a key/value head; more take too many registers."""
_ONE_WAVE = 8
"""Pairs that leave most SMs idle unless contexts are long: more warps for each."""


def _supports(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: KVLayer,
    slots_T: Tensor,
    norms: HeadNorms | None,
    plan: AttentionPlan,
    rule: AttentionRule,
) -> bool:
    """Captured decode steps of single tokens, without batch invariance; a cache of the compute dtype."""
    rows = len(plan.context_lens_R)
    return (
        plan.max_query_len == 1
        and plan.num_tokens == rows
        and (INTERPRETED or plan.host is None)
        and (INTERPRETED or rows * cache.kv.shape[3] <= _MAX_PAIRS)
        and not plan.split_tokens
        and cache.scale is None
        and cache.kv.is_contiguous()
        and qkv_TO.shape[1] <= (_MAX_GROUP + 2) * cache.kv.shape[3] * cache.kv.shape[4]
        and cos_T1R.shape[-1] == cache.kv.shape[-1]
        and qkv_TO.stride(1) == cos_T1R.stride(2) == sin_T1R.stride(2) == slots_T.stride(0) == 1
        and supports(_queries(qkv_TO, cache), cache, plan, rule)
    )


def _queries(qkv_TO: Tensor, cache: KVLayer) -> Tensor:
    """A view of the projection's query heads."""
    kv_heads, width = cache.kv.shape[3:]
    heads_TNE = qkv_TO.unflatten(1, (-1, width))
    return heads_TNE[:, : heads_TNE.shape[1] - 2 * kv_heads]


@attend_projection.provider(
    "triton", needs=NEEDS, supported=runs_on, supports=_supports, batch_invariant=False
)
def _launch(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: KVLayer,
    slots_T: Tensor,
    norms: HeadNorms | None,
    plan: AttentionPlan,
    rule: AttentionRule,
) -> Tensor:
    rows = len(plan.context_lens_R)
    kv_heads, width = cache.kv.shape[3:]
    device = qkv_TO.device
    group = qkv_TO.shape[1] // width // kv_heads - 2
    out_THE = torch.empty(rows, kv_heads * group, width, dtype=qkv_TO.dtype, device=device)
    config = _config(width, qkv_TO.dtype, rows * kv_heads)
    queries = max(8 if qkv_TO.dtype != torch.float32 and torch.version.hip is None else 16, group)
    queries = triton.next_power_of_2(queries)
    padded = max(triton.next_power_of_2(width), 16)
    splits = _splits(plan, rule.window, rows * kv_heads, config, device)
    partials = rows * kv_heads * splits * queries if splits > 1 else 0
    q_weight_E, k_weight_E, eps = (
        (norms.q_weight_E, norms.k_weight_E, norms.eps) if norms is not None else (None, None, 0.0)
    )
    attend_new_tokens[(kv_heads, rows, splits)](
        qkv_TO, out_THE, cache.kv, plan.block_table_RW, plan.context_lens_R, slots_T, rule.sinks_H,
        torch.empty(partials * padded, dtype=torch.float32, device=device),
        torch.empty(partials * 2, dtype=torch.float32, device=device),
        arrival_counters(device),
        qkv_TO.stride(0), plan.block_table_RW.stride(0), *cache.kv.stride()[:4],
        score_scale(rule), cos_T1R, sin_T1R, q_weight_E, k_weight_E, eps,
        cos_T1R.stride(0), sin_T1R.stride(0),
        GROUP=group, WIDTH=width, BLOCK_SIZE=cache.kv.shape[1], WINDOW=rule.window,
        CHUNKED=rule.chunked, SOFT_CAP=rule.soft_cap * LOG2_E.value,
        BLOCK_M=queries, BLOCK_N=config.tokens, BLOCK_E=padded, AT_ONCE=MERGED_AT_ONCE,
        num_warps=config.warps, num_stages=1, **launch_options(device),
    )  # fmt: skip
    return out_THE


def _splits(plan: AttentionPlan, window: int, pairs: int, config: _Config, device: torch.device) -> int:
    """Most splits of each (row, key/value head)."""
    seen = min(window or plan.max_context_len, plan.max_context_len)
    wanted = config.programs * num_sms(device) // pairs
    return max(1, min(wanted, triton.cdiv(seen, config.tokens)))
