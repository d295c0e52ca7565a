"""Ministral 3: Mistral whose queries are scaled beyond the trained length."""

from collections.abc import Mapping
from typing import Any

from workers.layers.attention.window import same_window
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

_DEFAULTS = {"rms_norm_eps": 1e-5, "head_dim": 128}


class Ministral3ForCausalLM(DecoderLM):
    """One sliding window for all layers, or none; `rope_parameters` have the scale of the queries."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        args = DecoderArgs(**common_fields(config), windows=same_window(config))
        super().__init__(config, args, build)


ARCHITECTURES = {"Ministral3ForCausalLM": Ministral3ForCausalLM}
