"""Qwen3 (dense): as Llama, with queries and keys normalised head by head before they turn."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.decoder import DecoderArgs, DecoderLM, common_fields
from workers.layers.window import windows_of_types

_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-6, "attention_bias": False}


class Qwen3ForCausalLM(DecoderLM):
    """No biases unless the configuration asks for them; the last layers may have a window."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        stated = {**_DEFAULTS, **config}
        bias = stated["attention_bias"]
        args = DecoderArgs(
            **common_fields(stated),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            windows=windows_of_types(stated),
        )
        super().__init__(config, args, build)


ARCHITECTURES = {"Qwen3ForCausalLM": Qwen3ForCausalLM}
