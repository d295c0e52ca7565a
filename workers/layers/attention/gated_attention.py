"""Attention whose output is multiplied by a sigmoid gate computed from the same token.

In the checkpoint each head's gate follows its query, [query 0, gate 0, query 1, gate 1, …]. Here all
gates come last, so that the features before them are an ordinary fused QKV projection.

T tokens, O features of the fused projection, H query heads.
"""

from collections.abc import Sequence

import torch
from torch import nn

from atom_ops import HeadNorms, sigmoid_and_mul
from workers.layers.attention.attention import Attention, KVGroup
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.decoder.decoder_args import DecoderArgs
from workers.layers.linear import ReorderedLinear, RowParallelLinear
from workers.layers.norm import RMSNorm


class GatedAttention(nn.Module):
    """Grouped-query attention with Q/K norms and a sigmoid gate on its output."""

    name_on_disk = "self_attn"

    def __init__(self, args: DecoderArgs, layer: int, groups: Sequence[KVGroup], build: BuildContext):
        super().__init__()
        head_dim = args.head_dim
        query_heads, kv_heads = args.head_ranges(build.tp.size, build.tp.rank)
        q, kv = query_heads.scaled(head_dim), kv_heads.scaled(head_dim)
        gated = q.scaled(2)
        order = _gates_last(query_heads.size, head_dim, 2 * kv.size)
        self.qkv_proj = ReorderedLinear(
            args.hidden_size, [gated, kv, kv], args.qkv_bias, build.at("qkv_proj"), order
        )
        self.o_proj = RowParallelLinear(q, args.hidden_size, args.o_bias, build.at("o_proj"))
        self.q_norm = RMSNorm(head_dim, args.rms_norm_eps, build, args.zero_centred_norms)
        self.k_norm = RMSNorm(head_dim, args.rms_norm_eps, build, args.zero_centred_norms)
        self.attention = Attention(layer, groups)
        self._gates = q.size

    def after_norm(
        self,
        norm: RMSNorm,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        all_TO, residual_TD = self.qkv_proj.after_norm(norm, x_TD, residual_TD)
        qkv_TO, gate_TO = all_TO.split([all_TO.shape[1] - self._gates, self._gates], 1)
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        out_TO = self.attention(qkv_TO, rotation, ctx, norms)
        return self.o_proj(sigmoid_and_mul(out_TO, gate_TO)), residual_TD


def _gates_last(heads: int, head_dim: int, others: int) -> torch.Tensor:
    """The order of rows: queries, the `others` rows of keys and values, gates."""
    queries_HE = torch.arange(heads)[:, None] * 2 * head_dim + torch.arange(head_dim)
    keys_and_values = torch.arange(others) + 2 * heads * head_dim
    return torch.cat((queries_HE.flatten(), keys_and_values, (queries_HE + head_dim).flatten()))
