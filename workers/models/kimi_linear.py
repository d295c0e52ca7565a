"""Kimi-Linear: Kimi delta attention in most layers, MLA without RoPE in the others, experts in most."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from workers.layers.attention.cache_groups import CacheGroup, LatentGroup, StateGroup
from workers.layers.config_values import check_value
from workers.layers.context import BuildContext
from workers.layers.decoder.blocks import FeedForward, TokenMixer, TokenMixers
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.kimi_delta_attention import (
    KIMI_DELTA_MODULES,
    KimiDeltaArgs,
    KimiDeltaAttention,
    kimi_state_shape,
)
from workers.layers.mla.latent_decoder import decoder_args, has_experts, latent_args, moe_args, noaux_tc_rule
from workers.layers.mla.mla import LATENT_MODULES, LatentAttention
from workers.layers.moe.expert_layouts import PerExpert
from workers.layers.moe.moe import MoE

KEEPS_STATES = True

_DEFAULTS = {"rms_norm_eps": 1e-5, "attention_bias": False, "first_k_dense_replace": 1, "topk_group": 1}
_OTHER_NAMES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "scoring_func": "moe_router_activation_func",
}
"""DeepSeek's name of a setting -> that of config.json."""
_FULL, _LINEAR = "full_attention", "linear_attention"


class KimiLinearForCausalLM(DecoderLM):
    """Layers of both kinds of attention are `self_attn`."""

    packed_modules_mapping: ClassVar = {
        **DecoderLM.packed_modules_mapping, **LATENT_MODULES, **KIMI_DELTA_MODULES,
    }  # fmt: skip
    renamed_on_disk: ClassVar = {
        f"mlp.{name}": f"block_sparse_moe.{name}" for name in ("gate", "experts", "shared_experts")
    }

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        stated = {ours: config[theirs] for ours, theirs in _OTHER_NAMES.items() if theirs in config}
        config = {**_DEFAULTS, **config, **stated}
        for name, supported in (("mla_use_nope", True), ("moe_layer_freq", 1), ("hidden_act", "silu")):
            check_value(config, name, supported)
        args = decoder_args(config)
        args = replace(args, ropes=(None,) * args.num_hidden_layers)
        moe = moe_args(config, noaux_tc_rule(config), correction_bias=True)
        moe = replace(moe, layout=PerExpert(gate="w1", up="w3", down="w2"))

        def mlp(layer: int, at: BuildContext) -> FeedForward:
            return MoE(moe, at) if has_experts(config, layer) else GatedMLP(args, at)

        super().__init__(config, args, build, mlp, _token_mixers(config, build))


def _token_mixers(config: Mapping[str, Any], build: BuildContext) -> TokenMixers:
    """Raises ValueError for unknown kinds of layers and where one kind is missing."""
    linear_config = config.get("linear_attn_config") or {}
    kinds = _kinds(config, linear_config)
    latent = latent_args(config)
    delta = KimiDeltaArgs(
        config["hidden_size"],
        linear_config.get("num_heads") or config["linear_num_heads"],
        linear_config.get("head_dim") or config["linear_head_dim"],
        linear_config.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"],
        config["rms_norm_eps"],
    )
    full = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    linear = [layer for layer, kind in enumerate(kinds) if kind == _LINEAR]
    groups: list[CacheGroup] = [
        LatentGroup(full, latent.kv_lora_rank, latent.rope_dim),
        StateGroup(linear, kimi_state_shape(delta, build)),
    ]

    def make(layer: int, at: BuildContext) -> TokenMixer:
        if layer in full:
            return LatentAttention(latent, layer, groups, at.at(LatentAttention.name_on_disk))
        return KimiDeltaAttention(delta, layer, 1, at.at(KimiDeltaAttention.name_on_disk))

    return TokenMixers(groups, make)


def _kinds(config: Mapping[str, Any], linear_config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer; `linear_attn_config` numbers layers from 1."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if not kinds:
        full = linear_config["full_attn_layers"]
        kinds = [_FULL if layer in full else _LINEAR for layer in range(1, layers + 1)]
    if len(kinds) != layers or set(kinds) != {_FULL, _LINEAR}:
        raise ValueError(
            f"{config['model_type']} with layer_types {kinds} is not supported: {layers} layers must have "
            f"{_LINEAR} or {_FULL}, and each at least once"
        )
    return list(kinds)


ARCHITECTURES = {"KimiLinearForCausalLM": KimiLinearForCausalLM}
