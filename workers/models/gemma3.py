"""Multimodal Gemma 3: the tokens of an image see each other, in all layers."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from workers.layers.context import BuildContext
from workers.models.gemma3_text import Gemma3ForCausalLM
from workers.vision.attach import attach_tower
from workers.vision.siglip import SiglipTower

CONFIG_DEFAULTS = {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_local_base_freq": 10000.0}
IMAGE_PROCESSOR = "gemma3"
_TOKENS = 256


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """With its vision tower, or the text model alone."""

    # The longer ones first: transformers saves the tower with and without `vision_model`.
    beginnings_on_disk: ClassVar = {
        f"{before}{own}": f"model.visual.{ours}"
        for own, ours in (
            ("vision_tower.vision_model.", ""),
            ("vision_tower.", ""),
            ("multi_modal_projector.", "projector."),
        )
        for before in ("", "model.")
    }

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        tower = partial(SiglipTower, tokens=config.get("mm_tokens_per_image", _TOKENS))
        attach_tower(self, config, build, tower, by_axis=False)
        self.unused_on_disk += ("model.visual.head.*",)


ARCHITECTURES = {"Gemma3ForConditionalGeneration": Gemma3ForConditionalGeneration}
