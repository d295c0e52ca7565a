"""Multi-head latent attention (MLA): one latent and one RoPE key are cached per token, for all heads.

    x ─ q_a ─ norm ─ q_b ───────► queries: N + R numbers per head
    x ─ kv_a ─┬─ latent ─ norm ─┬► a row of the cache ─ kv_b ─► keys and values of every head
              └─ key ─── RoPE ──┘

Steps of whole prompts expand the latents to keys and values of every head; all others absorb kv_b
into the queries and attend over the latents. See `atom_ops.ops.latent.latent_attention`.

T tokens, D hidden, H heads (this rank's), N query features without RoPE, R with RoPE, E = N + R,
V features of a value, C of the KV latent, Q of the query latent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atom_ops import (
    AttentionPlan,
    LatentLayer,
    LatentNorms,
    Quantized,
    TokenShard,
    TopKIndices,
    absorb_queries,
    expand_values,
    latent_attention,
    latent_queries,
    linear,
    norm_and_write_latents,
    prompt_attention,
    read_latent,
    rotary,
    sparse_latent_attention,
    write_latent,
)
from parallel.sharding import head_shard
from workers.layers.attention.cache_groups import CacheGroup, LatentGroup
from workers.layers.attention.rotation import Rotation
from workers.layers.context import BuildContext, ForwardContext, GroupContext
from workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from workers.layers.norm import RMSNorm
from workers.layers.quantization.scheme import PLAIN
from workers.layers.weighted import ShardRange, ShardSpec, WeightedLayer

LATENT_MODULES = {
    "qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "q_kv_a_proj": ("q_proj", "kv_a_proj_with_mqa"),
}
"""Fused modules of `LatentAttention`, for `packed_modules_mapping`."""


@dataclass(frozen=True, kw_only=True)
class LatentArgs:
    """The parameters of MLA."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    """Features Q of the queries' latent; None: queries are projected from the hidden state directly."""
    kv_lora_rank: int
    """Features C of the latent of keys and values."""
    nope_dim: int
    """Features N of a query or key without RoPE."""
    rope_dim: int
    """Features R of a query or key with RoPE."""
    v_dim: int
    """Features V of a value."""
    scale: float
    bias: bool = False
    """Whether the projections to the latents and the output projection have a bias."""
    interleaved: bool = True
    """RoPE style: pairs of neighbouring features (GPT-J), or of both halves (NeoX)."""
    eps: float = 1e-6
    """Epsilon of the latents' norms; config.json has no field for it."""
    attention_inputs: int | None = None
    """Features that attention reads, if not hidden_size."""


