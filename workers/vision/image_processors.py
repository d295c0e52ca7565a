"""transformers' image processors, which scale images and cut them into patches; the workers normalise."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atom.shared.config.checkpoint import ImageSettings
from workers.checkpoint.image_settings import PatchLimits, patch_limits, pixel_limits, processor_settings

if TYPE_CHECKING:
    from PIL.Image import Image

Prepare = Callable[["Image"], tuple[int, int, bytes]]
"""(tokens in a column, tokens in a row, pixels) of an RGB image; pixels as `atom.shared.messages.images` has
them. Raises ValueError for an image that cannot be used."""

_BYTES_ALONE = {"do_rescale": False, "do_normalize": False}


def make_processor(directory: Path, settings: ImageSettings) -> Prepare:
    """What prepares the images of a checkpoint."""
    return _MAKERS[settings.processor](processor_settings(directory), settings)


def _qwen2_vl(stated: Mapping[str, Any], settings: ImageSettings) -> Prepare:
    from transformers import Qwen2VLImageProcessorPil

    kept = {name: value for name, value in stated.items() if name not in ("min_pixels", "max_pixels")}
    size = {"shortest_edge": pixel_limits(stated)[0], "longest_edge": settings.max_pixels}
    processor = Qwen2VLImageProcessorPil.from_dict(kept | {"size": size} | _BYTES_ALONE)

    def prepare(image: "Image") -> tuple[int, int, bytes]:
        found = processor(images=image, return_tensors="np")
        _, rows, columns = found["image_grid_thw"][0].tolist()
        frames = found["pixel_values"].reshape(rows * columns, 3, -1, settings.patch**2)
        pixels = frames[:, :, 0].astype("uint8").tobytes()
        return rows // settings.merge, columns // settings.merge, pixels

    return prepare


def _gemma3(stated: Mapping[str, Any], settings: ImageSettings) -> Prepare:
    from transformers import Gemma3ImageProcessorPil

    processor = Gemma3ImageProcessorPil.from_dict({**stated, **_BYTES_ALONE, "do_pan_and_scan": False})

    def prepare(image: "Image") -> tuple[int, int, bytes]:
        return in_tokens(processor(images=image, return_tensors="np")["pixel_values"][0], settings)

    return prepare


def _kimi_k25(stated: Mapping[str, Any], settings: ImageSettings) -> Prepare:
    """As the checkpoint's own processor, with Pillow; transformers' needs torchvision."""
    from PIL.Image import Resampling

    limits = patch_limits(stated, settings.patch, settings.merge)
    unit = settings.patch * settings.merge

    def prepare(image: "Image") -> tuple[int, int, bytes]:
        width, height = scaled(image.size, limits, settings.patch)
        rows, columns = -(-height // unit), -(-width // unit)
        if rows * columns > limits.tokens:
            raise ValueError(
                f"{width} x {height} pixels take {rows * columns} tokens, and {limits.tokens} are possible"
            )
        padded_CHW = np.zeros((3, rows * unit, columns * unit), np.uint8)
        resized = image.resize((width, height), Resampling.BICUBIC)
        padded_CHW[:, :height, :width] = np.asarray(resized).transpose(2, 0, 1)
        return in_tokens(padded_CHW, settings)

    return prepare


def scaled(size: tuple[int, int], limits: PatchLimits, patch: int) -> tuple[int, int]:
    """Width and height of an image once it has few enough patches; images are never enlarged."""
    width, height = size
    longest = limits.side * patch
    whole = max(width // patch, 1) * max(height // patch, 1)
    scale = min(1.0, math.sqrt(limits.patches / whole), longest / width, longest / height)
    width, height = (min(max(int(side * scale), 1), longest) for side in size)
    return width, height


def in_tokens(image_CHW: NDArray[Any], settings: ImageSettings) -> tuple[int, int, bytes]:
    """What `Prepare` returns, of an image of whole tokens whose pixels are 0 .. 255."""
    patch, merge = settings.patch, settings.merge
    channels, height, width = image_CHW.shape
    rows, columns = (side // (patch * merge) for side in (height, width))
    cut = image_CHW.reshape(channels, rows, merge, patch, columns, merge, patch)
    return rows, columns, cut.transpose(1, 4, 2, 5, 0, 3, 6).astype(np.uint8).tobytes()


_MAKERS: Mapping[str, Callable[[Mapping[str, Any], ImageSettings], Prepare]] = {
    "qwen2_vl": _qwen2_vl,
    "gemma3": _gemma3,
    "kimi_k25": _kimi_k25,
}
"""By what model files declare as IMAGE_PROCESSOR."""
