"""GLM-4.5 to 4.7 (with experts): a part of each head turns, and experts are chosen by sigmoid scores."""

from collections.abc import Mapping
from typing import Any

import torch

from atom_ops import RoutingRule
from workers.layers.context import BuildContext
from workers.layers.decoder import DecoderArgs, DecoderLM, FeedForward, GatedMLP, common_fields
from workers.layers.moe import MoE, MoEArgs

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


class Glm4MoeForCausalLM(DecoderLM):
    """The first layers are dense; in the others every token also passes the shared experts.

    The layers behind the last one predict further tokens; they are not loaded.
    """

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        stated = {**_DEFAULTS, **config}
        args = DecoderArgs(
            **common_fields(stated, partial_rotary=True),
            qkv_bias=stated["attention_bias"],
            qk_norm=stated["use_qk_norm"],
        )
        moe = _moe_args(stated)

        def mlp(layer: int) -> FeedForward:
            return MoE(moe, build) if layer >= stated["first_k_dense_replace"] else GatedMLP(args, build)

        super().__init__(config, args, build, mlp)
        first, count = args.num_hidden_layers, stated["num_nextn_predict_layers"] or 0
        predicting = range(first, first + count)
        self.unused_on_disk += tuple(f"model.layers.{layer}.*" for layer in predicting)


def _moe_args(stated: Mapping[str, Any]) -> MoEArgs:
    rule = RoutingRule(
        stated["num_experts_per_tok"],
        "sigmoid",
        renormalise=stated["norm_topk_prob"],
        scale=stated["routed_scaling_factor"],
        groups=stated["n_group"],
        kept_groups=stated["topk_group"],
    )
    return MoEArgs(
        hidden_size=stated["hidden_size"],
        num_experts=stated["n_routed_experts"],
        expert_features=stated["moe_intermediate_size"],
        rule=rule,
        hidden_act=stated.get("hidden_act", "silu"),
        router_dtype=torch.float32,
        correction_bias=True,
        shared_features=stated["n_shared_experts"] * stated["moe_intermediate_size"],
    )


ARCHITECTURES = {"Glm4MoeForCausalLM": Glm4MoeForCausalLM}
