"""Llama 2, 3 and 3.1, and models with the same architecture (SmolLM2, TinyLlama, …)."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

_DEFAULTS = {"rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False}


class LlamaForCausalLM(DecoderLM):
    """The plain decoder, with optional biases."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        bias = config["attention_bias"]
        args = DecoderArgs(**common_fields(config), qkv_bias=bias, o_bias=bias, mlp_bias=config["mlp_bias"])
        super().__init__(config, args, build)


ARCHITECTURES = {"LlamaForCausalLM": LlamaForCausalLM}
