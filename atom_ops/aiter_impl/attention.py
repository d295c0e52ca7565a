"""Paged attention: whole prompts by flash attention, all other steps by the unified kernel.

key, value   [num_blocks, block_size, K, E]   AITER's "flash" layout, in the compute dtype
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.aiter_impl import NEEDS, runs_on, takes_dtype
from atom_ops.attention_backend import AttentionBackend, AttentionConfig, register_attention_backend
from atom_ops.ops.attention import AttentionRule
from atom_ops.ops.attention_plan import AttentionPlan
from atom_ops.ops.kv_cache import zeros
from atom_ops.ops.qkv import HeadNorms, rotated_heads

_WIDEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class FlashCache:
    """One layer's keys and values, apart."""

    key: Tensor
    value: Tensor
    one: Tensor
    """float32 [1]: the scale that AITER's writer wants for a cache that is not quantized, too."""


class AiterAttention(AttentionBackend):
    """Layers with a cache in the compute dtype, with or without sliding window and sinks."""

    name = "aiter"
    needs = NEEDS

    def supported(self, device: torch.device) -> bool:
        return runs_on(device)

    def supports(self, config: AttentionConfig) -> bool:
        return (
            takes_dtype(config.dtype)
            and config.kv_dtype == config.dtype
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
        import aiter

        kv_heads, head_dim = cache.key.shape[2:]
        heads = rotated_heads(qkv_TO, cos_T1R, sin_T1R, kv_heads, head_dim, norms)
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
        plain = not rule.window and rule.sinks_H is None
        if plain and plan.whole_prompts and not plan.has_padding_tokens:
            return _attend_prompts(q_THE, k_TKE, v_TKE, plan, rule)
        return _attend_cache(q_THE, cache, plan, rule)


def _attend_prompts(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, plan: AttentionPlan, rule: AttentionRule
) -> Tensor:
    """Every row's context is its new tokens: nothing is read from the cache."""
    import aiter

    out_THE: Tensor = aiter.flash_attn_varlen_func(
        q=q_THE,
        k=k_TKE,
        v=v_TKE,
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
