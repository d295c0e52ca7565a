"""Qwen3-VL with experts: Qwen3-MoE with the vision tower of the dense one, its experts stored stacked."""

from collections.abc import Mapping
from typing import Any, ClassVar

from workers.layers.context import BuildContext
from workers.layers.moe.expert_layouts import INPUTS_FIRST, ExpertLayout
from workers.models.qwen3_moe import Qwen3MoeForCausalLM
from workers.vision.attach import attach_tower
from workers.vision.qwen3_vl import Qwen3VLTower

IMAGE_PROCESSOR = "qwen2_vl"


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    """With its vision tower, or the text model alone. Weights of experts always sum to one."""

    expert_layout: ClassVar[ExpertLayout] = INPUTS_FIRST

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__({**config, "norm_topk_prob": True}, build)
        attach_tower(self, config, build, Qwen3VLTower)


ARCHITECTURES = {"Qwen3VLMoeForConditionalGeneration": Qwen3VLMoeForConditionalGeneration}
