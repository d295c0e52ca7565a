"""Qwen3 (dense): as Llama, with queries and keys normalised per head before rotation.

T tokens, R rows that draw, D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from atom_ops import HeadNorms
from parallel.sharding import head_shard
from workers.layers.activation import gated_linear
from workers.layers.attention import Attention, KVGroup
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.embedding import LMHead, VocabEmbedding
from workers.layers.linear import ColumnParallelLinear, RowParallelLinear, tp_range
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding, Rotation
from workers.layers.weighted import Range


@dataclass(frozen=True)
class Qwen3Args:
    """The fields of config.json that this family reads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool
    attention_bias: bool

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Self:
        """Raises KeyError for a missing field, ValueError for one that does not run."""
        kinds = set(config.get("layer_types") or ["full_attention"])
        if config.get("use_sliding_window") or kinds != {"full_attention"}:
            raise ValueError(f"sliding window attention is not supported (layer_types {sorted(kinds)})")
        heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or 128,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            hidden_act=config.get("hidden_act", "silu"),
            rope_parameters=config["rope_parameters"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
        )


def kv_groups(args: Qwen3Args, build: BuildContext) -> list[KVGroup]:
    """All layers keep the same."""
    shard = head_shard(args.num_attention_heads, args.num_key_value_heads, build.tp.size, build.tp.rank)
    return [KVGroup(range(args.num_hidden_layers), shard.kv_count, args.head_dim)]


class Qwen3Attention(nn.Module):
    def __init__(self, args: Qwen3Args, layer: int, build: BuildContext):
        super().__init__()
        heads, kv_heads, head_dim = args.num_attention_heads, args.num_key_value_heads, args.head_dim
        shard = head_shard(heads, kv_heads, build.tp.size, build.tp.rank)
        q = Range(heads * head_dim, shard.q_start * head_dim, shard.q_count * head_dim)
        kv = Range(kv_heads * head_dim, shard.kv_start * head_dim, shard.kv_count * head_dim)
        self.qkv_proj = ColumnParallelLinear(args.hidden_size, [q, kv, kv], args.attention_bias, build)
        self.o_proj = RowParallelLinear(q, args.hidden_size, args.attention_bias, build)
        self.q_norm = RMSNorm(head_dim, args.rms_norm_eps, build)
        self.k_norm = RMSNorm(head_dim, args.rms_norm_eps, build)
        self.attention = Attention(layer, kv_groups(args, build))

    def forward(self, qkv_TO: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """From `qkv_proj`'s result on."""
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return self.o_proj(self.attention(qkv_TO, rotation, ctx, norms))


class Qwen3MLP(nn.Module):
    def __init__(self, args: Qwen3Args, build: BuildContext):
        super().__init__()
        features = tp_range(args.intermediate_size, build)
        self.gate_up_proj = ColumnParallelLinear(args.hidden_size, [features, features], False, build)
        self.down_proj = RowParallelLinear(features, args.hidden_size, False, build)
        self._gated = gated_linear(args.hidden_act)

    def forward(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """From `gate_up_proj`'s result on."""
        return self.down_proj.after_gate(self._gated, gate_up_T2F)


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, args: Qwen3Args, layer: int, build: BuildContext):
        super().__init__()
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps, build)
        self.self_attn = Qwen3Attention(args, layer, build)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps, build)
        self.mlp = Qwen3MLP(args, build)

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self.input_layernorm
        qkv_TO, residual_TD = self.self_attn.qkv_proj.after_norm(norm, x_TD, residual_TD)
        x_TD = self.self_attn(qkv_TO, rotation, ctx)
        norm = self.post_attention_layernorm
        gate_up_T2F, residual_TD = self.mlp.gate_up_proj.after_norm(norm, x_TD, residual_TD)
        return self.mlp(gate_up_T2F), residual_TD


class Qwen3Model(nn.Module):
    def __init__(self, args: Qwen3Args, build: BuildContext):
        super().__init__()
        self.embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size, build)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(args, layer, build) for layer in range(args.num_hidden_layers)
        )
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps, build)
        self.rotary = RotaryEmbedding(args.head_dim, args.rope_parameters, build)

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        rotation = self.rotary(positions_T)
        x_TD, residual_TD = self.embed_tokens(ids_T), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, rotation, ctx)
        normed_TD, _ = self.norm.add(x_TD, residual_TD)
        return normed_TD


class Qwen3ForCausalLM(CausalLM):
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        args = Qwen3Args.from_hf_config(config)
        tied = args.tie_word_embeddings
        self.unused_on_disk = ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if tied else ()))
        self.model = Qwen3Model(args, build)
        self.lm_head = LMHead(
            args.vocab_size, args.hidden_size, build, self.model.embed_tokens if tied else None
        )
        self.kv_groups = kv_groups(args, build)

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.model(ids_T, positions_T, ctx)

    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_RD)


ARCHITECTURES = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
