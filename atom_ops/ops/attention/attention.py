"""Attention of new tokens to their requests' paged contexts.

N items, L queries and C context tokens of an item, M tiles: see `attention_plan`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.attention.attention_plan import AttentionPlan, WorkItems, plan_attention
from atom_ops.ops.attention.kv_cache import FP8, KVLayer, make_kv_layer, read_kv, write_kv
from atom_ops.tolerances import REDUCTION

__all__ = ["AttentionPlan", "AttentionRule", "masked_attention", "paged_attention", "plan_attention"]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """A layer's attention parameters, the same in every step."""

    scale: float
    """Softmax scale: factor of q kᵀ."""
    window: int = 0
    """Sliding window: tokens that a query sees, itself included; 0: no window."""
    sinks_H: Tensor | None = None
    """Attention sinks: an extra score for each query head, not scaled, in the softmax's denominator."""
    soft_cap: float = 0.0
    """Scores s become soft_cap * tanh(s / soft_cap), before the mask; 0: they stay as they are."""
    chunked: bool = False
    """The window does not slide: a query sees the tokens from the last multiple of `window` on."""


def _masked_case(heads: int, kv_heads: int, queries: int, mask_queries: int, soft_cap: float = 0.0) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float]:
        q = torch.randn(3, heads, queries, 32, generator=generator).to(dtype)
        k, v = torch.randn(2, 3, kv_heads, 40, 32, generator=generator).to(dtype)
        hidden = torch.rand(3, 1, mask_queries, 40, generator=generator) < 0.4
        hidden[1] = True
        mask = torch.zeros(hidden.shape, dtype=dtype)
        return q, k, v, mask.masked_fill_(hidden, torch.finfo(dtype).min / 2), 0.2, soft_cap

    return Case(f"{heads}/{kv_heads}x{queries}{f'-cap{soft_cap:g}' if soft_cap else ''}", make)


@op(
    [
        _masked_case(9, 3, 5, 5),
        _masked_case(4, 4, 1, 1),
        _masked_case(2, 2, 3, 1),
        _masked_case(9, 3, 5, 5, soft_cap=1.5),
    ],
    REDUCTION,
)
def masked_attention(
    q_NHLE: Tensor, k_NKCE: Tensor, v_NKCE: Tensor, mask_N1LC: Tensor, scale: float, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """softmax(capped(scale * q kᵀ) + mask) v, and the log-sum-exp of those scores, [N, H, L] float32.

    Query head h reads key/value head h // (H / K). The mask is finite and of q's dtype; its L
    may be 1. Only the last dimension of each tensor must be contiguous. See `AttentionRule.soft_cap`.
    """
    kv_heads = k_NKCE.shape[1]
    q_NKGLE = q_NHLE.unflatten(1, (kv_heads, -1))
    scores = torch.matmul(q_NKGLE, k_NKCE.unsqueeze(2).mT).float() * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores + mask_N1LC.unsqueeze(2)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).to(v_NKCE.dtype)
    return torch.matmul(weights, v_NKCE.unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)


@masked_attention.provider(
    "sdpa_cpu",
    needs="a CPU",
    supported=lambda device: device.type == "cpu",
    supports=lambda q_NHLE, k_NKCE, v_NKCE, mask_N1LC, scale, soft_cap: not soft_cap,
    batch_invariant=False,
)
def _sdpa_cpu(
    q_NHLE: Tensor, k_NKCE: Tensor, v_NKCE: Tensor, mask_N1LC: Tensor, scale: float, soft_cap: float
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_NHLE, k_NKCE, v_NKCE, attn_mask=mask_N1LC, scale=scale
    )
    return out, lse


