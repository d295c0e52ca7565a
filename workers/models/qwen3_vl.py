"""Qwen3-VL (dense): Qwen3 with a vision tower, some layers of which are added to the first decoder layers."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.models.qwen3 import Qwen3ForCausalLM
from workers.vision.attach import attach_tower
from workers.vision.qwen3_vl import Qwen3VLTower

IMAGE_PROCESSOR = "qwen2_vl"


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """With its vision tower, or the text model alone."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        attach_tower(self, config, build, Qwen3VLTower)


ARCHITECTURES = {"Qwen3VLForConditionalGeneration": Qwen3VLForConditionalGeneration}
