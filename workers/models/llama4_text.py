"""Llama 4: chunked attention with RoPE in most layers, none in the others, one routed and a shared expert.

A layer with chunked attention sees the tokens of its own chunk: its KV group is that of a sliding window of
the chunk's length, which frees and finds in the prefix cache the blocks of the last such window. That is the
whole chunk of every token, and of most tokens more, which kernels mask.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from atom_ops import HeadNorms, RoutingRule
from workers.layers.attention.rotary import NoRope, layers_with_rope
from workers.layers.attention.self_attention import SelfAttention, kv_groups
from workers.layers.context import BuildContext
from workers.layers.decoder.blocks import FeedForward, TokenMixers
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.moe.expert_layouts import INPUTS_FIRST
from workers.layers.moe.moe import MoE, MoEArgs

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "head_dim": 128,
    "attention_bias": False,
    "use_qk_norm": True,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "moe_layers": None,
    "interleave_moe_layer_step": 1,
    "num_experts_per_tok": 1,
}
_CHUNKED, _FULL = "chunked_attention", "full_attention"


class Llama4ForCausalLM(DecoderLM):
    """Dense layers, if any, alternate with layers of experts and have features of their own."""

    renamed_on_disk: ClassVar = {"mlp": "feed_forward", "gate": "router", "shared_experts": "shared_expert"}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        config["no_rope_layers"] = config["no_rope_layers"] or None
        has_rope = layers_with_rope(config)
        args = _decoder_args(config, has_rope)
        groups = kv_groups(args, build)

        def attention(layer: int, at: BuildContext) -> SelfAttention:
            kind = NormedAttention if config["use_qk_norm"] and has_rope[layer] else SelfAttention
            return kind(args, layer, groups, at.at(SelfAttention.name_on_disk))

        moe = _moe_args(config)
        dense = replace(args, intermediate_size=config["intermediate_size_mlp"])
        sparse = config["moe_layers"]
        if sparse is None:
            every = config["interleave_moe_layer_step"]
            sparse = range(every - 1, args.num_hidden_layers, every)

        def mlp(layer: int, at: BuildContext) -> FeedForward:
            return MoE(moe, at) if layer in sparse else GatedMLP(dense, at)

        super().__init__(config, args, build, mlp, TokenMixers([*groups], attention))


class NormedAttention(SelfAttention):
    """Queries and keys are divided by their root mean square, which RoPE does not change."""

    def __init__(self, args: DecoderArgs, *others: Any):
        super().__init__(args, *others)
        build: BuildContext = others[-1]
        self.ones_E = torch.ones(args.head_dim, dtype=build.dtype, device=build.device)
        self._eps = args.rms_norm_eps

    def _head_norms(self) -> HeadNorms:
        return HeadNorms(self.ones_E, self.ones_E, self._eps)


def _decoder_args(config: Mapping[str, Any], has_rope: list[bool]) -> DecoderArgs:
    fields = common_fields(config)
    grown = config["attn_temperature_tuning"]
    without = NoRope(config["attn_scale"], config["floor_scale"]) if grown else None
    return DecoderArgs(
        **fields,
        qkv_bias=config["attention_bias"],
        o_bias=config["attention_bias"],
        qk_interleaved_on_disk=True,
        ropes=tuple(fields["rope_parameters"] if each else without for each in has_rope),
        windows=_chunks(config, has_rope),
        chunked=True,
    )


def _chunks(config: Mapping[str, Any], has_rope: list[bool]) -> tuple[int | None, ...]:
    """The chunk of each layer in tokens; None: full attention. Raises ValueError for other layer types."""
    types = config["layer_types"] or [_CHUNKED if each else _FULL for each in has_rope]
    if len(types) != len(has_rope) or not set(types) <= {_CHUNKED, _FULL}:
        raise ValueError(
            f"layer_types must be one of {_CHUNKED}, {_FULL} for each of the {len(has_rope)} layers: {types}"
        )
    if not config["attention_chunk_size"] and _CHUNKED in types:
        raise ValueError(f"layer_types has {_CHUNKED}, but attention_chunk_size is not set")
    return tuple(config["attention_chunk_size"] if kind == _CHUNKED else None for kind in types)


def _moe_args(config: Mapping[str, Any]) -> MoEArgs:
    return MoEArgs(
        hidden_size=config["hidden_size"],
        num_experts=config["num_local_experts"],
        expert_features=config["intermediate_size"],
        rule=RoutingRule(config["num_experts_per_tok"], "sigmoid"),
        hidden_act=config.get("hidden_act", "silu"),
        scales_inputs=True,
        shared_features=config["intermediate_size"],
        layout=INPUTS_FIRST,
    )


ARCHITECTURES = {"Llama4ForCausalLM": Llama4ForCausalLM}
