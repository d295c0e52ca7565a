"""OLMo 3: OLMo 2 with sliding windows in three of four layers, and RoPE scaling in the others."""

from collections.abc import Mapping
from typing import Any

from workers.layers.attention.rotary import ropes_by_type
from workers.layers.attention.window import every_nth_full, windows_by_type
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import POST_NORMS, DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

_DEFAULTS = {"rms_norm_eps": 1e-5, "attention_bias": False, "sliding_window": 4096}
_THETAS = {"full_attention": 500000.0, "sliding_attention": 500000.0}


class Olmo3ForCausalLM(DecoderLM):
    """Optional biases."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        layers = config["num_hidden_layers"]
        types = config.get("layer_types") or every_nth_full(4, layers)
        ropes = ropes_by_type(config, types, _THETAS)
        bias = config["attention_bias"]
        args = DecoderArgs(
            **common_fields({**config, "rope_parameters": ropes[0]}),
            qkv_bias=bias,
            o_bias=bias,
            norm_across_heads=True,
            norms=POST_NORMS,
            windows=windows_by_type(types, config["sliding_window"], layers),
            ropes=ropes,
        )
        super().__init__(config, args, build)


ARCHITECTURES = {"Olmo3ForCausalLM": Olmo3ForCausalLM}
