"""Qwen3 (dense): as Llama, with Q/K norms before RoPE."""

from collections.abc import Mapping
from typing import Any

from workers.layers.attention.window import windows_of_types
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-6, "attention_bias": False}


class Qwen3ForCausalLM(DecoderLM):
    """Optional biases; the last layers may have a sliding window."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        bias = config["attention_bias"]
        args = DecoderArgs(
            **common_fields(config),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            windows=windows_of_types(config),
        )
        super().__init__(config, args, build)


ARCHITECTURES = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
