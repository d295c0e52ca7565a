"""Decode attention directly from the QKV projection.

The decode kernel of `attention_kernels`, which starts with the functions of `new_token`.
"""

import torch
from torch import Tensor

from atom_ops.ops.attention import AttentionRule
from atom_ops.ops.attention_plan import AttentionPlan
from atom_ops.ops.fused_attention import attend_projection
from atom_ops.ops.kv_cache import KVLayer
from atom_ops.ops.qkv import HeadNorms
from atom_ops.triton_impl import INTERPRETED, NEEDS, runs_on
from atom_ops.triton_impl.attention import decode_config, launch_decode, supports

# Rows times key/value heads between which one kernel is used instead of two. On an H200 it takes 15.2 us for
# 512 pairs with contexts of 110 tokens, and two take about 11; 12.9 us for 256 pairs, two an estimated 8.
_MIN_PAIRS, _MAX_PAIRS = 16, 128


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
    """Rows of single tokens, without batch invariance, and a cache of the compute dtype."""
    pairs = len(plan.context_lens_R) * cache.kv.shape[3]
    return (
        plan.max_query_len == 1
        and (INTERPRETED or _MIN_PAIRS <= pairs <= _MAX_PAIRS)
        and not plan.split_tokens
        and cache.scale is None
        and cache.kv.is_contiguous()
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
    q_THE = _queries(qkv_TO, cache)
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    config, tile = decode_config(q_THE, cache, plan, rule, projection=True)
    q_weight_E, k_weight_E, eps = (
        (norms.q_weight_E, norms.k_weight_E, norms.eps) if norms is not None else (None, None, 0.0)
    )
    strides = cos_T1R.stride(0), sin_T1R.stride(0)
    token = (cos_T1R, sin_T1R, slots_T, q_weight_E, k_weight_E, eps, *strides)
    launch_decode(out_THE, q_THE, cache, plan, rule, config, tile, token)
    return out_THE
