"""Attention over the paged KV cache. T tokens, H query heads, K KV heads, E head features."""

from dataclasses import dataclass

import torch
from torch import nn

from atom_ops import paged_attention, write_kv
from workers.layers.context import ForwardContext


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table because they keep the same tokens, all in one shape."""

    layers: range
    heads: int
    """Query heads on this rank."""
    kv_heads: int
    """On this rank."""
    head_dim: int


class Attention(nn.Module):
    """Writes the step's keys and values to the cache, then attends to each row's context.

    Knows neither rows nor blocks: those are in the context's plan.
    """

    def __init__(self, layer: int, head_dim: int, group: int = 0):
        super().__init__()
        self._layer = layer
        self._group = group
        self._scale = head_dim**-0.5

    def forward(
        self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        cache, group = ctx.kv_layers[self._layer], ctx.groups[self._group]
        write_kv(k_TKE, v_TKE, cache, group.slots_T)
        return paged_attention(q_THE, cache, group.plan, self._scale)
