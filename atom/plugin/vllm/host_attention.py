"""Attention by vLLM's own layers: norms and RoPE by ATOM's ops, cache and attention by vLLM's.

A layer's cache is vLLM's `Attention` module, which finds the step's metadata and its cache itself.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention

from atom.plugin.hosted_attention import HostedBackend, self_attentions, use_backend
from atom.plugin.vllm.host_config import layer_name
from atom_ops import (
    AttentionRule,
    HeadNorms,
    empty_attention,
    rotated_heads,
)
from workers.layers.attention.attention import KVGroup
from workers.layers.causal_lm import CausalLM
from workers.layers.context import ForwardContext, GroupContext

NAME = "vllm"


class HostAttentionBackend(HostedBackend):
    """Hands queries, keys and values to the layer of vLLM that is its cache."""

    name = NAME
    needs = "vLLM"

    def attend(
        self,
        qkv_TO: Tensor,
        cos_T1R: Tensor,
        sin_T1R: Tensor,
        cache: Any,
        slots_T: Tensor,
        norms: HeadNorms | None,
        plan: Any,
        rule: AttentionRule,
    ) -> Tensor:
        """Attention [T, H, E]; the slots and the plan are vLLM's, which `cache` finds itself."""
        heads = rotated_heads(qkv_TO, cos_T1R, sin_T1R, cache.num_kv_heads, cache.head_size, norms)
        out_TO: Tensor = cache(*(head.flatten(1).contiguous() for head in heads))
        return out_TO.view(-1, cache.num_heads, cache.head_size)


def use_host_attention() -> str:
    """Register the backend, once for a process; returns its name, for `backend.resolve`."""
    return use_backend(HostAttentionBackend())


class HostAttentionContext:
    """Makes vLLM's attention layers of a model, and the forward context of its steps."""

    def __init__(self, model: CausalLM, vllm_config: Any, device: torch.device):
        self._layers = _attention_layers(model, vllm_config)
        nothing = GroupContext(torch.empty(0, dtype=torch.int64, device=device), empty_attention(device))
        self._groups = [nothing] * len(model.kv_groups)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """vLLM's layers, which have to be part of the module tree that it sees."""
        return self._layers

    def step(self, tokens: int) -> ForwardContext:
        """The context of the current step of `tokens` tokens, padding included."""
        return ForwardContext(self._layers, self._groups)


def _attention_layers(model: CausalLM, vllm_config: Any) -> list[Attention]:
    # Its window would apply to all layers; each layer states its own.
    cache_config = copy.copy(vllm_config.cache_config)
    cache_config.sliding_window = None
    heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    modules = self_attentions(model)
    made = {}
    for group in model.kv_groups:
        assert isinstance(group, KVGroup), "other families are not registered with vLLM's attention"
        for layer in group.layers:
            rule = replace(modules[layer].attention.rule, sinks_H=modules[layer].sinks)
            made[layer] = _attention_layer(group, rule, heads, cache_config, layer_name(layer))
    return [made[layer] for layer in sorted(made)]


def _attention_layer(
    group: KVGroup, rule: AttentionRule, heads: int, cache_config: Any, name: str
) -> Attention:
    """vLLM's layer for one of the group's, with `heads` query heads."""
    common: dict[str, Any] = {
        "num_heads": heads,
        "head_size": group.head_dim,
        "scale": rule.scale,
        "num_kv_heads": group.kv_heads,
        "cache_config": cache_config,
        "prefix": name,
    }
    if rule.chunked:
        return ChunkedLocalAttention(**common, attention_chunk_size=rule.window)
    return Attention(
        **common,
        logits_soft_cap=rule.soft_cap or None,
        per_layer_sliding_window=rule.window or None,
        **({} if rule.sinks_H is None else {"sinks": rule.sinks_H}),
    )
