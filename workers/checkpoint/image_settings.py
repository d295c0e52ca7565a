"""How a checkpoint reads images: config.json, and the settings of transformers' image processor."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atom.shared.config.checkpoint import ImageSettings
from atom.shared.messages.images import MAX_PREPARED_BYTES
from workers.checkpoint.families import takes_images
from workers.checkpoint.hf_config import read_json

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_NEUTRAL = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
_OF_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280


def image_settings(directory: Path, config: Mapping[str, Any]) -> tuple[ImageSettings | None, str]:
    """(how images are read, why they are not); `config` is config.json as `read_config` returns it.

    Raises ValueError for settings that contradict each other.
    """
    model_type = config["model_type"]
    vision = read_json(directory / "config.json").get("vision_config")
    if not isinstance(vision, dict):
        return None, "this model reads text alone"
    if not takes_images(model_type):
        return (
            None,
            f"the vision model of {model_type} is not supported: this server runs its text model alone",
        )
    if find_spec("PIL") is None:
        return None, "this server has no Pillow to read images with: its administrator can pip install pillow"
    processor = processor_settings(directory)
    if not processor:
        return None, f"the checkpoint has no {PROCESSOR_FILES[0]}, so this server runs its text model alone"
    return _settings(directory, config, vision, processor), ""


def processor_settings(directory: Path) -> dict[str, Any]:
    """The settings of the image processor, from the first file that has some; empty without any."""
    for name in PROCESSOR_FILES:
        found = read_json(directory / name, missing_is_empty=True)
        found = found.get("image_processor", found) if name == PROCESSOR_FILES[1] else found
        if "image_processor_type" in found:
            return found
    return {}


def pixel_limits(processor: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the most pixels of an image after scaling."""
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS
    most = processor.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS
    return int(least), int(most)


def _settings(
    directory: Path, config: Mapping[str, Any], vision: dict[str, Any], processor: Mapping[str, Any]
) -> ImageSettings:
    kind = processor["image_processor_type"]
    if kind not in _PROCESSORS:
        raise ValueError(f"{directory}: image processor {kind} is not supported, {_PROCESSORS[0]} is")
    for name, value in _NEUTRAL.items():
        if processor.get(name, value) is not value:
            raise ValueError(
                f"{directory}: an image processor with {name} {processor[name]} is not supported"
            )
    patch, merge = processor.get("patch_size", 14), processor.get("merge_size", 2)
    for name, value, wanted in (
        ("patch_size", patch, vision.get("patch_size", 16)),
        ("merge_size", merge, vision.get("spatial_merge_size", 2)),
        (
            "temporal_patch_size",
            processor.get("temporal_patch_size", 2),
            vision.get("temporal_patch_size", 2),
        ),
    ):
        if value != wanted:
            raise ValueError(
                f"{directory}: the image processor has {name} {value}, and vision_config has {wanted}"
            )
    largest = MAX_PREPARED_BYTES // (3 * (patch * merge) ** 2) * (patch * merge) ** 2
    return ImageSettings(
        token_id=config["image_token_id"],
        vision_config=vision,
        patch=patch,
        merge=merge,
        max_pixels=min(pixel_limits(processor)[1], largest),
        scale=processor.get("rescale_factor", 1 / 255),
        mean=list(processor.get("image_mean") or _OF_CLIP[0]),
        std=list(processor.get("image_std") or _OF_CLIP[1]),
    )
