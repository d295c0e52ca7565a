"""Qwen3-MoE: Qwen3 with a mixture of experts in most or all layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from atom_ops import RoutingRule
from workers.layers.attention.window import same_window
from workers.layers.context import BuildContext
from workers.layers.decoder.blocks import FeedForward
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.moe.expert_layouts import PER_EXPERT, ExpertLayout
from workers.layers.moe.moe import MoE, MoEArgs

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}


class Qwen3MoeForCausalLM(DecoderLM):
    """Softmax routing; every `decoder_sparse_step`-th layer has experts."""

    expert_layout: ClassVar[ExpertLayout] = PER_EXPERT
    """How checkpoints of the family store their experts."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        bias = config["attention_bias"]
        args = DecoderArgs(
            **common_fields(config),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            windows=same_window(config),
        )
        experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
        moe = MoEArgs(
            hidden_size=args.hidden_size,
            num_experts=experts,
            expert_features=config["moe_intermediate_size"],
            rule=RoutingRule(config["num_experts_per_tok"], "softmax", renormalise=config["norm_topk_prob"]),
            hidden_act=args.hidden_act,
            layout=self.expert_layout,
        )
        dense = config["mlp_only_layers"] or []
        every = config["decoder_sparse_step"]

        def mlp(layer: int, at: BuildContext) -> FeedForward:
            sparse = experts > 0 and (layer + 1) % every == 0 and layer not in dense
            return MoE(moe, at) if sparse else GatedMLP(args, at)

        super().__init__(config, args, build, mlp)


ARCHITECTURES = {"Qwen3MoeForCausalLM": Qwen3MoeForCausalLM}
