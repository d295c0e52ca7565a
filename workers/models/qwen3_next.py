"""Qwen3-Next: gated delta networks in most layers, gated attention in the others, experts in all."""

from collections.abc import Mapping
from typing import Any, ClassVar

from atom_ops import RoutingRule
from workers.layers.attention.cache_groups import StateGroup
from workers.layers.attention.gated_attention import GatedAttention
from workers.layers.context import BuildContext
from workers.layers.decoder import (
    DecoderArgs,
    DecoderLM,
    FeedForward,
    GatedMLP,
    TokenMixer,
    TokenMixers,
    common_fields,
    kv_group,
)
from workers.layers.gated_delta_net import DELTA_MODULES, DeltaArgs, GatedDeltaNet, state_shape
from workers.layers.moe.moe import MoE, MoEArgs

KEEPS_STATES = True

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": True,
}
_LINEAR = "linear_attention"
_FULL = "full_attention"


class Qwen3NextForCausalLM(DecoderLM):
    """The tensors for multi-token prediction (mtp.*) are not loaded."""

    packed_modules_mapping: ClassVar = {**DecoderLM.packed_modules_mapping, **DELTA_MODULES}
    renamed_on_disk: ClassVar = {"shared_experts": "shared_expert"}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        bias = config["attention_bias"]
        args = DecoderArgs(
            **common_fields(config, partial_rotary=True), qkv_bias=bias, o_bias=bias, zero_centred_norms=True
        )
        moe = _moe_args(config)
        dense = config["mlp_only_layers"] or []
        every = config["decoder_sparse_step"]

        def mlp(layer: int, at: BuildContext) -> FeedForward:
            sparse = moe.num_experts > 0 and (layer + 1) % every == 0 and layer not in dense
            return MoE(moe, at) if sparse else GatedMLP(args, at)

        super().__init__(config, args, build, mlp, _token_mixers(config, args, build))
        self.unused_on_disk += ("mtp.*",)


def _token_mixers(config: Mapping[str, Any], args: DecoderArgs, build: BuildContext) -> TokenMixers:
    kinds = _layer_types(config)
    full = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    linear = [layer for layer, kind in enumerate(kinds) if kind == _LINEAR]
    delta = _delta_args(config)
    attention_group = kv_group(args, full, build)

    def make(layer: int, at: BuildContext) -> TokenMixer:
        if layer in full:
            return GatedAttention(args, layer, [attention_group], at.at(GatedAttention.name_on_disk))
        return GatedDeltaNet(delta, layer, 1, at.at(GatedDeltaNet.name_on_disk))

    return TokenMixers(
        [attention_group, StateGroup(linear, state_shape(delta, build))] if linear else [attention_group],
        make,
    )


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer. Raises ValueError for unknown kinds and where no layer has full attention."""
    layers = config["num_hidden_layers"]
    every = config["full_attention_interval"]
    kinds = config.get("layer_types") or [
        _LINEAR if (layer + 1) % every else _FULL for layer in range(layers)
    ]
    if len(kinds) != layers or not {_FULL} <= {*kinds} <= {_FULL, _LINEAR}:
        raise ValueError(
            f"{config['model_type']} with layer_types {kinds} is not supported: they must be {_LINEAR} or "
            f"{_FULL} (at least once) for each of {layers} layers"
        )
    return list(kinds)


def _delta_args(config: Mapping[str, Any]) -> DeltaArgs:
    return DeltaArgs(
        hidden_size=config["hidden_size"],
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_features=config["linear_key_head_dim"],
        value_features=config["linear_value_head_dim"],
        conv_kernel_size=config["linear_conv_kernel_dim"],
        eps=config["rms_norm_eps"],
    )


def _moe_args(config: Mapping[str, Any]) -> MoEArgs:
    experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return MoEArgs(
        hidden_size=config["hidden_size"],
        num_experts=experts,
        expert_features=config["moe_intermediate_size"],
        rule=RoutingRule(config["num_experts_per_tok"], "softmax", renormalise=config["norm_topk_prob"]),
        hidden_act=config.get("hidden_act", "silu"),
        shared_features=config["shared_expert_intermediate_size"],
        shared_gate=True,
    )


ARCHITECTURES = {"Qwen3NextForCausalLM": Qwen3NextForCausalLM}
