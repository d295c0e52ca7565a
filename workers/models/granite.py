"""Granite 3: Llama with factors of embeddings, attention scores, blocks and logits."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

_DEFAULTS = {"rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False}


class GraniteForCausalLM(DecoderLM):
    """Optional biases."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        bias = config["attention_bias"]
        args = DecoderArgs(
            **common_fields(config) | scales(config),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=config["mlp_bias"],
        )
        super().__init__(config, args, build)


def scales(config: Mapping[str, Any]) -> dict[str, float]:
    """Fields of `DecoderArgs` from the four multipliers of config.json, by default 1.

    Each block's output is multiplied by residual_multiplier, m. The hidden states here are those of the
    model divided by m, so that outputs are added as they are: norms do not depend on the scale of
    their input, if their epsilon is divided by m squared.
    """
    m = config.get("residual_multiplier", 1.0)
    return {
        "embedding_scale": config.get("embedding_multiplier", 1.0) / m,
        "rms_norm_eps": config["rms_norm_eps"] / m**2,
        "attention_scale": config.get("attention_multiplier", 1.0),
        "logits_scale": 1.0 / config.get("logits_scaling", 1.0),
    }


ARCHITECTURES = {"GraniteForCausalLM": GraniteForCausalLM}
