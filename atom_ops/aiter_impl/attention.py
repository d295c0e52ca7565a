"""Paged attention: whole prompts by flash attention, all other steps by the unified kernel.

key, value   [num_blocks, block_size, K, E]   AITER's "flash" layout, in the compute dtype
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.aiter_impl import NEEDS, runs_on, takes_dtype
from atom_ops.attention_backend import AttentionBackend, AttentionConfig, register_attention_backend
from atom_ops.ops.attention.attention import AttentionRule
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.kv_cache import zeros
from atom_ops.ops.attention.qkv import HeadNorms, rotated_heads
from atom_ops.ops.elementwise.norm import rms_norm

_WIDEST_HEAD = 256

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [T, H, E], keys and values [T, K, E]."""


@dataclass(frozen=True, slots=True)
class FlashCache:
    """One layer's keys and values, apart."""

    key: Tensor
    value: Tensor
    one: Tensor
    """float32 [1]: the scale that AITER's writer wants for a cache that is not quantized, too."""


class AiterAttention(AttentionBackend):
    """Layers with a cache in the compute dtype, with or without sliding window and sinks.

    Layers with capped scores or chunked windows, and those whose queries may see tokens after their own, run
    by the other kernels of the device.
    """

    name = "aiter"
    needs = NEEDS

    def supported(self, device: torch.device) -> bool:
        return runs_on(device)

    def supports(self, config: AttentionConfig) -> bool:
        return (
            takes_dtype(config.dtype)
            and config.kv_dtype == config.dtype
            and not config.soft_cap
            and not config.chunked
            and not config.sees_ahead
            and config.block_size.bit_count() == 1
            and config.head_dim % 8 == 0
            and config.head_dim <= _WIDEST_HEAD
        )

    def bytes_per_block(self, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * block_size * kv_heads * head_dim * dtype.itemsize

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FlashCache:
        shape = (num_blocks, block_size, kv_heads, head_dim)
        one = torch.ones(1, dtype=torch.float32, device=device)
        return FlashCache(zeros(shape, dtype, device), zeros(shape, dtype, device), one)

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        return plan

    def attend(
        self,
        qkv_TO: Tensor,
        cos_T1R: Tensor,
        sin_T1R: Tensor,
        cache: FlashCache,
        slots_T: Tensor,
        norms: HeadNorms | None,
        plan: AttentionPlan,
        rule: AttentionRule,
    ) -> Tensor:
        if _takes_fused(cos_T1R, sin_T1R, cache):
            positions_T = plan.derived(_tokens_in_order)
            heads = _rotate_and_write(qkv_TO, cos_T1R, sin_T1R, cache, slots_T, norms, positions_T)
        else:
            kv_heads, head_dim = cache.key.shape[2:]
            heads = rotated_heads(qkv_TO, cos_T1R, sin_T1R, kv_heads, head_dim, norms)
            heads = _written(heads, cache, slots_T)
        q_THE, k_TKE, v_TKE = heads
        plain = not rule.window and rule.sinks_H is None
        if plain and plan.whole_prompts and not plan.has_padding_tokens:
            return _attend_prompts(q_THE, k_TKE, v_TKE, plan, rule)
        return _attend_cache(q_THE, cache, plan, rule)


def _written(heads: Heads, cache: FlashCache, slots_T: Tensor) -> Heads:
    """The heads as contiguous tensors; keys and values are written to the cache."""
    import aiter

    q_THE, k_TKE, v_TKE = (each.contiguous() for each in heads)
    aiter.reshape_and_cache_flash(
        key=k_TKE,
        value=v_TKE,
        key_cache=cache.key,
        value_cache=cache.value,
        slot_mapping=slots_T,
        kv_cache_dtype="auto",
        k_scale=cache.one,
        v_scale=cache.one,
    )
    return q_THE, k_TKE, v_TKE


def _takes_fused(cos_T1R: Tensor, sin_T1R: Tensor, cache: FlashCache) -> bool:
    """Whether one kernel can apply RoPE and write the cache: RoPE on whole heads of a power of two."""
    head_dim = cache.key.shape[3]
    return (
        cache.key.dtype != torch.float16
        and cos_T1R.shape[2] == head_dim
        and head_dim.bit_count() == 1
        and cos_T1R.stride() == sin_T1R.stride()
    )


def _tokens_in_order(plan: AttentionPlan) -> Tensor:
    """The rows of cosines and sines: one of each token, not of each position."""
    return torch.arange(plan.num_tokens, device=plan.context_lens_R.device)


def _rotate_and_write(
    qkv_TO: Tensor,
    cos_T1R: Tensor,
    sin_T1R: Tensor,
    cache: FlashCache,
    slots_T: Tensor,
    norms: HeadNorms | None,
    positions_T: Tensor,
) -> Heads:
    """As `rotated_heads`, and keys and values are written; padding tokens have undefined keys."""
    from aiter.ops.triton.fused_kv_cache import fused_qk_rope_reshape_and_cache

    kv_heads, head_dim = cache.key.shape[2:]
    heads_TNE = qkv_TO.unflatten(1, (-1, head_dim))
    q_THE, k_TKE, v_TKE = heads_TNE.split([heads_TNE.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q_THE = rms_norm(q_THE, norms.q_weight_E, norms.eps)
        k_TKE = rms_norm(k_TKE, norms.k_weight_E, norms.eps)
    half = head_dim // 2
    q_THE, k_TKE, *_ = fused_qk_rope_reshape_and_cache(
        q=q_THE,
        k=k_TKE,
        v=v_TKE,
        key_cache=cache.key,
        value_cache=cache.value,
        slot_mapping=slots_T,
        pos=positions_T,
        # Ours are repeated, the first sine of a pair negated.
        cos=cos_T1R[:, 0, :half],
        sin=sin_T1R[:, 0, half:],
        k_scale=cache.one,
        v_scale=cache.one,
        is_neox=True,
        flash_layout=True,
        apply_scale=False,
        output_zeros=False,
    )
    return q_THE, k_TKE, v_TKE


def _attend_prompts(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, plan: AttentionPlan, rule: AttentionRule
) -> Tensor:
    """Every row's context is its new tokens: nothing is read from the cache."""
    import aiter

    out_THE: Tensor = aiter.flash_attn_varlen_func(
        q=q_THE,
        k=k_TKE,
        v=v_TKE.contiguous(),
        cu_seqlens_q=plan.query_starts_R1,
        cu_seqlens_k=plan.query_starts_R1,
        max_seqlen_q=plan.max_query_len,
        max_seqlen_k=plan.max_query_len,
        softmax_scale=rule.scale,
        causal=True,
    )
    return out_THE


def _attend_cache(q_THE: Tensor, cache: FlashCache, plan: AttentionPlan, rule: AttentionRule) -> Tensor:
    from aiter.ops.triton.unified_attention import unified_attention

    # Zeros: the kernel does not write the results of padding tokens.
    out_THE = torch.zeros_like(q_THE)
    unified_attention(
        q=q_THE,
        k=cache.key,
        v=cache.value,
        out=out_THE,
        cu_seqlens_q=plan.query_starts_R1,
        max_seqlen_q=plan.max_query_len,
        seqused_k=plan.context_lens_R,
        max_seqlen_k=plan.max_context_len,
        softmax_scale=rule.scale,
        causal=True,
        window_size=(rule.window - 1, 0) if rule.window else (-1, -1),
        block_table=plan.block_table_RW,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        sinks=rule.sinks_H,
    )
    return out_THE


register_attention_backend(AiterAttention())
