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
    """Attention layers that share one block table: they cache the same tokens, in the same shape."""

    layers: Sequence[int]
    kv_heads: int
    """KV heads on this rank."""
    head_dim: int
    window: int = 0
    """Sliding window in tokens, the current token included; 0: full attention.

    Blocks that have left the window are freed."""


def group_by_window(windows: Sequence[int | None], kv_heads: int, head_dim: int) -> list[KVGroup]:
    """One group for each distinct window, in the order of their first layers.

    `windows` has the sliding window of each layer; None or 0: full attention.
    """
    by_layer = [window or 0 for window in windows]
    return [
        KVGroup([layer for layer, own in enumerate(by_layer) if own == window], kv_heads, head_dim, window)
        for window in dict.fromkeys(by_layer)
    ]


class Attention(nn.Module):
    """Paged attention over a fused QKV projection.

    Writes the step's keys and values to the KV cache, then attends over the cache. Requests and block
    tables are described by the context's attention plan alone.
    """

    def __init__(self, layer: int, groups: Sequence[KVGroup]):
        """`groups` are all KV groups of the model; one of them contains `layer`."""
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
        """The attention output [T, H * E], heads side by side.

        `norms` apply to queries and keys before RoPE; `sinks_H` are the attention-sink logits of this
        rank's query heads.
        """
        cache, group = ctx.kv_layers[self._layer], ctx.groups[self._group]
        assert isinstance(cache, KVLayer) and isinstance(group, GroupContext)
        cos_T1R, sin_T1R = rotation.cos_T1R, rotation.sin_T1R
        rule = AttentionRule(self._scale, self._window, sinks_H)
        out_THE = attend_projection(qkv_TO, cos_T1R, sin_T1R, cache, group.slots_T, norms, group.plan, rule)
        return out_THE.flatten(-2)
