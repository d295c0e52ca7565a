"""SmolLM3: as Llama, without RoPE in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from workers.layers.attention.rotary import layers_with_rope
from workers.layers.attention.window import windows_by_type
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 2000000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
}


class SmolLM3ForCausalLM(DecoderLM):
    """Optional biases; layers without RoPE may have a sliding window."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        fields = common_fields(config)
        has_rope = layers_with_rope(config)
        bias = config["attention_bias"]
        args = DecoderArgs(
            **fields,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=config["mlp_bias"],
            ropes=tuple(fields["rope_parameters"] if each else None for each in has_rope),
            windows=_windows(config, has_rope),
        )
        super().__init__(config, args, build)


def _windows(config: Mapping[str, Any], has_rope: list[bool]) -> tuple[int | None, ...]:
    window = config["sliding_window"] if config["use_sliding_window"] else None
    types = config["layer_types"]
    if types is None:
        sliding = [window is not None and not each for each in has_rope]
        types = ["sliding_attention" if each else "full_attention" for each in sliding]
    return windows_by_type(types, window, config["num_hidden_layers"])


ARCHITECTURES = {"SmolLM3ForCausalLM": SmolLM3ForCausalLM}
