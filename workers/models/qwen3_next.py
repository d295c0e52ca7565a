"""Qwen3-Next: gated delta networks in most layers, gated attention in every fourth, experts in all."""

from collections.abc import Mapping
from typing import Any, ClassVar

from atom_ops import RoutingRule
from workers.layers.cache_groups import StateGroup
from workers.layers.context import BuildContext
from workers.layers.decoder import (
    DecoderArgs,
    DecoderLM,
    FeedForward,
    GatedMLP,
    Mixer,
    Mixers,
    common_fields,
    kv_group,
)
from workers.layers.gated_attention import GatedAttention
from workers.layers.gated_delta_net import DELTA_MODULES, DeltaArgs, GatedDeltaNet, state_shape
from workers.layers.moe import MoE, MoEArgs

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
_LINEAR, _FULL = "linear_attention", "full_attention"


class Qwen3NextForCausalLM(DecoderLM):
    """The tensors that predict further tokens (mtp) are not loaded."""

    packed_modules_mapping: ClassVar = {**DecoderLM.packed_modules_mapping, **DELTA_MODULES}
    renamed_on_disk: ClassVar = {"shared_experts": "shared_expert"}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        stated = {**_DEFAULTS, **config}
        bias = stated["attention_bias"]
        args = DecoderArgs(
            **common_fields(stated, partial_rotary=True), qkv_bias=bias, o_bias=bias, zero_centred_norms=True
        )
        moe = _moe_args(stated)
        dense, every = stated["mlp_only_layers"] or [], stated["decoder_sparse_step"]

        def mlp(layer: int) -> FeedForward:
            sparse = moe.num_experts > 0 and (layer + 1) % every == 0 and layer not in dense
            return MoE(moe, build) if sparse else GatedMLP(args, build)

        super().__init__(config, args, build, mlp, _mixers(stated, args, build))
        self.unused_on_disk += ("mtp.*",)


def _mixers(stated: Mapping[str, Any], args: DecoderArgs, build: BuildContext) -> Mixers:
    kinds = _layer_types(stated)
    full = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    linear = [layer for layer, kind in enumerate(kinds) if kind == _LINEAR]
    delta = _delta_args(stated)
    blocks = kv_group(args, full, build)

    def make(layer: int) -> Mixer:
        if layer in full:
            return GatedAttention(args, layer, [blocks], build)
        return GatedDeltaNet(delta, layer, 1, build)

    return Mixers([blocks, StateGroup(linear, state_shape(delta, build))] if linear else [blocks], make)


def _layer_types(stated: Mapping[str, Any]) -> list[str]:
    """Raises ValueError for kinds of layers that do not run, and where none attends to all tokens."""
    layers, every = stated["num_hidden_layers"], stated["full_attention_interval"]
    kinds = stated.get("layer_types") or [
        _LINEAR if (layer + 1) % every else _FULL for layer in range(layers)
    ]
    if len(kinds) != layers or not {_FULL} <= {*kinds} <= {_FULL, _LINEAR}:
        raise ValueError(
            f"{stated['model_type']} with layer_types {kinds} is not supported: they must say {_LINEAR} or "
            f"{_FULL} (at least once) for each of {layers} layers"
        )
    return list(kinds)


def _delta_args(stated: Mapping[str, Any]) -> DeltaArgs:
    return DeltaArgs(
        hidden_size=stated["hidden_size"],
        key_heads=stated["linear_num_key_heads"],
        value_heads=stated["linear_num_value_heads"],
        key_features=stated["linear_key_head_dim"],
        value_features=stated["linear_value_head_dim"],
        taps=stated["linear_conv_kernel_dim"],
        eps=stated["rms_norm_eps"],
    )


def _moe_args(stated: Mapping[str, Any]) -> MoEArgs:
    experts = stated["num_experts"] if "num_experts" in stated else stated["num_local_experts"]
    return MoEArgs(
        hidden_size=stated["hidden_size"],
        num_experts=experts,
        expert_features=stated["moe_intermediate_size"],
        rule=RoutingRule(stated["num_experts_per_tok"], "softmax", renormalise=stated["norm_topk_prob"]),
        hidden_act=stated.get("hidden_act", "silu"),
        shared_features=stated["shared_expert_intermediate_size"],
        shared_gate=True,
    )


ARCHITECTURES = {"Qwen3NextForCausalLM": Qwen3NextForCausalLM}
