"""Attention over the paged KV cache. T tokens, O features of the fused projection."""

from dataclasses import dataclass

import torch
from torch import nn

from atom_ops import HeadNorms, attend_projection
from workers.layers.context import ForwardContext
from workers.layers.rotary import Rotation


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table because they keep the same tokens, all in one shape."""

    layers: range
    kv_heads: int
    """On this rank."""
    head_dim: int


class Attention(nn.Module):
    """From a fused projection of queries, keys and values to what each token's heads attend to.

    Writes the step's keys and values to the cache, then reads each row's whole context from it.
    Knows neither rows nor blocks: those are in the context's plan.
    """

    def __init__(self, layer: int, head_dim: int, group: int = 0):
        super().__init__()
        self._layer = layer
        self._group = group
        self._scale = head_dim**-0.5

    def forward(
        self,
        qkv_TO: torch.Tensor,
        rotation: Rotation,
        ctx: ForwardContext,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """The heads' results side by side; `norms` apply to queries and keys before they turn."""
        cache, group = ctx.kv_layers[self._layer], ctx.groups[self._group]
        cos_T1R, sin_T1R = rotation.cos_T1R, rotation.sin_T1R
        out_THE = attend_projection(
            qkv_TO, cos_T1R, sin_T1R, cache, group.slots_T, norms, group.plan, self._scale
        )
        return out_THE.flatten(-2)
