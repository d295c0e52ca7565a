"""Ministral (2024): Mistral with full attention in some layers."""

from collections.abc import Mapping
from typing import Any

from workers.layers.attention.window import same_window, windows_by_type
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

_DEFAULTS = {"rms_norm_eps": 1e-6, "sliding_window": 4096, "layer_types": None}


class MinistralForCausalLM(DecoderLM):
    """A sliding window in the layers that layer_types names, by default in all."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        types = config["layer_types"]
        window = config["sliding_window"]
        layers = config["num_hidden_layers"]
        windows = same_window(config) if types is None else windows_by_type(types, window, layers)
        super().__init__(config, DecoderArgs(**common_fields(config), windows=windows), build)


ARCHITECTURES = {"MinistralForCausalLM": MinistralForCausalLM}
