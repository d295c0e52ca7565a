"""Kimi-K2.5 and K2.6: a text model of DeepSeek V3's architecture, and the vision tower MoonViT."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from workers.layers.context import BuildContext
from workers.models.deepseek_v3 import DeepseekV3ForCausalLM
from workers.vision.attach import attach_tower
from workers.vision.moonvit import MoonVitTower

IMAGE_PROCESSOR = "kimi_k25"
_EPS = 1e-5


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
    """With its vision tower, or the text model alone."""

    beginnings_on_disk: ClassVar = {
        "vision_tower.encoder.": "model.visual.",
        "vision_tower.": "model.visual.",
        "mm_projector.": "model.visual.projector.",
    }

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        vision = config.get("vision_config", {})
        eps = vision.get("projector_ln_eps", config.get("projection_layer_norm_eps", _EPS))
        attach_tower(self, config, build, partial(MoonVitTower, eps=eps), by_axis=False)


ARCHITECTURES = {"KimiK25ForConditionalGeneration": KimiK25ForConditionalGeneration}
