"""How a checkpoint reads images: config.json, and the settings of transformers' image processor."""

from collections.abc import Mapping
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
_PATCH, _MERGE, _FRAMES = 16, 2, 2
TEXT_ALONE = "this model reads text alone"


def image_settings(directory: Path, config: Mapping[str, Any]) -> tuple[ImageSettings | None, str]:
    """(how images are read, why they are not); `config` is config.json as `read_config` returns it."""
    model_type = config["model_type"]
    vision = read_json(directory / "config.json").get("vision_config")
    if not isinstance(vision, dict):
        return None, TEXT_ALONE
    if not takes_images(model_type):
        return (
            None,
            f"the vision model of {model_type} is not supported: this server runs its text model alone",
        )
    processor = processor_settings(directory)
    if not processor:
        return None, f"the checkpoint has no {PROCESSOR_FILES[0]}, so this server runs its text model alone"
    if problem := _problem(vision, processor):
        return (
            None,
            f"the checkpoint's image processor has {problem}, so this server runs its text model alone",
        )
    patch, merge = vision.get("patch_size", _PATCH), vision.get("spatial_merge_size", _MERGE)
    largest = MAX_PREPARED_BYTES // (3 * (patch * merge) ** 2) * (patch * merge) ** 2
    settings = ImageSettings(
        token_id=config["image_token_id"],
        vision_config=vision,
        patch=patch,
        merge=merge,
        max_pixels=min(pixel_limits(processor)[1], largest),
        scale=processor.get("rescale_factor", 1 / 255),
        mean=list(processor.get("image_mean") or _OF_CLIP[0]),
        std=list(processor.get("image_std") or _OF_CLIP[1]),
    )
    return settings, ""


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


def _problem(vision: Mapping[str, Any], processor: Mapping[str, Any]) -> str:
    """What of the processor is not supported, or does not fit the vision tower; empty if all is well."""
    if (kind := processor["image_processor_type"]) not in _PROCESSORS:
        return f"the type {kind}, not {_PROCESSORS[0]}"
    for name, neutral in _NEUTRAL.items():
        if processor.get(name, neutral) is not neutral:
            return f"{name} {processor[name]}"
    for name, value, wanted in (
        ("patch_size", 14, vision.get("patch_size", _PATCH)),
        ("merge_size", 2, vision.get("spatial_merge_size", _MERGE)),
        ("temporal_patch_size", 2, vision.get("temporal_patch_size", _FRAMES)),
    ):
        if (stated := processor.get(name, value)) != wanted:
            return f"{name} {stated}, where vision_config has {wanted}"
    return ""
