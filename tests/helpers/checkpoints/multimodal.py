"""Tiny multimodal checkpoints, whose text model is one of the tiny models; no vision model is ever run."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.helpers.checkpoints.tiny_models import Tiny, build_tiny, tiny_config

PREFIX = "model.language_model."


def save_multimodal(model: Tiny, model_type: str, vision: dict[str, Any], directory: Path) -> torch.nn.Module:
    """Saves a multimodal model of that type with the row's text model in `directory`; returns the latter."""
    text = build_tiny(model)
    config = AutoConfig.for_model(
        model_type,
        text_config=deepcopy(tiny_config(model).to_dict()),
        vision_config=vision,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(directory)
    return text