class LatentAttention(nn.Module):
    """Latents are replicated on every rank; heads are sharded. See also `sharded_mla`."""

    name_on_disk = "self_attn"

    def __init__(self, args: LatentArgs, layer: int, groups: Sequence[CacheGroup], build: BuildContext):
        """`groups` are all cache groups of the model; one of them contains `layer`."""
        super().__init__()
        self._args = args
        self._layer = layer
        self._group = next(number for number, group in enumerate(groups) if layer in group.layers)
        shard = head_shard(args.num_heads, args.num_heads, build.tp.size, build.tp.rank)
        heads = ShardRange(args.num_heads, shard.q_start, shard.q_count)
        queries = heads.scaled(args.nope_dim + args.rope_dim)
        row = ShardRange.whole(args.kv_lora_rank + args.rope_dim)
        inputs = args.attention_inputs or args.hidden_size
        if args.q_lora_rank is None:
            if args.bias:
                raise ValueError("attention_bias without q_lora_rank is not supported")
            self.q_kv_a_proj = ColumnParallelLinear(inputs, [queries, row], False, build.at("q_kv_a_proj"))
        else:
            latents = [ShardRange.whole(args.q_lora_rank), row]
            self.qkv_a_proj = ColumnParallelLinear(inputs, latents, args.bias, build.at("qkv_a_proj"))
            self.q_a_layernorm = RMSNorm(args.q_lora_rank, args.eps, build)
            self.q_b_proj = ColumnParallelLinear(args.q_lora_rank, [queries], False, build.at("q_b_proj"))
        self.kv_a_layernorm = RMSNorm(args.kv_lora_rank, args.eps, build)
        self.kv_b_proj = LatentExpansion(args, heads, build.at("kv_b_proj"))
        self.o_proj = RowParallelLinear(
            heads.scaled(args.v_dim), args.hidden_size, args.bias, build.at("o_proj")
        )

    def after_norm(
        self,
        norm: RMSNorm,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latents_TN, residual_TD = self._first_projection.after_norm(norm, x_TD, residual_TD)
        return self.o_proj(ctx.mix(self.mix, rotation, latents_TN)), residual_TD

    def forward(self, x_TD: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """This rank's part of the output, for inputs that are normalised."""
        return self.o_proj(ctx.mix(self.mix, rotation, self._first_projection(x_TD)))

    @property
    def _first_projection(self) -> ColumnParallelLinear:
        return self.q_kv_a_proj if self._args.q_lora_rank is None else self.qkv_a_proj

    def mix(self, ctx: ForwardContext, rotation: Rotation, latents_TN: torch.Tensor) -> torch.Tensor:
        """The input of the output projection [T, H * V]; writes the step's cache rows."""
        cache, group = self.cache(ctx)
        q_THE = self.queries(latents_TN, rotation, cache, group.slots_T)
        return self.attend(q_THE, rotation, cache, group)

    def cache(self, ctx: ForwardContext) -> tuple[LatentLayer, GroupContext]:
        """This layer's cache and its group's inputs."""
        cache = ctx.kv_layers[self._layer]
        group = ctx.groups[self._group]
        assert isinstance(cache, LatentLayer) and isinstance(group, GroupContext)
        return cache, group

    def queries(
        self, latents_TN: torch.Tensor, rotation: Rotation, cache: LatentLayer, slots_T: torch.Tensor
    ) -> torch.Tensor:
        """Queries [T, H, E] before RoPE, from the first projection; also writes the step's cache rows."""
        kv_norm = self.kv_a_layernorm
        at = rotation.cos_T1R, rotation.sin_T1R, cache, slots_T
        if self._args.q_lora_rank is not None:
            norms = self._latent_norms()
            weight = self.q_b_proj.weight
            return self._by_head(latent_queries(latents_TN, norms, *at, weight, self._args.interleaved))
        q_TO, row_TK = latents_TN.tensor_split([latents_TN.shape[1] - cache.rows.shape[2]], 1)
        write_latent(row_TK, kv_norm.weight, kv_norm.eps, *at, self._args.interleaved)
        return self._by_head(q_TO)

    def write(
        self, latents_TN: torch.Tensor, rotation: Rotation, cache: LatentLayer, slots_T: torch.Tensor
    ) -> torch.Tensor:
        """Write the KV latents and keys to the cache; returns the normalised query latents [T, Q]."""
        at = rotation.cos_T1R, rotation.sin_T1R, cache, slots_T
        return norm_and_write_latents(latents_TN, self._latent_norms(), *at, self._args.interleaved)

    def _latent_norms(self) -> LatentNorms:
        kv_norm = self.kv_a_layernorm
        return LatentNorms(self.q_a_layernorm.weight, kv_norm.weight, kv_norm.eps)

    def expand_queries(self, q_TQ: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, E] before RoPE, from their normalised latents."""
        return self._by_head(self.q_b_proj(q_TQ))

    def _by_head(self, q_TO: torch.Tensor) -> torch.Tensor:
        return q_TO.unflatten(1, (-1, self._args.nope_dim + self._args.rope_dim))

    def attend(
        self,
        q_THE: torch.Tensor,
        rotation: Rotation,
        cache: LatentLayer,
        group: GroupContext,
        topk_indices: TopKIndices | None = None,
    ) -> torch.Tensor:
        """Attention output [T, H * V] over all tokens up to each one, or over those of `topk_indices`."""
        if rotation.query_scale_T1 is not None:
            q_THE.mul_(rotation.query_scale_T1[:, None])  # nothing else reads the projection
        # With batch invariance prefill and decode must use the same computation: the absorbed one.
        if topk_indices is None and group.plan.whole_prompts and not group.plan.split_tokens:
            out_THV = self._expanded(q_THE, rotation, cache, group)
        else:
            out_THV = self._absorbed(q_THE, rotation, cache, group.plan, topk_indices)
        return out_THV.flatten(1)

    def _absorbed(
        self,
        q_THE: torch.Tensor,
        rotation: Rotation,
        cache: LatentLayer,
        plan: AttentionPlan,
        topk_indices: TopKIndices | None,
    ) -> torch.Tensor:
        """Attention output [T, H, V] over the latents in the cache."""
        key_HNC, value_HVC = self.kv_b_proj.by_head()
        cos_sin = (rotation.cos_T1R, rotation.sin_T1R)
        interleaved = self._args.interleaved
        q_THK = absorb_queries(q_THE, key_HNC, *cos_sin, interleaved)
        if topk_indices is None:
            sum_THC = self.attend_latents(q_THK, cache, plan)
        else:
            sum_THC = sparse_latent_attention(q_THK, cache, topk_indices, self._args.scale)
        return expand_values(sum_THC, value_HVC)

    def attend_latents(self, q_THK: torch.Tensor, cache: LatentLayer, plan: AttentionPlan) -> torch.Tensor:
        """Each head's weighted sum of latents [T, H, C], for absorbed queries."""
        return latent_attention(q_THK, cache, plan, self._args.scale)

    def _expanded(
        self, q_THE: torch.Tensor, rotation: Rotation, cache: LatentLayer, group: GroupContext
    ) -> torch.Tensor:
        """Attention output [T, H, V] over keys and values expanded from the step's own cache rows."""
        nope = self._args.nope_dim
        heads = q_THE.shape[1]
        slots_T = group.slots_T.clamp(min=0) if group.plan.has_padding_tokens else group.slots_T
        rows_TK = read_latent(cache, slots_T, q_THE.dtype)
        latent_TC, key_TR = rows_TK.tensor_split([self._args.kv_lora_rank], 1)
        kv_THX = linear(latent_TC.contiguous(), self.kv_b_proj.weight).unflatten(1, (heads, -1))
        k_nope_THN, v_THV = kv_THX.tensor_split([nope], 2)
        k_THE = torch.cat((k_nope_THN, key_TR[:, None].expand(-1, heads, -1)), 2)
        rope_THR = rotary(q_THE[..., nope:], rotation.cos_T1R, rotation.sin_T1R, self._args.interleaved)
        q_THE = torch.cat((q_THE[..., :nope], rope_THR), 2)
        return prompt_attention(q_THE, k_THE, v_THV, group.plan, self._args.scale)


class LatentExpansion(WeightedLayer):
    """kv_b_proj: maps latents to keys and values of this rank's heads; per head N rows, then V rows.

    A quantized one is dequantized when it is loaded: absorbed attention multiplies by its transpose,
    whose blocks have other scales.
    """

    weight: torch.Tensor

    def __init__(self, args: LatentArgs, heads: ShardRange, build: BuildContext):
        super().__init__()
        self._heads = heads.size
        self._nope = args.nope_dim
        rows = heads.scaled(args.nope_dim + args.v_dim)
        scheme = build.quantization.linear(build.prefix)
        self.dequantizes = scheme is not PLAIN
        self.add_matrix("weight", scheme, [ShardSpec((rows.total, args.kv_lora_rank), 0, rows)], build)
        self._dtype = build.dtype

    def process_weights_after_loading(self) -> None:
        if isinstance(weight := self.loaded("weight"), Quantized):
            self.set_weight("weight", weight.dequantized(self._dtype))

    def by_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK [H, N, C] and W_UV [H, V, C], as views of the weight."""
        key_HNC, value_HVC = self.weight.unflatten(0, (self._heads, -1)).tensor_split([self._nope], 1)
        return key_HNC, value_HVC


def latent_groups(args: LatentArgs, layers: int, shard: TokenShard) -> list[CacheGroup]:
    """One group with all layers."""
    return [LatentGroup(range(layers), args.kv_lora_rank, args.rope_dim, shard=shard)]
