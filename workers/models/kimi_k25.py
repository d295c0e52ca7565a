"""Kimi-K2.5 and K2.6: the text model, of DeepSeek V3's architecture, of multimodal checkpoints."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.models.deepseek_v3 import DeepseekV3ForCausalLM


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
    """The vision model and its projector are not loaded."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        self.unused_on_disk += ("mm_projector.*",)


ARCHITECTURES = {"KimiK25ForConditionalGeneration": KimiK25ForConditionalGeneration}
