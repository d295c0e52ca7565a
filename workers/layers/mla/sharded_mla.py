"""MLA with decode context parallelism: the ranks of a dcp group split the latent cache by tokens.

                  rank 0, heads 0-3               rank 1, heads 4-7
    cache         tokens 0, 2, 4, …               tokens 1, 3, 5, …
    queries       heads 0-7 (all-gather)          heads 0-7
    attention     to its tokens, with log-sum-exp
    exchange      heads 0-3 of both ranks         heads 4-7 of both ranks   (all-to-all)
    merged        heads 0-3                       heads 4-7

A step of whole prompts reads no cache: every rank has the latents of all its tokens, and expands them.

T tokens, H heads of this rank, G of the group, K features of a cache row, C of a latent.
"""

from collections.abc import Sequence

import torch

from atom_ops import (
    AttentionPlan,
    LatentLayer,
    keep_latents,
    latents_of_step,
    merge_partials,
    pack_partials,
    partial_latent_attention,
    unpack_partials,
)
from workers.layers.attention.cache_groups import CacheGroup
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext, GroupContext
from workers.layers.mla.mla import LatentArgs, LatentAttention

_MOST_GATHERED = 1 << 26
"""Numbers gathered at a time, but at least a head of each rank: bounds the memory of a prefill."""


class ShardedLatentAttention(LatentAttention):
    """Each rank caches its tokens of `LatentLayer.shard`, and attends to them for all heads of the group."""

    def __init__(self, args: LatentArgs, layer: int, groups: Sequence[CacheGroup], build: BuildContext):
        super().__init__(args, layer, groups, build)
        if args.num_heads % build.tp.size:
            raise ValueError(
                f"--decode-context-parallel-size {build.dcp.size} needs as many heads on every rank: "
                f"--tensor-parallel-size {build.tp.size} does not divide {args.num_heads} heads"
            )
        self._dcp = build.dcp

    def mix(self, ctx: ForwardContext, rotation: Rotation, latents_TN: torch.Tensor) -> torch.Tensor:
        cache, group = self.cache(ctx)
        if not group.plan.whole_prompts or group.plan.split_tokens:
            return super().mix(ctx, rotation, latents_TN)
        step = latents_of_step(cache, len(latents_TN))
        own = GroupContext(group.plan.derived(_tokens_in_order), group.plan)
        q_THE = self.queries(latents_TN, rotation, step, own.slots_T)
        keep_latents(step, cache, group.slots_T)
        return self.attend(q_THE, rotation, step, own)

    def attend_latents(self, q_THK: torch.Tensor, cache: LatentLayer, plan: AttentionPlan) -> torch.Tensor:
        tokens, heads, width = q_THK.shape
        at_once = max(_MOST_GATHERED // max(tokens * width * self._dcp.size, 1), 1)
        if at_once >= heads:
            return self._attend_group(q_THK, cache, plan)
        return torch.cat([self._attend_group(part, cache, plan) for part in q_THK.split(at_once, 1)], 1)

    def _attend_group(self, q_THK: torch.Tensor, cache: LatentLayer, plan: AttentionPlan) -> torch.Tensor:
        """Attention to the tokens of all ranks, for some heads of each."""
        tokens, heads, width = q_THK.shape
        ranks = self._dcp.size
        q_TO = self._dcp.all_gather_last_dim(q_THK.flatten(1), [heads * width] * ranks)
        q_TGK = q_TO.unflatten(1, (-1, width))
        out_TGC, lse_TG = partial_latent_attention(q_TGK, cache, plan, self._args.scale)
        packed = pack_partials(out_TGC, lse_TG, ranks).flatten(0, 1)
        packed = self._dcp.all_to_all_rows(packed, [tokens] * ranks, [tokens] * ranks)
        return merge_partials(*unpack_partials(packed.unflatten(0, (ranks, tokens))))


def _tokens_in_order(plan: AttentionPlan) -> torch.Tensor:
    return torch.arange(plan.num_tokens, device=plan.context_lens_R.device)
