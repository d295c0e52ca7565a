"""Qwen3-Next: gated delta networks in most layers, gated attention in the others, experts in all."""

from collections.abc import Mapping
from typing import Any, ClassVar

from atom_ops import RoutingRule
from workers.layers.context import BuildContext
from workers.layers.decoder.blocks import FeedForward
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.delta_decoder import DELTA_DEFAULTS, delta_decoder_args, delta_token_mixers
from workers.layers.delta_mtp import PredictingDeltaLM
from workers.layers.gated_delta_net import DELTA_MODULES
from workers.layers.moe.moe import MoE, MoEArgs

KEEPS_STATES = True
MTP_FIELD = "num_nextn_predict_layers"
CONFIG_DEFAULTS = {"num_nextn_predict_layers": 1}

_DEFAULTS = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True}


class Qwen3NextForCausalLM(PredictingDeltaLM):
    """The tensors for multi-token prediction (mtp.*) are loaded on request."""

    packed_modules_mapping: ClassVar = {**DecoderLM.packed_modules_mapping, **DELTA_MODULES}
    renamed_on_disk: ClassVar = {"shared_experts": "shared_expert"}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**DELTA_DEFAULTS, **_DEFAULTS, **config}
        args = delta_decoder_args(config, build)
        moe = _moe_args(config)
        dense = config["mlp_only_layers"] or []
        every = config["decoder_sparse_step"]

        def mlp(layer: int, at: BuildContext) -> FeedForward:
            sparse = moe.num_experts > 0 and (layer + 1) % every == 0 and layer not in dense
            return MoE(moe, at) if sparse else GatedMLP(args, at)

        super().__init__(config, args, build, mlp, delta_token_mixers(config, args, build))


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
