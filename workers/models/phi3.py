"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused matrices in the checkpoint, RoPE on a part of each head."""

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.layers.attention.window import same_window
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM

_DEFAULTS = {"rms_norm_eps": 1e-5}


class Phi3ForCausalLM(DecoderLM):
    """One sliding window for all layers, or none."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ("qkv_proj", "qkv_proj", "qkv_proj"),
        "gate_up_proj": ("gate_up_proj", "gate_up_proj"),
    }

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        args = DecoderArgs(
            **common_fields(config, partial_rotary=True),
            qkv_fused_on_disk=True,
            mlp_fused_on_disk=True,
            windows=same_window(config),
        )
        super().__init__(config, args, build)


ARCHITECTURES = {"Phi3ForCausalLM": Phi3ForCausalLM}
