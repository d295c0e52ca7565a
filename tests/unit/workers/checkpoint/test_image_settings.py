"""Whether a checkpoint's images are read, and how."""

import json
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.checkpoint import ImageSettings
from tests.helpers.checkpoints.vision_models import GEMMA3, KIMI, MERGE, MODELS, PATCH, PROCESSOR, PROCESSORS
from workers.checkpoint.image_settings import PatchLimits, image_settings, patch_limits

VISION = MODELS["qwen3_vl"][1]


def settings(directory: Path, model_type: str = "qwen3_vl", processor: Any = PROCESSOR, **vision: Any) -> Any:
    config = {"model_type": model_type, "vision_config": VISION | vision, "image_token_id": 7}
    (directory / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return image_settings(directory, config)


def test_the_settings_of_a_processor(tmp_path: Path) -> None:
    found, why = settings(tmp_path)
    assert not why
    assert (found.token_id, found.patch, found.merge) == (7, PATCH, MERGE)
    assert found.max_tokens == 48 and found.mean == PROCESSOR["image_mean"]
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))
    (tmp_path / "preprocessor_config.json").unlink()
    assert settings(tmp_path, processor=None)[0] == found


def test_the_largest_image_fits_a_message(tmp_path: Path) -> None:
    found, _ = settings(tmp_path, processor=PROCESSOR | {"size": {"longest_edge": 1 << 30}})
    assert found.max_tokens * found.token_bytes <= 24 << 20


def test_why_there_are_none(tmp_path: Path) -> None:
    assert "no preprocessor_config.json" in settings(tmp_path, processor=None)[1]
    assert "vision model of llama4" in settings(tmp_path, "llama4")[1]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "text alone" in image_settings(tmp_path, {"model_type": "qwen3"})[1]


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "the type CLIPImageProcessor"),
        ({"do_resize": False}, "do_resize False"),
        ({"patch_size": 14}, "patch_size 14, where vision_config has 4"),
    ],
)
def test_settings_that_do_not_fit(processor: dict[str, Any], why: str, tmp_path: Path) -> None:
    found, reason = settings(tmp_path, processor=PROCESSOR | processor)
    assert found is None and why in reason and "text model alone" in reason


TEXTS = {20: "<image_soft_token>", 21: "<start_of_image>", 22: "<end_of_image>"}


def gemma3(directory: Path, processor: dict[str, Any], **changes: Any) -> tuple[ImageSettings | None, str]:
    config = {"model_type": "gemma3", "vision_config": GEMMA3[1], "vocab_size": 30} | changes
    config = {"mm_tokens_per_image": 16, "image_token_index": 20, "boi_token_index": 21} | config
    config = {"eoi_token_index": 22, **config}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["gemma3"] | processor))
    tokenizer = directory / "tokenizer.json"
    added = [{"id": number, "content": text} for number, text in TEXTS.items()]
    tokenizer.write_text(json.dumps({"added_tokens": added}))
    return image_settings(directory, config, tokenizer)


def test_images_of_one_size(tmp_path: Path) -> None:
    found, why = gemma3(tmp_path, {"image_seq_length": 16})
    assert found is not None and not why
    assert (found.token_id, found.patch, found.merge, found.max_tokens) == (20, PATCH, MERGE, 16)
    assert found.sees_ahead and not found.by_axis
    assert found.template_text == "<start_of_image>"
    assert found.prompt_text == "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"


@pytest.mark.parametrize(
    ("processor", "changes", "why"),
    [
        ({"do_pan_and_scan": True}, {}, "do_pan_and_scan, which is not supported"),
        ({"size": {"height": 40, "width": 32}}, {}, "height 40, where vision_config.image_size has 32"),
        ({"image_seq_length": 4}, {}, "image_seq_length 4, where mm_tokens_per_image has 16"),
        ({"image_processor_type": "SiglipImageProcessor"}, {}, "the type SiglipImageProcessor"),
        ({}, {"mm_tokens_per_image": 15}, "no such square of tokens"),
        ({}, {"mm_tokens_per_image": 9}, "no such square of tokens"),
        ({}, {"image_token_index": 30}, "the token 30 of images is beyond the vocabulary"),
        ({}, {"eoi_token_index": 23}, "no added token 23"),
    ],
)
def test_images_of_one_size_that_do_not_fit(
    processor: dict[str, Any], changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    found, reason = gemma3(tmp_path, processor, **changes)
    assert found is None and why in reason and "text model alone" in reason


OF_TRANSFORMERS = {
    "image_processor_type": "Kimi_K25ImageProcessor",
    "max_patches": 192,
    "size": {"max_height": 32, "max_width": 32},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.25, 0.3],
}


def kimi(directory: Path, processor: dict[str, Any]) -> tuple[ImageSettings | None, str]:
    published = {"media_placeholder_token_id": 7}
    config = {"model_type": "kimi_k25", "vision_config": KIMI[1], "vocab_size": 30} | published
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return image_settings(directory, config)


def test_images_in_patches_of_both_forms(tmp_path: Path) -> None:
    found, why = kimi(tmp_path, PROCESSORS["kimi_k25"])
    assert found is not None and not why
    assert (found.token_id, found.patch, found.merge, found.by_axis) == (7, PATCH, MERGE, False)
    assert found.max_tokens == 192 // 4 + 32 and not found.sees_ahead
    assert kimi(tmp_path, OF_TRANSFORMERS)[0] == found
    large = {"media_proc_cfg": {"in_patch_limit": 1 << 30}}
    assert patch_limits(large, 14, 2) == PatchLimits((10699 - 512) * 4, 512, 10699)
    assert patch_limits({"size": {"max_height": 1 << 30}}, 14, 2).patches > 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens, which is not supported"),
        ({"patch_size": 14}, "patch_size 14, where vision_config has 4"),
        ({"merge_kernel_size": 4}, "merge_kernel_size 4, where vision_config has 2"),
    ],
)
def test_patches_that_do_not_fit(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    processor = {"media_proc_cfg": PROCESSORS["kimi_k25"]["media_proc_cfg"] | change}
    found, reason = kimi(tmp_path, processor)
    assert found is None and why in reason and "text model alone" in reason
