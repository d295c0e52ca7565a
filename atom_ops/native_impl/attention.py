"""Paged attention, which reads keys and values where they are; torch's would need a copy of them."""

import torch
from torch import Tensor

from atom_ops.native_impl import NEEDS, call, runs_on, takes
from atom_ops.ops.attention.attention import AttentionRule, paged_attention
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.kv_cache import KVLayer

_WIDTHS = (16, 64, 80, 128, 256)
"""Features of a head for which the kernel is compiled."""


def _supports(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule) -> bool:
    sinks = () if rule.sinks_H is None else (rule.sinks_H,)
    return (
        not plan.split_tokens
        and cache.scale is None
        and takes(cache.kv, *sinks)
        and q_THE.dtype == cache.kv.dtype
        and q_THE.shape[2] in _WIDTHS
        and q_THE.stride(1) == q_THE.shape[2]
        and q_THE.stride(2) == plan.block_table_RW.stride(1) == 1
    )


@paged_attention.provider("native", needs=NEEDS, supported=runs_on, supports=_supports)
def _paged_attention(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule) -> Tensor:
    _, block_size, _, kv_heads, width = cache.kv.shape
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    call(
        "attend", q_THE.dtype, q_THE, q_THE.stride(0), cache.kv, plan.block_table_RW,
        plan.block_table_RW.stride(0), plan.context_lens_R, plan.query_starts_R1, plan.ahead_T, rule.sinks_H,
        out_THE, len(plan.context_lens_R), *q_THE.shape[:2], kv_heads, width, block_size, rule.window,
        rule.chunked, rule.scale, rule.soft_cap,
    )  # fmt: skip
    return out_THE
