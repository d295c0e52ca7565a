"""Mistral: as Llama, without biases; every layer may look back over a window only."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.decoder import DecoderArgs, DecoderLM, common_fields
from workers.layers.window import same_window

# A configuration that has no window says so: the first Mistral had one.
_DEFAULTS = {"rms_norm_eps": 1e-6, "sliding_window": 4096}


class MistralForCausalLM(DecoderLM):
    """One window for all layers, or none."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        stated = {**_DEFAULTS, **config}
        args = DecoderArgs(**common_fields(stated), windows=same_window(stated))
        super().__init__(config, args, build)


ARCHITECTURES = {"MistralForCausalLM": MistralForCausalLM}
