"""How a checkpoint reads images: config.json, and the settings of transformers' image processor."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from atom.shared.config.checkpoint import ImageSettings
from atom.shared.messages.images import MAX_PREPARED_BYTES
from workers.checkpoint.families import image_processor
from workers.checkpoint.hf_config import read_json
from workers.checkpoint.tokenizer_files import token_text

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_NEUTRAL = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True, None),
}
_OF_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_PATCH, _MERGE, _FRAMES = 16, 2, 2
_PUBLISHED = "media_proc_cfg"
"""The object in which Kimi's own checkpoints have the settings."""
TEXT_ALONE = "this model reads text alone"


def image_settings(
    directory: Path, config: Mapping[str, Any], tokenizer: Path | None = None
) -> tuple[ImageSettings | None, str]:
    """(how images are read, why they are not); `config` is config.json as `read_config` returns it.

    `tokenizer` is the tokenizer.json in use.
    """
    model_type = config["model_type"]
    vision = read_json(directory / "config.json").get("vision_config")
    if not isinstance(vision, dict):
        return None, TEXT_ALONE
    kind = image_processor(model_type)
    if kind is None:
        return (
            None,
            f"the vision model of {model_type} is not supported: this server runs its text model alone",
        )
    processor = processor_settings(directory)
    if not processor:
        return None, f"the checkpoint has no {PROCESSOR_FILES[0]}, so this server runs its text model alone"
    try:
        return _READERS[kind](_Files(config, vision, processor, tokenizer)), ""
    except _Unsupported as problem:
        return None, f"{problem}, so this server runs its text model alone"


@dataclass(frozen=True, slots=True)
class _Files:
    """What is known of a checkpoint that has a vision model and an image processor."""

    config: Mapping[str, Any]
    vision: dict[str, Any]
    processor: Mapping[str, Any]
    tokenizer: Path | None


class _Unsupported(Exception):
    """What of the checkpoint rules out images."""


def _qwen2_vl(files: _Files) -> ImageSettings:
    vision, processor = files.vision, files.processor
    patch, merge = vision.get("patch_size", _PATCH), vision.get("spatial_merge_size", _MERGE)
    _check_type(processor, _PROCESSORS)
    _check_equal(processor, "vision_config", ("patch_size", 14, patch), ("merge_size", 2, merge))
    frames = vision.get("temporal_patch_size", _FRAMES)
    _check_equal(processor, "vision_config", ("temporal_patch_size", 2, frames))
    largest = MAX_PREPARED_BYTES // (3 * (patch * merge) ** 2) * (patch * merge) ** 2
    return ImageSettings(
        token_id=files.config["image_token_id"],
        vision_config=vision,
        patch=patch,
        merge=merge,
        max_pixels=min(pixel_limits(processor)[1], largest),
        scale=processor.get("rescale_factor", 1 / 255),
        mean=list(processor.get("image_mean") or _OF_CLIP[0]),
        std=list(processor.get("image_std") or _OF_CLIP[1]),
    )


def _gemma3(files: _Files) -> ImageSettings:
    """Every image is scaled to one square, and has as many tokens as any other."""
    config, vision, processor = files.config, files.vision, files.processor
    side, patch = vision.get("image_size", 224), vision.get("patch_size", 16)
    tokens = config.get("mm_tokens_per_image", 256)
    across = math.isqrt(tokens)
    merge = side // patch // max(across, 1)
    if merge < 1 or across**2 != tokens or merge * across * patch != side:
        raise _Unsupported(
            f"config.json has mm_tokens_per_image {tokens}, and {side} x {side} pixels in patches of {patch} "
            "are no such square of tokens"
        )
    _check_type(processor, ("Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil"))
    if processor.get("do_pan_and_scan"):
        raise _Unsupported("the checkpoint's image processor has do_pan_and_scan, which is not supported")
    size = processor.get("size") or {"height": 224, "width": 224}
    for name in ("height", "width"):
        _check_equal(size, "vision_config.image_size", (name, None, side))
    _check_equal(processor, "mm_tokens_per_image", ("image_seq_length", tokens, tokens))
    image = config.get("image_token_index", 262144)
    texts = [
        _token_text(files, config.get(name, default))
        for name, default in (("boi_token_index", 255999), ("eoi_token_index", 256000))
    ]
    half = [0.5, 0.5, 0.5]
    return ImageSettings(
        token_id=image,
        vision_config=vision,
        patch=patch,
        merge=merge,
        max_pixels=side**2,
        scale=processor.get("rescale_factor", 1 / 255),
        mean=list(processor.get("image_mean") or half),
        std=list(processor.get("image_std") or half),
        processor="gemma3",
        by_axis=False,
        sees_ahead=True,
        template_text=texts[0],
        prompt_text=f"\n\n{texts[0]}{_token_text(files, image)}{texts[1]}\n\n",
    )


