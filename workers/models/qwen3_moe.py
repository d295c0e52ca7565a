"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers, or in all."""

from collections.abc import Mapping
from typing import Any

from atom_ops import RoutingRule
from workers.layers.context import BuildContext
from workers.layers.decoder import DecoderArgs, DecoderLM, FeedForward, GatedMLP, common_fields
from workers.layers.moe import MoE, MoEArgs
from workers.layers.window import same_window

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}


class Qwen3MoeForCausalLM(DecoderLM):
    """Scores are a softmax over all experts; every `decoder_sparse_step`-th layer has some."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        stated = {**_DEFAULTS, **config}
        bias = stated["attention_bias"]
        args = DecoderArgs(
            **common_fields(stated),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            windows=same_window(stated),
        )
        experts = stated["num_experts"] if "num_experts" in stated else stated["num_local_experts"]
        moe = MoEArgs(
            hidden_size=args.hidden_size,
            num_experts=experts,
            expert_features=stated["moe_intermediate_size"],
            rule=RoutingRule(stated["num_experts_per_tok"], "softmax", renormalise=stated["norm_topk_prob"]),
            hidden_act=args.hidden_act,
        )
        dense = stated["mlp_only_layers"] or []
        every = stated["decoder_sparse_step"]

        def mlp(layer: int) -> FeedForward:
            sparse = experts > 0 and (layer + 1) % every == 0 and layer not in dense
            return MoE(moe, build) if sparse else GatedMLP(args, build)

        super().__init__(config, args, build, mlp)


ARCHITECTURES = {"Qwen3MoeForCausalLM": Qwen3MoeForCausalLM}
