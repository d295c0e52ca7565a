"""Grouped-query attention with RoPE: the token mixer of most families, and its KV groups.

T tokens, D hidden, O features of the fused projection.
"""

from collections.abc import Sequence

import torch

from atom_ops import HeadNorms
from workers.layers.attention.attention import Attention, KVGroup, group_by_window
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder.decoder_args import DecoderArgs
from workers.layers.linear import ColumnParallelLinear, ReorderedLinear, RowParallelLinear
from workers.layers.norm import NormAcrossRanks, RMSNorm, norm_queries_and_keys
from workers.layers.weighted import ShardSpec, WeightedLayer, consecutive


def kv_groups(args: DecoderArgs, build: BuildContext) -> list[KVGroup]:
    """One group for each distinct window, or for each layer with `separate_tables`."""
    queries, keys = args.head_ranges(build.tp.size, build.tp.rank)
    windows = (*(args.windows or (None,) * args.num_hidden_layers), *(None,) * args.mtp_layers)
    groups = group_by_window(windows, keys.size, args.head_dim, build.separate_tables, args.chunked)
    return [_bound(group, queries.size, args, build) for group in groups]


def kv_group(args: DecoderArgs, layers: Sequence[int], build: BuildContext) -> KVGroup:
    """The group of `layers` with full attention."""
    queries, keys = args.head_ranges(build.tp.size, build.tp.rank)
    return _bound(KVGroup(layers, keys.size, args.head_dim), queries.size, args, build)


def _bound(group: KVGroup, heads: int, args: DecoderArgs, build: BuildContext) -> KVGroup:
    return group.bound(heads, args.sinks, build, args.attention_soft_cap > 0, args.sees_ahead)


class SelfAttention(WeightedLayer):
    """Grouped-query attention with RoPE."""

    name_on_disk = "self_attn"

    sinks: torch.Tensor | None

    def __init__(self, args: DecoderArgs, layer: int, groups: Sequence[KVGroup], build: BuildContext):
        super().__init__()
        head_dim = args.head_dim
        query_heads, kv_heads = args.head_ranges(build.tp.size, build.tp.rank)
        q, kv = query_heads.scaled(head_dim), kv_heads.scaled(head_dim)
        qkv = consecutive([q, kv, kv]) if args.qkv_fused_on_disk else [q, kv, kv]
        inputs = args.attention_inputs or args.hidden_size
        at = build.at("qkv_proj")
        if args.qk_interleaved_on_disk:
            order = _halves_first(q.size + kv.size, kv.size, head_dim)
            self.qkv_proj: ColumnParallelLinear = ReorderedLinear(inputs, qkv, args.qkv_bias, at, order)
        else:
            self.qkv_proj = ColumnParallelLinear(inputs, qkv, args.qkv_bias, at)
        self.o_proj = RowParallelLinear(q, args.hidden_size, args.o_bias, build.at("o_proj"))
        self.q_norm: RMSNorm | None = self._head_norm(args, build)
        self.k_norm: RMSNorm | None = self._head_norm(args, build)
        if args.norm_across_heads:
            self.q_norm = NormAcrossRanks(q, args.rms_norm_eps, build)
            self.k_norm = NormAcrossRanks(kv, args.rms_norm_eps, build)
            self._repeated = _repeated_heads(args, build) * head_dim
        self.register_buffer("sinks", None)
        if args.sinks:
            self.add_weight("sinks", [ShardSpec((query_heads.total,), 0, query_heads)], build)
        self._q_features = q.size
        self.attention = Attention(layer, groups, args.attention_scale, args.attention_soft_cap)

    @staticmethod
    def _head_norm(args: DecoderArgs, build: BuildContext) -> RMSNorm | None:
        if not args.qk_norm:
            return None
        return RMSNorm(args.head_dim, args.rms_norm_eps, build, args.zero_centred_norms)

    def after_norm(
        self,
        norm: RMSNorm,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qkv_TO, residual_TD = self.qkv_proj.after_norm(norm, x_TD, residual_TD)
        return self.o_proj(self.attend(qkv_TO, rotation, ctx)), residual_TD

    def forward(self, x_TD: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """This rank's partial sum of the output."""
        out_TD: torch.Tensor = self.o_proj(self.attend(self.qkv_proj(x_TD), rotation, ctx))
        return out_TD

    def attend(self, qkv_TO: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """The input of `o_proj`."""
        if isinstance(self.q_norm, NormAcrossRanks) and isinstance(self.k_norm, NormAcrossRanks):
            qkv_TO = norm_queries_and_keys(qkv_TO, self.q_norm, self.k_norm, self._repeated)
        if rotation.query_scale_T1 is not None:
            # In float32, and rounded once; nothing else reads the projection.
            qkv_TO[:, : self._q_features].mul_(rotation.query_scale_T1)
        return self.attention(qkv_TO, rotation, ctx, self._head_norms(), self.sinks)

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None or isinstance(self.q_norm, NormAcrossRanks):
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


def _halves_first(rotated: int, others: int, head_dim: int) -> torch.Tensor:
    """The rows of `rotated` features, of each head the even ones, then the odd ones; then `others`."""
    pairs = torch.arange(rotated).view(-1, head_dim // 2, 2)
    return torch.cat((pairs.transpose(1, 2).flatten(), torch.arange(rotated, rotated + others)))


def _repeated_heads(args: DecoderArgs, build: BuildContext) -> int:
    """Number of this rank's key heads that the rank before it has too."""
    if build.tp.rank == 0:
        return 0
    _, kept = args.head_ranges(build.tp.size, build.tp.rank)
    _, before = args.head_ranges(build.tp.size, build.tp.rank - 1)
    return before.start + before.size - kept.start
