"""GPT-OSS: windows in every second layer, a score for nothing in each head, biases everywhere."""

from collections.abc import Mapping
from typing import Any, ClassVar

from atom_ops import ClampedSwiglu, RoutingRule
from workers.layers.context import BuildContext
from workers.layers.decoder import DecoderArgs, DecoderLM, common_fields
from workers.layers.expert_forms import Interleaved, InterleavedMXFP4
from workers.layers.moe import MoE, MoEArgs
from workers.layers.window import windows_by_type

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}


class GptOssForCausalLM(DecoderLM):
    """Every layer has experts and nothing beside them. As published they are packed."""

    renamed_on_disk: ClassVar = {"gate": "router"}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        stated = {**_DEFAULTS, **config}
        layers, bias = stated["num_hidden_layers"], stated["attention_bias"]
        types = stated.get("layer_types") or _alternating(layers)
        args = DecoderArgs(
            **common_fields(stated),
            qkv_bias=bias,
            o_bias=bias,
            sinks=True,
            windows=windows_by_type(types, stated["sliding_window"], layers),
        )
        moe = _moe_args(stated)
        super().__init__(config, args, build, lambda layer: MoE(moe, build))


def _alternating(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


def _moe_args(stated: Mapping[str, Any]) -> MoEArgs:
    packed = "quantization_config" in stated
    return MoEArgs(
        hidden_size=stated["hidden_size"],
        num_experts=stated["num_local_experts"],
        expert_features=stated["intermediate_size"],
        rule=RoutingRule(stated["num_experts_per_tok"], "softmax_of_chosen"),
        activation=ClampedSwiglu(stated["swiglu_limit"], stated["swiglu_alpha"]),
        router_bias=True,
        expert_bias=True,
        form=InterleavedMXFP4() if packed else Interleaved(),
    )


ARCHITECTURES = {"GptOssForCausalLM": GptOssForCausalLM}
