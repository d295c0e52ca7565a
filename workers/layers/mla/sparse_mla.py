"""Sparse MLA: attention to the top-k tokens by the score of an indexer, a few small heads.

    x ─────────── wk ─ norm ─ RoPE ─► index key of the token, cached next to its latent
    query latent ─ wq_b ─ RoPE ─────► queries of the indexer's heads ─┐
    x ─────────── weights_proj ─────► a weight for each head ─────────┴► index_topk ─► slots

A layer without an indexer uses the top-k indices of the layer before it. Where no context is longer
than k, all tokens are read and no scores are computed. The indexer is replicated, so that every rank
selects the same tokens.

T tokens, D hidden, Q query latent, G heads of the indexer, I features of an index key.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atom_ops import (
    IndexKeys,
    IndexNorm,
    TopKIndices,
    index_topk,
    rotary,
    write_index_keys,
)
from workers.layers.attention.cache_groups import CacheGroup, LatentGroup
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext, GroupContext
from workers.layers.decoder.blocks import TokenMixers
from workers.layers.linear import ColumnParallelLinear, Linear
from workers.layers.mla.mla import LatentArgs, LatentAttention
from workers.layers.norm import RMSNorm
from workers.layers.weighted import ShardRange, ShardSpec, WeightedLayer


@dataclass(frozen=True, kw_only=True)
class IndexerArgs:
    """The parameters of the indexer."""

    heads: int
    """Number of heads, G."""
    width: int
    """Features I of an index key."""
    topk: int
    """Number of tokens that a token attends to."""
    interleaved: bool
    """RoPE style: pairs of neighbouring features (GPT-J), or of both halves (NeoX)."""
    has_indexer: Sequence[bool]
    """By layer; a layer without one shares the top-k indices of the layer before."""

    def __post_init__(self) -> None:
        if not self.has_indexer[0]:
            raise ValueError("the first layer has no indexer, and no layer before it to share indices with")


class Indexer(nn.Module):
    """Writes the step's index keys to the cache and selects the top-k tokens."""

    def __init__(self, args: IndexerArgs, latent: LatentArgs, build: BuildContext):
        super().__init__()
        self._args = args
        # Scales the query-key product and the head weights at once.
        self._scale = args.width**-0.5 * args.heads**-0.5
        assert latent.q_lora_rank is not None
        queries = ShardRange.whole(args.heads * args.width)
        key = ShardRange.whole(args.width)
        self.wq_b = ColumnParallelLinear(latent.q_lora_rank, [queries], False, build.at("wq_b"))
        self.wk = ColumnParallelLinear(latent.hidden_size, [key], False, build.at("wk"))
        self.k_norm = LayerNorm(args.width, build)
        self.weights_proj = HeadWeights(latent.hidden_size, args.heads, build)

    def forward(
        self,
        x_TD: torch.Tensor,
        q_TQ: torch.Tensor,
        rotation: Rotation,
        keys: IndexKeys,
        group: GroupContext,
    ) -> TopKIndices | None:
        """The tokens that each token attends to; None: all up to itself."""
        interleaved = self._args.interleaved
        plan = group.plan
        rotation = rotation if interleaved else rotation.half_split
        cos_sin = rotation.cos_T1R, rotation.sin_T1R
        write_index_keys(self.wk(x_TD), self.k_norm.terms, *cos_sin, keys, group.slots_T, interleaved)
        # With batch invariance all lengths must use the same computation: top-k selection.
        if plan.max_context_len <= self._args.topk and not plan.split_tokens:
            return None
        q_TGI = rotary(self.wq_b(q_TQ).unflatten(1, (self._args.heads, -1)), *cos_sin, interleaved)
        return index_topk(q_TGI, self.weights_proj(x_TD) * self._scale, keys, plan, self._args.topk)


class LayerNorm(WeightedLayer):
    """LayerNorm with weight and bias."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, size: int, build: BuildContext):
        super().__init__()
        for name in ("weight", "bias"):
            self.add_weight(name, [ShardSpec((size,), 0, ShardRange.whole(size))], build)

    @property
    def terms(self) -> IndexNorm:
        # config.json has no field for this eps.
        return IndexNorm(self.weight, self.bias, 1e-6)


class HeadWeights(Linear):
    """A weight for each head of the indexer, [T, G]; float32, since it decides which tokens are selected."""

    def __init__(self, hidden_size: int, heads: int, build: BuildContext):
        super().__init__()
        self.add_weight(
            "weight", [ShardSpec((heads, hidden_size), 0, ShardRange.whole(heads))], build, torch.float32
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_TD.float())


class SparseLatentAttention(LatentAttention):
    """MLA to the top-k tokens of its own indexer, or to those of the layer before."""

    def __init__(
        self,
        latent: LatentArgs,
        args: IndexerArgs,
        layer: int,
        groups: Sequence[CacheGroup],
        build: BuildContext,
    ):
        super().__init__(latent, layer, groups, build)
        self.indexer = Indexer(args, latent, build.at("indexer")) if args.has_indexer[layer] else None

    def after_norm(
        self,
        norm: RMSNorm,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.indexer is None:
            return super().after_norm(norm, x_TD, residual_TD, rotation, ctx)
        normed_TD, residual_TD = norm.add_norm(x_TD, residual_TD)
        latents_TN = self.qkv_a_proj(normed_TD)
        return self.o_proj(ctx.mix(self._mix_indexed, rotation, latents_TN, normed_TD)), residual_TD

    def mix(self, ctx: ForwardContext, rotation: Rotation, latents_TN: torch.Tensor) -> torch.Tensor:
        cache, group = self.cache(ctx)
        q_THE = self.queries(latents_TN, rotation, cache, group.slots_T)
        return self.attend(q_THE, rotation, cache, group, ctx.topk_indices.tokens)

    def _mix_indexed(
        self, ctx: ForwardContext, rotation: Rotation, latents_TN: torch.Tensor, normed_TD: torch.Tensor
    ) -> torch.Tensor:
        cache, group = self.cache(ctx)
        assert self.indexer is not None and cache.index is not None
        q_TQ = self.write(latents_TN, rotation, cache, group.slots_T)
        ctx.topk_indices.tokens = self.indexer(normed_TD, q_TQ, rotation, cache.index, group)
        q_THE = self.expand_queries(q_TQ)
        return self.attend(q_THE, rotation, cache, group, ctx.topk_indices.tokens)


def sparse_token_mixers(latent: LatentArgs, args: IndexerArgs, build: BuildContext) -> TokenMixers:
    """One cache group for all layers, so that shared top-k slots mean the same blocks in each."""
    if build.dcp.size > 1:
        raise ValueError("--decode-context-parallel-size: sparse attention is not supported; omit the flag")
    if latent.q_lora_rank is None:
        raise ValueError("an indexer without q_lora_rank is not supported")
    layers = range(len(args.has_indexer))
    indexed = [layer for layer in layers if args.has_indexer[layer]]
    groups: list[CacheGroup] = [
        LatentGroup(layers, latent.kv_lora_rank, latent.rope_dim, args.width, indexed)
    ]
    return TokenMixers(
        groups, lambda layer, at: SparseLatentAttention(latent, args, layer, groups, at.at("self_attn"))
    )
