"""Attention over the paged KV cache. T tokens, O features of the fused projection."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from atom_ops import INTERLEAVED_KV, AttentionBackend, AttentionConfig, AttentionRule, HeadNorms
from atom_ops import attention_backend as choose_backend
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext, GroupContext


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
    chunked: bool = False
    """Queries see the tokens from the last multiple of `window` on, never more than the window holds."""
    backend: AttentionBackend = INTERLEAVED_KV
    """Owns the layout of these layers' caches."""

    def bound(
        self,
        heads: int,
        sinks: bool,
        build: BuildContext,
        soft_cap: bool = False,
        sees_ahead: bool = False,
    ) -> "KVGroup":
        """The group with the first backend that supports its layers, which have `heads` query heads."""
        config = AttentionConfig(
            device=build.device,
            dtype=build.dtype,
            kv_dtype=build.kv_dtype or build.dtype,
            block_size=build.block_size,
            heads=heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window=self.window,
            sinks=sinks,
            soft_cap=soft_cap,
            chunked=self.chunked,
            sees_ahead=sees_ahead,
        )
        return replace(self, backend=choose_backend(config))


def group_by_window(
    windows: Sequence[int | None],
    kv_heads: int,
    head_dim: int,
    separate: bool = False,
    chunked: bool = False,
) -> list[KVGroup]:
    """One group for each distinct window, in the order of their first layers; `separate`: one for each layer.

    `windows` has the sliding window of each layer; None or 0: full attention. `chunked`: see `KVGroup`.
    """
    by_layer = [window or 0 for window in windows]
    layers = range(len(by_layer))
    if separate:
        members = [([layer], by_layer[layer]) for layer in layers]
    else:
        members = [
            ([layer for layer in layers if by_layer[layer] == window], window)
            for window in dict.fromkeys(by_layer)
        ]
    return [
        KVGroup(own, kv_heads, head_dim, window, chunked=chunked and window > 0) for own, window in members
    ]


class Attention(nn.Module):
    """Paged attention over a fused QKV projection.

    Writes the step's keys and values to the KV cache, then attends over the cache. Requests and block
    tables are described by the context's attention plan alone.
    """

    def __init__(
        self, layer: int, groups: Sequence[KVGroup], scale: float | None = None, soft_cap: float = 0.0
    ):
        """`groups` are all KV groups of the model; one of them contains `layer`.

        `scale` is the softmax scale, by default 1 / sqrt(head_dim); `soft_cap` that of `AttentionRule`.
        """
        super().__init__()
        self.layer = layer
        self._group = next(number for number, group in enumerate(groups) if layer in group.layers)
        group = groups[self._group]
        scale = group.head_dim**-0.5 if scale is None else scale
        self._rule = AttentionRule(scale, group.window, soft_cap=soft_cap, chunked=group.chunked)
        self._plan = group.backend.plan
        self._attend = group.backend.attend

    @property
    def rule(self) -> AttentionRule:
        """The layer's attention parameters; a call adds the sinks that it is given."""
        return self._rule

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
        return ctx.mix(partial(self._attend_to_cache, norms, sinks_H), rotation, qkv_TO)

    def _attend_to_cache(
        self,
        norms: HeadNorms | None,
        sinks_H: torch.Tensor | None,
        ctx: ForwardContext,
        rotation: Rotation,
        qkv_TO: torch.Tensor,
    ) -> torch.Tensor:
        cache = ctx.kv_layers[self.layer]
        group = ctx.groups[self._group]
        assert isinstance(group, GroupContext)
        if sinks_H is not self._rule.sinks_H:
            self._rule = replace(self._rule, sinks_H=sinks_H)
        cos_T1R = rotation.cos_T1R
        sin_T1R = rotation.sin_T1R
        plan = group.plan.derived(self._plan)
        out_THE: torch.Tensor = self._attend(
            qkv_TO, cos_T1R, sin_T1R, cache, group.slots_T, norms, plan, self._rule
        )
        return out_THE.flatten(-2)
