"""MiniMax-M2: norms of queries and keys over all heads, partial rotary dimension, experts in all layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from atom_ops import RoutingRule
from workers.layers.config_values import check_value
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.moe.expert_layouts import PerExpert
from workers.layers.moe.moe import MoE, MoEArgs

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "num_mtp_modules": 0,
}
_FULL_ATTENTION = 1


class MiniMaxM2ForCausalLM(DecoderLM):
    """The layers for multi-token prediction, which follow the last layer, are not loaded."""

    renamed_on_disk: ClassVar = {"mlp": "block_sparse_moe"}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        _check_supported(config)
        if config.get("rotary_dim") is not None:
            config = {"partial_rotary_factor": config["rotary_dim"] / config["head_dim"], **config}
        args = DecoderArgs(**common_fields(config, partial_rotary=True), norm_across_heads=True)
        moe = _moe_args(config)
        super().__init__(config, args, build, lambda layer, at: MoE(moe, at))
        first = args.num_hidden_layers
        mtp_layers = range(first, first + (config["num_mtp_modules"] or 0))
        self.unused_on_disk += tuple(f"model.layers.{layer}.*" for layer in mtp_layers)


def _check_supported(config: Mapping[str, Any]) -> None:
    check_value(config, "scoring_func", "sigmoid")
    check_value(config, "use_qk_norm", True)
    check_value(config, "qk_norm_type", "per_layer")
    check_value(config, "use_routing_bias", True)
    check_value(config, "shared_intermediate_size", 0)
    kinds = config.get("attn_type_list") or []
    if set(kinds) - {_FULL_ATTENTION}:
        raise ValueError(f"minimax_m2 with attn_type_list {kinds} is not supported; supported: all 1")


def _moe_args(config: Mapping[str, Any]) -> MoEArgs:
    return MoEArgs(
        hidden_size=config["hidden_size"],
        num_experts=config["num_local_experts"],
        expert_features=config["intermediate_size"],
        rule=RoutingRule(config["num_experts_per_tok"], "sigmoid", renormalise=True),
        hidden_act=config.get("hidden_act", "silu"),
        router_dtype=torch.float32,
        correction_bias=True,
        correction_bias_name=".e_score_correction_bias",
        layout=PerExpert(gate="w1", up="w3", down="w2"),
    )


ARCHITECTURES = {"MiniMaxM2ForCausalLM": MiniMaxM2ForCausalLM}
