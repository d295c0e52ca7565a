"""Latent attention to the tokens that an indexer chooses: small heads that score all a token sees.

    x ─────────── wk ─ norm ─ turn ─► an index key of the token, beside its latent
    q's latent ── wq_b ─ turn ──────► queries of the indexer's heads ─┐
    x ─────────── weights_proj ─────► a weight for each of them ──────┴► index_topk ─► slots

A layer without an indexer reads what the layer before it chose. Where a step sees no more tokens
than would be chosen, all are read, and nothing is scored. Every rank holds the whole indexer and
chooses the same.

T tokens, D hidden, Q the queries' latent, G heads of the indexer, I numbers of its keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atom_ops import (
    IndexKeys,
    IndexNorm,
    LatentLayer,
    TopKIndices,
    index_topk,
    rotary,
    write_index_keys,
)
from workers.layers.cache_groups import CacheGroup, LatentGroup
from workers.layers.context import BuildContext, ForwardContext, GroupContext
from workers.layers.decoder import Mixers
from workers.layers.linear import ColumnParallelLinear, Linear
from workers.layers.mla import LatentArgs, LatentAttention
from workers.layers.norm import RMSNorm
from workers.layers.rotary import Rotation
from workers.layers.weighted import Range, Source, WeightedLayer


@dataclass(frozen=True, kw_only=True)
class IndexerArgs:
    """What sets one family's choice of tokens apart from another's."""

    heads: int
    """G."""
    width: int
    """I."""
    most: int
    """Tokens that a token attends to."""
    interleaved: bool
    """Whether neighbouring numbers turn together, or those of both halves."""
    chooses: Sequence[bool]
    """By layer; one that does not takes over the choice of the layer before."""

    def __post_init__(self) -> None:
        if not self.chooses[0]:
            raise ValueError("the first layer has no indexer, and none before it whose choice it could share")


class Indexer(nn.Module):
    """Writes the step's index keys, and chooses."""

    def __init__(self, args: IndexerArgs, latent: LatentArgs, build: BuildContext):
        super().__init__()
        self._args = args
        # Of both products of a score, in one.
        self._scale = args.width**-0.5 * args.heads**-0.5
        assert latent.q_lora_rank is not None
        queries, key = Range.whole(args.heads * args.width), Range.whole(args.width)
        self.wq_b = ColumnParallelLinear(latent.q_lora_rank, [queries], False, build)
        self.wk = ColumnParallelLinear(latent.hidden_size, [key], False, build)
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
        """What each token attends to; None for all that it sees."""
        interleaved, plan = self._args.interleaved, group.plan
        rotation = rotation if interleaved else rotation.halves
        turn = rotation.cos_T1R, rotation.sin_T1R
        write_index_keys(self.wk(x_TD), self.k_norm.terms, *turn, keys, group.slots_T, interleaved)
        # Bits that depend on no other row need one form for all lengths.
        if plan.max_context_len <= self._args.most and not plan.split_tokens:
            return None
        q_TGI = rotary(self.wq_b(q_TQ).unflatten(1, (self._args.heads, -1)), *turn, interleaved)
        return index_topk(q_TGI, self.weights_proj(x_TD) * self._scale, keys, plan, self._args.most)


class LayerNorm(WeightedLayer):
    """Mean 0 and variance 1, then weight and bias."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, size: int, build: BuildContext):
        super().__init__()
        for name in ("weight", "bias"):
            self.add_weight(name, [Source((size,), 0, Range.whole(size))], build)

    @property
    def terms(self) -> IndexNorm:
        # No configuration states this eps.
        return IndexNorm(self.weight, self.bias, 1e-6)


class HeadWeights(Linear):
    """A weight for each head of an indexer, [T, G]; in float32, for the choice hangs on it."""

    def __init__(self, hidden_size: int, heads: int, build: BuildContext):
        super().__init__()
        self.add_weight("weight", [Source((heads, hidden_size), 0, Range.whole(heads))], build, torch.float32)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_TD.float())


class SparseLatentAttention(LatentAttention):
    """Latent attention to what its indexer chooses, or to what was chosen for the layer before."""

    def __init__(
        self,
        latent: LatentArgs,
        args: IndexerArgs,
        layer: int,
        groups: Sequence[CacheGroup],
        build: BuildContext,
    ):
        super().__init__(latent, layer, groups, build)
        self.indexer = Indexer(args, latent, build) if args.chooses[layer] else None

    def after_norm(
        self,
        norm: RMSNorm,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LatentAttention`."""
        cache, group = ctx.kv_layers[self._layer], ctx.groups[self._group]
        assert isinstance(cache, LatentLayer) and isinstance(group, GroupContext)
        if self.indexer is None:
            q_THE, residual_TD = self.queries(norm, x_TD, residual_TD, rotation, cache, group.slots_T)
        else:
            assert cache.index is not None
            normed_TD, residual_TD = norm.add(x_TD, residual_TD)
            q_TQ = self.write(self.qkv_a_proj(normed_TD), rotation, cache, group.slots_T)
            ctx.choice.tokens = self.indexer(normed_TD, q_TQ, rotation, cache.index, group)
            q_THE = self.expand_queries(q_TQ)
        return self.attend(q_THE, rotation, cache, group, ctx.choice.tokens), residual_TD


def sparse_mixers(latent: LatentArgs, args: IndexerArgs, build: BuildContext) -> Mixers:
    """One block table for all layers: what one chose is found there by the next."""
    if latent.q_lora_rank is None:
        raise ValueError("an indexer without q_lora_rank is not supported")
    layers = range(len(args.chooses))
    indexed = [layer for layer in layers if args.chooses[layer]]
    groups: list[CacheGroup] = [
        LatentGroup(layers, latent.kv_lora_rank, latent.rope_dim, args.width, indexed)
    ]
    return Mixers(groups, lambda layer: SparseLatentAttention(latent, args, layer, groups, build))
