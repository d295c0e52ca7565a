"""Qwen3.5 with experts in all layers; otherwise as the dense one.

Published checkpoints have a vision tower.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from atom_ops import RoutingRule
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.delta_decoder import DELTA_DEFAULTS, delta_decoder_args, delta_token_mixers
from workers.layers.delta_mtp import PredictingDeltaLM
from workers.layers.gated_delta_net import DELTA_MODULES_BY_KIND
from workers.layers.moe.expert_layouts import PER_EXPERT_OR_STACKED
from workers.layers.moe.moe import MoE, MoEArgs
from workers.vision.attach import attach_tower
from workers.vision.qwen3_vl import Qwen3VLTower

KEEPS_STATES = True
MTP_FIELD = "mtp_num_hidden_layers"
IMAGE_PROCESSOR = "qwen2_vl"


class Qwen3_5MoeForCausalLM(PredictingDeltaLM):
    """The tensors for multi-token prediction (mtp.*) are loaded on request."""

    packed_modules_mapping: ClassVar = {**DecoderLM.packed_modules_mapping, **DELTA_MODULES_BY_KIND}
    renamed_on_disk: ClassVar = {"shared_experts": "shared_expert"}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        # No layer is dense, so the config has no intermediate_size.
        config = {**DELTA_DEFAULTS, **config, "intermediate_size": config["moe_intermediate_size"]}
        args = delta_decoder_args(config, build)
        moe = _moe_args(config)
        mixers = delta_token_mixers(config, args, build, by_kind=True)
        super().__init__(config, args, build, lambda layer, at: MoE(moe, at), mixers)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """With a vision tower, or the text model alone of a checkpoint that has one."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        attach_tower(self, config, build, Qwen3VLTower)


def _moe_args(config: Mapping[str, Any]) -> MoEArgs:
    return MoEArgs(
        hidden_size=config["hidden_size"],
        num_experts=config["num_experts"],
        expert_features=config["moe_intermediate_size"],
        rule=RoutingRule(config["num_experts_per_tok"], "softmax", renormalise=True),
        hidden_act=config.get("hidden_act", "silu"),
        shared_features=config["shared_expert_intermediate_size"],
        shared_gate=True,
        layout=PER_EXPERT_OR_STACKED,
    )


ARCHITECTURES = {
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeForConditionalGeneration,
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeForCausalLM,
}
