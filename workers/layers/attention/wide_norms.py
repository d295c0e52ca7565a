"""Attention whose queries, and whose keys, are normalised over all heads together.

T tokens, O features of the fused projection.
"""

from collections.abc import Sequence

import torch

from atom_ops import normalised_queries_keys, query_key_squares
from parallel.sharding import head_shard
from workers.layers.attention.attention import KVGroup
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder import DecoderArgs, SelfAttention
from workers.layers.weighted import ShardRange, ShardSpec, WeightedLayer

WIDE_NORMS = {"queries_norm": "q_norm", "keys_norm": "k_norm"}
"""For `renamed_on_disk` of families with `WideNormAttention`."""


class WideNormAttention(SelfAttention):
    """Each rank has some heads of a norm; the ranks add their sums of squares."""

    def __init__(self, args: DecoderArgs, layer: int, groups: Sequence[KVGroup], build: BuildContext):
        super().__init__(args, layer, groups, build)
        heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
        shard = head_shard(heads, kv_heads, build.tp.size, build.tp.rank)
        self._tp = build.tp
        self._eps = args.rms_norm_eps
        queries = ShardRange(heads, shard.q_start, shard.q_count).scaled(args.head_dim)
        keys = ShardRange(kv_heads, shard.kv_start, shard.kv_count).scaled(args.head_dim)
        self.queries_norm = WideNorm(queries, build)
        self.keys_norm = WideNorm(keys, build)
        self._repeated = _repeated_heads(heads, kv_heads, build) * args.head_dim

    def attend(self, qkv_TO: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        q, k = self.queries_norm.kept, self.keys_norm.kept
        squares_T2 = self._tp.all_reduce(query_key_squares(qkv_TO, q.size, k.size, self._repeated))
        weights = self.queries_norm.weight, self.keys_norm.weight
        normed_TO = normalised_queries_keys(qkv_TO, squares_T2, *weights, q.total, k.total, self._eps)
        return self.attention(normed_TO, rotation, ctx, None, self.sinks)


class WideNorm(WeightedLayer):
    """The weight of this rank's features of a norm."""

    weight: torch.Tensor

    def __init__(self, kept: ShardRange, build: BuildContext):
        super().__init__()
        self.kept = kept
        self.add_weight("weight", [ShardSpec((kept.total,), 0, kept)], build)


def _repeated_heads(heads: int, kv_heads: int, build: BuildContext) -> int:
    """Number of this rank's key heads that the rank before it has too."""
    if build.tp.rank == 0:
        return 0
    shard = head_shard(heads, kv_heads, build.tp.size, build.tp.rank)
    before = head_shard(heads, kv_heads, build.tp.size, build.tp.rank - 1)
    return before.kv_start + before.kv_count - shard.kv_start
