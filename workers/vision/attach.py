"""Adds a vision tower to a language model whose checkpoint is multimodal."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.quantization.config import QuantizationConfig
from workers.vision.tower import VisionTower

_PATH = "model.visual"

MakeTower = Callable[[Mapping[str, Any], int, BuildContext], VisionTower]
"""Makes a tower from vision_config, the features of the language model, and the context."""


def attach_tower(
    model: DecoderLM, config: Mapping[str, Any], build: BuildContext, make: MakeTower, by_axis: bool = True
) -> None:
    """Add the tower that `vision_config` describes; without it, the checkpoint's tower is not loaded.

    `by_axis`: images have RoPE positions by axis. Raises ValueError for a tower that is not supported.
    """
    vision = config.get("vision_config")
    if vision is None:
        model.unused_on_disk += (f"{_PATH}.*",)
        return
    if by_axis and "mrope_section" not in config["rope_parameters"]:
        raise ValueError("config.json lacks rope_parameters.mrope_section, which images need")
    # Quantized online, its few matrices would save little and cost each image its details.
    if build.quantization.online is not None:
        build = replace(build, quantization=QuantizationConfig())
    model.model.visual = make(vision, config["hidden_size"], build.at(_PATH))
