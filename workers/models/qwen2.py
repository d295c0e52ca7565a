"""Qwen2 and Qwen2.5: as Llama, with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from workers.layers.attention.window import windows_of_types
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

_DEFAULTS = {"rms_norm_eps": 1e-6}


class Qwen2ForCausalLM(DecoderLM):
    """Always with QKV biases; the last layers may have a sliding window."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        args = DecoderArgs(**common_fields(config), qkv_bias=True, windows=windows_of_types(config))
        super().__init__(config, args, build)


ARCHITECTURES = {"Qwen2ForCausalLM": Qwen2ForCausalLM}
