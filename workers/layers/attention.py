"""Attention over the paged KV cache. T tokens, O features of the fused projection."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atom_ops import AttentionRule, HeadNorms, KVLayer, attend_projection
from workers.layers.context import ForwardContext, GroupContext
from workers.layers.rotary import Rotation


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table because they keep the same tokens, all in one shape."""

    layers: Sequence[int]
    kv_heads: int
    """On this rank."""
    head_dim: int
    window: int = 0
    """How many tokens one token of these layers sees, itself the last of them; 0: all up to itself.

    Blocks that no window reaches any more are handed to others."""


def group_by_window(windows: Sequence[int | None], kv_heads: int, head_dim: int) -> list[KVGroup]:
    """The groups of layers that differ in nothing but `windows`, the window of each layer (None or 0: none).

    In the order of their first layers.
    """
    of_layer = [window or 0 for window in windows]
    return [
        KVGroup([layer for layer, own in enumerate(of_layer) if own == window], kv_heads, head_dim, window)
        for window in dict.fromkeys(of_layer)
    ]


class Attention(nn.Module):
    """From a fused projection of queries, keys and values to what each token's heads attend to.

    Writes the step's keys and values to the cache, then reads from it what each row's tokens see.
    Knows neither rows nor blocks: those are in the context's plan.
    """

    def __init__(self, layer: int, groups: Sequence[KVGroup]):
        """`groups` are all of the model's; one of them has the layer."""
        super().__init__()
        self._layer = layer
        self._group = next(number for number, group in enumerate(groups) if layer in group.layers)
        self._scale = groups[self._group].head_dim ** -0.5
        self._window = groups[self._group].window

    def forward(
        self,
        qkv_TO: torch.Tensor,
        rotation: Rotation,
        ctx: ForwardContext,
        norms: HeadNorms | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The heads' results side by side.

        `norms` apply to queries and keys before they turn; `sinks_H` are the scores that this
        rank's query heads give to nothing.
        """
        cache, group = ctx.kv_layers[self._layer], ctx.groups[self._group]
        assert isinstance(cache, KVLayer) and isinstance(group, GroupContext)
        cos_T1R, sin_T1R = rotation.cos_T1R, rotation.sin_T1R
        rule = AttentionRule(self._scale, self._window, sinks_H)
        out_THE = attend_projection(qkv_TO, cos_T1R, sin_T1R, cache, group.slots_T, norms, group.plan, rule)
        return out_THE.flatten(-2)
