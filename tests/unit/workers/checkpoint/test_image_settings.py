"""Whether a checkpoint's images are read, and how."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.vision_models import MERGE, MODELS, PATCH, PROCESSOR
from workers.checkpoint.image_settings import image_settings

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
    assert "gemma3" in settings(tmp_path, "gemma3")[1]
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