def _paged_case(
    query_lens: list[int],
    context_lens: list[int],
    heads: tuple[int, int] = (9, 3),
    width: int = 32,
    fp8: bool = False,
    window: int = 0,
    sinks: bool = False,
    decode_query_len: int = 1,
    soft_cap: float = 0.0,
    chunked: bool = False,
    images: Sequence[tuple[int, int]] = (),
) -> Case:
    """`heads` are query heads and key/value heads; `images` are runs of the step's tokens, (first, end)."""

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, KVLayer, AttentionPlan, AttentionRule]:
        block_size = 16
        per_row = -(-max(context_lens) // 16)
        blocks = torch.randperm(len(context_lens) * per_row + 3, generator=generator)
        table = blocks[: len(context_lens) * per_row].view(-1, per_row)
        device = torch.device("cpu")
        cache = make_kv_layer(len(blocks), block_size, heads[1], width, FP8 if fp8 else dtype, device)
        k, v = torch.randn(2, len(blocks) * block_size, heads[1], width, generator=generator).to(dtype)
        write_kv(k, v, cache, torch.arange(len(k)))
        q = torch.randn(sum(query_lens), heads[0], width, generator=generator).to(dtype)
        lens = np.array([query_lens, context_lens], np.int32)
        host_table = table.numpy().astype(np.int32)
        sinks_H = torch.randn(heads[0], generator=generator).to(dtype) if sinks else None
        rule = AttentionRule(width**-0.5, window, sinks_H, soft_cap, chunked)
        ahead = np.zeros(sum(query_lens), np.int32)
        for first, end in images:
            ahead[first:end] = np.arange(end - first)[::-1]
        plan = plan_attention(
            lens[0], lens[1], host_table, device, 0, decode_query_len, ahead if images else None
        )
        return q, cache, plan, rule

    kind = "chunks" if chunked else "window"
    more = f"{f'-{kind}{window}' if window else ''}{'-sinks' if sinks else ''}{'-fp8' if fp8 else ''}"
    more += f"-cap{soft_cap:g}" if soft_cap else ""
    more += f"-decodes{decode_query_len}" if decode_query_len > 1 else ""
    more += f"-images{list(images)}" if images else ""
    label = f"{heads[0]}/{heads[1]}x{width}-{query_lens}of{context_lens}{more}"
    return Case(label.replace(" ", ""), make)


@op(
    [
        _paged_case([1, 1, 1], [1, 40, 700]),
        _paged_case([37], [37]),
        _paged_case([1, 20, 1, 5], [33, 300, 2, 5]),
        _paged_case([1, 70, 1], [200, 90, 17], (16, 8), 128),
        _paged_case([1, 3, 40], [130, 65, 40], (32, 8), 80),
        _paged_case([1, 9], [64, 30], fp8=True),
        _paged_case([1, 20, 1, 5], [33, 300, 700, 5], window=24),
        _paged_case([1, 70, 1], [200, 190, 17], (16, 2), 64, window=128, sinks=True),
        _paged_case([1, 40], [300, 40], sinks=True),
        _paged_case([1, 9], [64, 30], window=7, sinks=True, fp8=True),
        _paged_case([4, 4, 4], [4, 40, 700], (16, 2), 64, decode_query_len=4),
        _paged_case([5, 30, 1, 5], [300, 30, 70, 5], (16, 2), 64, window=24, sinks=True, decode_query_len=5),
        _paged_case([7, 7], [90, 7], (24, 2), 32, decode_query_len=7),
        _paged_case([1, 70, 1], [700, 190, 17], (16, 2), 64, soft_cap=1.5),
        _paged_case([1, 20, 1, 5], [33, 300, 700, 5], (8, 4), 256, window=24, soft_cap=1.5),
        _paged_case([1, 9], [64, 30], soft_cap=1.5, fp8=True),
        _paged_case([1, 70, 1, 1], [200, 190, 17, 193], (16, 2), 64, window=64, chunked=True),
        _paged_case([1, 9, 1], [64, 30, 300], window=96, chunked=True, fp8=True),
        _paged_case([4, 4, 4], [4, 40, 700], (16, 2), 64, window=30, chunked=True, decode_query_len=4),
        _paged_case([1, 70, 1, 5], [200, 90, 17, 65], images=[(4, 20), (21, 60), (73, 77)]),
        _paged_case([150, 1, 33], [170, 17, 33], (8, 4), 256, window=24, images=[(0, 140), (152, 180)]),
        _paged_case([1, 9], [64, 30], window=12, fp8=True, images=[(2, 9)]),
        _paged_case(
            [5, 5, 2], [40, 700, 2], (8, 2), 64, window=24, decode_query_len=5, images=[(0, 5), (5, 10)]
        ),
    ],
    REDUCTION,
)
def paged_attention(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule) -> Tensor:
    """Causal attention of every new token to its context in the paged cache, [T, H, E].

    With `plan.ahead_T` queries also see some tokens after their own. Query head h reads key/value head
    h // (H / K). Block table entries that lie wholly before the windows of a row's new tokens are never read.
    """
    _, block_size, _, kv_heads, _ = cache.kv.shape
    groups = plan.work_items(
        q_THE.shape[1], kv_heads, block_size, q_THE.dtype, rule.window, chunked=rule.chunked
    )
    return in_step_order(groups, lambda items: _attend(q_THE, cache, items, rule), q_THE)


def _attend(q_THE: Tensor, cache: KVLayer, items: WorkItems, rule: AttentionRule) -> Tensor:
    count, _, _, chunk = items.mask_N1LC.shape
    kv_heads, width = cache.kv.shape[3:]
    kv = read_kv(cache, items.slots, q_THE.dtype).view(count, chunk, 2, kv_heads, width)
    k_NKCE, v_NKCE = kv.permute(2, 0, 3, 1, 4)
    return attend_items(q_THE, k_NKCE, v_NKCE, items, rule)


def attend_items(
    q_THE: Tensor, k_NKCE: Tensor, v_NKCE: Tensor, items: WorkItems, rule: AttentionRule
) -> Tensor:
    """Attention of the group's queries to the items' keys and values.

    The result holds no padding, in the group's order.
    """
    out, lse = item_attention(q_THE, k_NKCE, v_NKCE, items, rule.scale, rule.soft_cap)
    if rule.sinks_H is not None:
        out = _apply_sinks(out, lse, rule.sinks_H)
    return without_padding(out, items)


def item_attention(
    q_THE: Tensor, k_NKCE: Tensor, v_NKCE: Tensor, items: WorkItems, scale: float, soft_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention of each tile to its items' keys and values, [M, L, H, E], and its log-sum-exp [M, L, H]."""
    count, _, length, _ = items.mask_N1LC.shape
    kv_heads = k_NKCE.shape[1]
    heads, width = q_THE.shape[1:]
    q = q_THE if items.queries is None else q_THE.index_select(0, items.queries)
    if length == 1:
        # Decodes: the query heads of a group become queries of their key/value head, for G times
        # fewer and larger GEMMs.
        q_NKGE = q.reshape(count, kv_heads, -1, width)
        out, lse = masked_attention(q_NKGE, k_NKCE, v_NKCE, items.mask_N1LC, scale, soft_cap)
        out = out.reshape(count, 1, heads, -1)
        lse = lse.reshape(count, 1, heads)
    else:
        q_NHLE = q.reshape(count, length, heads, width).transpose(1, 2)
        out, lse = masked_attention(q_NHLE, k_NKCE, v_NKCE, items.mask_N1LC, scale, soft_cap)
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return (out, lse) if items.tile_N is None else _merge(out, lse, items.tile_N, items.tiles)


def without_padding(found_ML: Tensor, items: WorkItems) -> Tensor:
    """The results of the tiles' queries, without padding, [queries, …]."""
    found = found_ML.flatten(0, 1)
    return found if items.filled is None else found.index_select(0, items.filled)


def in_step_order(
    groups: tuple[WorkItems, ...], attend: Callable[[WorkItems], Tensor], q_THE: Tensor
) -> Tensor:
    """The results [T, H, E] of `attend` on all groups, in the order of the step's tokens; 0 for padding."""
    found = [attend(items) for items in groups]
    if groups and groups[0].tokens is None:
        return found[0]
    out_T = torch.zeros_like(q_THE)
    for items, of_group in zip(groups, found, strict=True):
        assert items.tokens is not None
        out_T.index_copy_(0, items.tokens, of_group)
    return out_T


def _merge(out_NLHE: Tensor, lse_NLH: Tensor, tile_N: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Attention over whole contexts from attention over their chunks, [M, L, H, E], and its log-sum-exp."""
    owner = tile_N[:, None, None].expand_as(lse_NLH)
    lowest = lse_NLH.new_full((tiles, *lse_NLH.shape[1:]), -torch.inf)
    top_MLH = lowest.scatter_reduce_(0, owner, lse_NLH, "amax")
    weight_NLH = torch.exp(lse_NLH - top_MLH.index_select(0, tile_N))
    total_MLH = torch.zeros_like(top_MLH).index_add_(0, tile_N, weight_NLH)
    summed = total_MLH.new_zeros(tiles, *out_NLHE.shape[1:])
    summed.index_add_(0, tile_N, out_NLHE * weight_NLH[..., None])
    return summed.div_(total_MLH[..., None]).to(out_NLHE.dtype), top_MLH + total_MLH.log()


def _apply_sinks(out_MLHE: Tensor, lse_MLH: Tensor, sinks_H: Tensor) -> Tensor:
    """The results with the sinks in the softmax's denominator."""
    # exp(lse) / (exp(lse) + exp(sink))
    left_MLH = torch.sigmoid(lse_MLH - sinks_H.float())
    return (out_MLHE * left_MLH[..., None]).to(out_MLHE.dtype)
