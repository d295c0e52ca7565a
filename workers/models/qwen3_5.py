"""Qwen3.5 (dense): gated delta networks in most layers, gated attention in the others.

Published checkpoints have a vision tower.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.decoder.gated_mlp import GatedMLP
from workers.layers.delta_decoder import DELTA_DEFAULTS, delta_decoder_args, delta_token_mixers
from workers.layers.delta_mtp import PredictingDeltaLM
from workers.layers.gated_delta_net import DELTA_MODULES_BY_KIND
from workers.vision.attach import attach_tower
from workers.vision.qwen3_vl import Qwen3VLTower

KEEPS_STATES = True
MTP_FIELD = "mtp_num_hidden_layers"
IMAGE_PROCESSOR = "qwen2_vl"


class Qwen3_5ForCausalLM(PredictingDeltaLM):
    """The tensors for multi-token prediction (mtp.*) are loaded on request."""

    packed_modules_mapping: ClassVar = {**DecoderLM.packed_modules_mapping, **DELTA_MODULES_BY_KIND}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**DELTA_DEFAULTS, **config}
        args = delta_decoder_args(config, build)
        mixers = delta_token_mixers(config, args, build, by_kind=True)
        super().__init__(config, args, build, lambda layer, at: GatedMLP(args, at), mixers)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """With a vision tower, or the text model alone of a checkpoint that has one."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        attach_tower(self, config, build, Qwen3VLTower)


ARCHITECTURES = {
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForConditionalGeneration,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
}
