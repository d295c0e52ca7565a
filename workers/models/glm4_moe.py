"""GLM-4.5 to 4.7 (MoE): partial rotary dimension and sigmoid routing."""

from collections.abc import Mapping
from typing import Any

import torch

from atom_ops import RoutingRule
from workers.layers.context import BuildContext
from workers.layers.decoder.blocks import FeedForward
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import self_attention
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.moe.moe import MoE, MoEArgs
from workers.layers.mtp import PredictingDecoderLM

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
}


class Glm4MoeForCausalLM(PredictingDecoderLM):
    """The first layers are dense; the others have routed and shared experts."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        args = DecoderArgs(
            **common_fields(config, partial_rotary=True),
            qkv_bias=config["attention_bias"],
            qk_norm=config["use_qk_norm"],
            mtp_layers=int(build.mtp),
        )
        moe = _moe_args(config)

        def mlp(layer: int, at: BuildContext) -> FeedForward:
            return MoE(moe, at) if layer >= config["first_k_dense_replace"] else GatedMLP(args, at)

        super().__init__(config, args, build, mlp, self_attention(args, build))


def _moe_args(config: Mapping[str, Any]) -> MoEArgs:
    rule = RoutingRule(
        config["num_experts_per_tok"],
        "sigmoid",
        renormalise=config["norm_topk_prob"],
        scale=config["routed_scaling_factor"],
        groups=config["n_group"],
        kept_groups=config["topk_group"],
    )
    return MoEArgs(
        hidden_size=config["hidden_size"],
        num_experts=config["n_routed_experts"],
        expert_features=config["moe_intermediate_size"],
        rule=rule,
        hidden_act=config.get("hidden_act", "silu"),
        router_dtype=torch.float32,
        correction_bias=True,
        shared_features=config["n_shared_experts"] * config["moe_intermediate_size"],
    )


MTP_FIELD = "num_nextn_predict_layers"
ARCHITECTURES = {"Glm4MoeForCausalLM": Glm4MoeForCausalLM}