def _kimi_k25(files: _Files) -> ImageSettings:
    config, vision, processor = files.config, files.vision, files.processor
    patch, merge = vision.get("patch_size", 14), vision.get("merge_kernel_size", 2)
    merge = merge if isinstance(merge, int) else merge[0]
    stated = processor.get(_PUBLISHED, processor)
    if _PUBLISHED not in processor:
        _check_type(processor, ("Kimi_K25ImageProcessor",))
    _check_equal(stated, "vision_config", ("patch_size", 14, patch))
    for name in ("merge_kernel_size", "merge_size"):
        _check_equal(stated, "vision_config", (name, merge, merge))
    if stated.get("fixed_output_tokens") is not None:
        raise _Unsupported("the checkpoint's image processor has fixed_output_tokens, which is not supported")
    placeholder = config.get("media_placeholder_token_id", config.get("image_token_id", 163605))
    half = [0.5, 0.5, 0.5]
    return ImageSettings(
        token_id=_checked_id(files, placeholder),
        vision_config=vision,
        patch=patch,
        merge=merge,
        max_pixels=patch_limits(processor, patch, merge).tokens * (patch * merge) ** 2,
        scale=stated.get("rescale_factor", 1 / 255),
        mean=list(stated.get("image_mean") or half),
        std=list(stated.get("image_std") or half),
        processor="kimi_k25",
        by_axis=False,
    )


_READERS: Mapping[str, Callable[[_Files], ImageSettings]] = {
    "qwen2_vl": _qwen2_vl,
    "gemma3": _gemma3,
    "kimi_k25": _kimi_k25,
}
"""By what model files declare as IMAGE_PROCESSOR; each raises _Unsupported, KeyError."""


def _checked_id(files: _Files, number: int) -> int:
    if number >= files.config["vocab_size"]:
        raise _Unsupported(f"the token {number} of images is beyond the vocabulary")
    return number


def _token_text(files: _Files, number: int) -> str:
    """The text of an added token; empty without a tokenizer, as there are no chats then."""
    number = _checked_id(files, number)
    if files.tokenizer is None:
        return ""
    text = token_text(files.tokenizer, number)
    if text is None:
        raise _Unsupported(f"the tokenizer has no added token {number}, which images need")
    return text


def processor_settings(directory: Path) -> dict[str, Any]:
    """The settings of the image processor, from the first file that has some; empty without any."""
    for name in PROCESSOR_FILES:
        found = read_json(directory / name, missing_is_empty=True)
        found = found.get("image_processor", found) if name == PROCESSOR_FILES[1] else found
        if "image_processor_type" in found or _PUBLISHED in found:
            return found
    return {}


class PatchLimits(NamedTuple):
    """How large the images of Kimi's processor may be."""

    patches: int
    """Larger images are scaled down to so many patches, of which parts count as none."""
    side: int
    """The same for the patches of a side."""
    tokens: int
    """Those of the largest image, padded to whole tokens."""


def patch_limits(processor: Mapping[str, Any], patch: int, merge: int) -> PatchLimits:
    """The limits in the published form, or in that of transformers; within those of a prepared image."""
    if (published := processor.get(_PUBLISHED)) is not None:
        patches = published.get("in_patch_limit", 16384)
        side = published.get("patch_limit_on_one_side", 512)
    else:
        patches = processor.get("max_patches", 16384)
        side = (processor.get("size") or {}).get("max_height", 512)
    most = MAX_PREPARED_BYTES // (3 * (patch * merge) ** 2)
    side = min(side, most // 4 * merge)
    padding = 2 * (side // merge)  # a row and a column
    patches = min(patches, (most - padding) * merge**2)
    return PatchLimits(patches, side, patches // merge**2 + padding)


def pixel_limits(processor: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the most pixels of an image after scaling."""
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS
    most = processor.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS
    return int(least), int(most)


def _check_type(processor: Mapping[str, Any], supported: Sequence[str]) -> None:
    """Raise _Unsupported for another processor, and for steps that it leaves out."""
    if (kind := processor.get("image_processor_type")) not in supported:
        raise _Unsupported(f"the checkpoint's image processor has the type {kind}, not {supported[0]}")
    for name, neutral in _NEUTRAL.items():
        if processor.get(name, True) not in neutral:
            raise _Unsupported(f"the checkpoint's image processor has {name} {processor[name]}")


def _check_equal(stated: Mapping[str, Any], other: str, *fields: tuple[str, Any, Any]) -> None:
    """Raise _Unsupported where a field, or its default, is not what `other` has: (name, default, wanted)."""
    for name, default, wanted in fields:
        if (value := stated.get(name, default)) != wanted:
            raise _Unsupported(
                f"the checkpoint's image processor has {name} {value}, where {other} has {wanted}"
            )
