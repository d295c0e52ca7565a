"""What attention backends that call a host engine's own layers have in common: the host has the caches."""

from typing import Any

import torch

from atom_ops import AttentionBackend, AttentionConfig, AttentionPlan, register_attention_backend
from atom_ops.attention_backend import ATTENTION_BACKENDS
from workers.layers.attention.self_attention import SelfAttention
from workers.layers.causal_lm import CausalLM

__all__ = ["HostedBackend", "self_attentions", "use_backend"]


class HostedBackend(AttentionBackend):
    """Hands queries, keys and values to a layer of the host, which is the cache; subclasses have `attend`.

    `needs` is the host's name.
    """

    def supported(self, device: torch.device) -> bool:
        return True

    def supports(self, config: AttentionConfig) -> bool:
        return True

    def bytes_per_block(self, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        raise NotImplementedError(f"{self.needs} sizes the caches of its attention layers")

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        raise NotImplementedError(f"{self.needs} allocates the caches of its attention layers")

    def plan(self, plan: AttentionPlan) -> AttentionPlan:
        return plan


def use_backend(backend: AttentionBackend) -> str:
    """Register the backend, once for a process; returns its name, for `backend.resolve`."""
    if backend.name not in ATTENTION_BACKENDS:
        register_attention_backend(backend)
    return backend.name


def self_attentions(model: CausalLM) -> dict[int, SelfAttention]:
    """The modules that attend over keys and values, by the number of their layer."""
    found = (module for module in model.modules() if isinstance(module, SelfAttention))
    return {module.attention.layer: module for module in found}
