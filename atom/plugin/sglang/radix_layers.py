"""SGLang's RadixAttention as the caches of ATOM's layers, and the forward context of a step.

A layer with keys and values calls RadixAttention, which calls the server's attention backend:

    ATOM_ROPE_FUSED_QKNORM=0    norms and RoPE; the backend writes keys and values       save_kv_cache=True
    ATOM_ROPE_FUSED_QKNORM=1    one op for norms, RoPE and the write; the backend reads  save_kv_cache=False

Layers with latents read ATOM's plan of the step and SGLang's pool themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import Tensor, nn

from atom.plugin.hosted_attention import HostedBackend, self_attentions, use_backend
from atom.plugin.sglang.attention_backend import AtomAttentionBackend
from atom.plugin.sglang.host_config import uses_own_attention
from atom.plugin.sglang.kv_pool import kv_layer, latent_layer
from atom.shared.utils import envs
from atom_ops import (
    AttentionRule,
    HeadNorms,
    empty_attention,
    rotate_and_write_kv,
    rotated_heads,
)
from workers.layers.attention.attention import KVGroup
from workers.layers.attention.cache_groups import LatentGroup
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext, GroupContext

NAME = "sglang"


@dataclass(frozen=True, slots=True)
class StepLayer:
    """A layer of SGLang in one step: what its attention needs."""

    radix: RadixAttention
    batch: Any
    """SGLang's ForwardBatch."""
    cache: Any
    """The keys and values that the layer writes itself; None: the backend writes them."""


class RadixBackend(HostedBackend):
    """Hands queries, keys and values to the layer of SGLang that is its cache."""

    name = NAME
    needs = "SGLang"

    def attend(
        self,
        qkv_TO: Tensor,
        cos_T1R: Tensor,
        sin_T1R: Tensor,
        cache: StepLayer,
        slots_T: Tensor,
        norms: HeadNorms | None,
        plan: Any,
        rule: AttentionRule,
    ) -> Tensor:
        """Attention [T, H, E]; the plan is SGLang's, which its backend finds itself."""
        radix = cache.radix
        more: dict[str, Any] = {} if rule.sinks_H is None else {"sinks": rule.sinks_H}
        if rule.chunked:  # only ATOM's attention is asked
            more["chunked"] = True
        if cache.cache is None:
            heads = rotated_heads(qkv_TO, cos_T1R, sin_T1R, radix.tp_k_head_num, radix.head_dim, norms)
            q_TQ, k_TK, v_TK = (each.flatten(1).contiguous() for each in heads)
            out_TO = radix(q_TQ, k_TK, v_TK, cache.batch, save_kv_cache=True, **more)
        else:
            q_THE = rotate_and_write_kv(qkv_TO, cos_T1R, sin_T1R, cache.cache, slots_T, norms)
            out_TO = radix(q_THE.flatten(1), None, None, cache.batch, save_kv_cache=False, **more)
        out_THE: Tensor = out_TO.view(-1, radix.tp_q_head_num, radix.head_dim)
        return out_THE


def use_radix_attention() -> str:
    """Register the backend, once for a process; returns its name, for `backend.resolve`."""
    return use_backend(RadixBackend())


class RadixLayers:
    """Makes SGLang's attention layers of a model, and the forward context of its steps."""

    def __init__(self, model: CausalLM, heads: int, device: torch.device):
        """`heads`: this rank's query heads. Raises ValueError for attention that the server does not run."""
        self._own = uses_own_attention()
        self._fused = envs.ATOM_ROPE_FUSED_QKNORM
        if self._fused and not self._own:
            raise ValueError(
                "ATOM_ROPE_FUSED_QKNORM=1 needs --attention-backend atom, whose cache the op writes"
            )
        self._groups = model.kv_groups
        self._empty = empty_attention(device)
        modules = self_attentions(model)
        if not self._own:
            _check_host_attention(model, [module.attention.rule for module in modules.values()])
        made: dict[int, nn.Module] = {}
        for group in self._groups:
            if isinstance(group, KVGroup):
                rules = {layer: modules[layer].attention.rule for layer in group.layers}
                made |= {layer: _radix(group, rule, layer, heads) for layer, rule in rules.items()}
        self.layers = nn.ModuleDict({str(layer): made[layer] for layer in sorted(made)})

    def step(self, batch: Any) -> ForwardContext:
        """The context of the step of SGLang's `ForwardBatch`."""
        caches: dict[int, CacheLayer] = {}
        groups = []
        for group in self._groups:
            caches |= {layer: self._cache(group, layer, batch) for layer in group.layers}
            groups.append(self._group(group, batch))
        return ForwardContext([caches[layer] for layer in sorted(caches)], groups)

    def _cache(self, group: Any, layer: int, batch: Any) -> CacheLayer:
        if isinstance(group, LatentGroup):
            return latent_layer(_own_backend().token_to_kv_pool, layer, group.latent_width)
        radix = self.layers[str(layer)]
        return StepLayer(
            radix, batch, kv_layer(_own_backend().token_to_kv_pool, layer) if self._fused else None
        )

    def _group(self, group: Any, batch: Any) -> GroupContext:
        if self._own and isinstance(group, LatentGroup):
            return _own_backend().plans(windowed=False)
        if self._fused:
            windowed = bool(group.window)
            return GroupContext(_own_backend().plans(windowed).slots_T, self._empty)
        return GroupContext(batch.out_cache_loc, self._empty)


def _own_backend() -> AtomAttentionBackend:
    backend = get_attn_backend()
    assert isinstance(backend, AtomAttentionBackend), type(backend)
    return backend


def _check_host_attention(model: CausalLM, rules: Sequence[AttentionRule]) -> None:
    """Raise ValueError for attention that SGLang's own does not have, or not with each of its backends."""
    refused = {
        "latent attention": any(isinstance(group, LatentGroup) for group in model.kv_groups),
        "chunks of attention": any(rule.chunked for rule in rules),
        "a soft cap of the scores": any(rule.soft_cap for rule in rules),
    }
    if found := [what for what, given in refused.items() if given]:
        raise ValueError(f"ATOM's models with {', '.join(found)} need --attention-backend atom in SGLang")


def _radix(group: KVGroup, rule: AttentionRule, layer: int, heads: int) -> RadixAttention:
    return RadixAttention(
        heads,
        group.head_dim,
        rule.scale,
        num_kv_heads=group.kv_heads,
        layer_id=layer,
        logit_cap=rule.soft_cap,
        # SGLang counts the tokens before the current one.
        sliding_window_size=rule.window - 1 if rule.window else -1,
        prefix=f"model.layers.{layer}.self_attn.attn",
    )
