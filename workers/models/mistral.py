"""Mistral: as Llama, without biases, with an optional sliding window."""

from collections.abc import Mapping
from typing import Any

from workers.layers.attention.window import same_window
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

# Configurations without a window set sliding_window to null; the default is that of the first Mistral.
_DEFAULTS = {"rms_norm_eps": 1e-6, "sliding_window": 4096}


class MistralForCausalLM(DecoderLM):
    """One sliding window for all layers, or none."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        args = DecoderArgs(**common_fields(config), windows=same_window(config))
        super().__init__(config, args, build)


ARCHITECTURES = {"MistralForCausalLM": MistralForCausalLM}
