"""GPT-OSS: sliding windows in every second layer, attention sinks, biases in all projections."""

from collections.abc import Mapping
from typing import Any, ClassVar

from atom_ops import ClampedSwiglu, RoutingRule
from workers.layers.attention.window import windows_by_type
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.moe.expert_layouts import INTERLEAVED
from workers.layers.moe.moe import MoE, MoEArgs

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}


class GptOssForCausalLM(DecoderLM):
    """Routed experts in every layer; published checkpoints store them in MXFP4."""

    renamed_on_disk: ClassVar = {"gate": "router"}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        layers = config["num_hidden_layers"]
        bias = config["attention_bias"]
        types = config.get("layer_types") or _alternating(layers)
        args = DecoderArgs(
            **common_fields(config),
            qkv_bias=bias,
            o_bias=bias,
            sinks=True,
            windows=windows_by_type(types, config["sliding_window"], layers),
        )
        moe = _moe_args(config)
        super().__init__(config, args, build, lambda layer, at: MoE(moe, at))


def _alternating(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


def _moe_args(config: Mapping[str, Any]) -> MoEArgs:
    return MoEArgs(
        hidden_size=config["hidden_size"],
        num_experts=config["num_local_experts"],
        expert_features=config["intermediate_size"],
        rule=RoutingRule(config["num_experts_per_tok"], "softmax_of_topk"),
        activation=ClampedSwiglu(config["swiglu_limit"], config["swiglu_alpha"]),
        router_bias=True,
        expert_bias=True,
        layout=INTERLEAVED,
    )


ARCHITECTURES = {"GptOssForCausalLM": GptOssForCausalLM}
