"""OLMo 2: norms after each block instead of before it, and over the queries and keys of all heads."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import POST_NORMS, DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

_DEFAULTS = {"rms_norm_eps": 1e-5, "attention_bias": False}


class Olmo2ForCausalLM(DecoderLM):
    """Optional biases."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        bias = config["attention_bias"]
        args = DecoderArgs(
            **common_fields(config), qkv_bias=bias, o_bias=bias, norm_across_heads=True, norms=POST_NORMS
        )
        super().__init__(config, args, build)


ARCHITECTURES = {"Olmo2ForCausalLM": Olmo2ForCausalLM}
