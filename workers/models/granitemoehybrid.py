"""Granite 4 without experts and recurrent layers (350M, 1B): Granite 3 with fused matrices."""

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.models.granite import scales

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "num_local_experts": 8,
    "layer_types": ("mamba",),
    "position_embedding_type": None,
}
_ATTENTION = {"attention", "full_attention"}


class GraniteMoeHybridForCausalLM(DecoderLM):
    """Layers of attention and a dense MLP, with or without RoPE; others are refused."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "input_linear": ("input_linear", "input_linear"),
    }
    renamed_on_disk: ClassVar = {
        "mlp": "shared_mlp",
        "gate_up_proj": "input_linear",
        "down_proj": "output_linear",
    }

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        if others := set(config["layer_types"]) - _ATTENTION:
            raise ValueError(f"granitemoehybrid with layers of type {min(others)} is not supported")
        if config["num_local_experts"]:
            raise ValueError("granitemoehybrid with num_local_experts above 0 is not supported")
        fields = common_fields({**config, "intermediate_size": config["shared_intermediate_size"]})
        bias = config["attention_bias"]
        has_rope = config["position_embedding_type"] == "rope"
        args = DecoderArgs(
            **fields | scales(config),
            qkv_bias=bias,
            o_bias=bias,
            mlp_fused_on_disk=True,
            ropes=() if has_rope else (None,) * config["num_hidden_layers"],
        )
        super().__init__(config, args, build)


ARCHITECTURES = {"GraniteMoeHybridForCausalLM": GraniteMoeHybridForCausalLM}
