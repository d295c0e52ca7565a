"""Kimi-K2.5 and K2.6: the text model, of DeepSeek V3's architecture, of multimodal checkpoints."""

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.layers.context import BuildContext
from workers.models.deepseek_v3 import DeepseekV3ForCausalLM


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
    """The vision model and its projector are not loaded."""

    renamed_on_disk: ClassVar = {"model": "language_model.model", "lm_head": "language_model.lm_head"}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        self.unused_on_disk += ("vision_tower.*", "mm_projector.*")


ARCHITECTURES = {"KimiK25ForConditionalGeneration": KimiK25ForConditionalGeneration}
