"""Multimodal checkpoints, of which the language model runs: their settings and the names of their tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from atom.shared.config.model import ModelConfig
from tests.helpers.checkpoints.tiny_models import hf_logits, prompt_of, save_tiny, tiny
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from workers.checkpoint.prepare import prepare
from workers.weights.loader import WeightError

IDS = prompt_of(40, seed=4)
OF_IMAGES = {"vision_tower.patch.weight": torch.ones(3, 3), "multi_modal_projector.norm": torch.ones(3)}
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
"""In the form of the 4B model: what is left out has the family's defaults."""


def silent(phase: str, done: int, total: int) -> None:
    """Ignores progress."""


def rewrite(directory: Path, outer: dict[str, Any], renamed: Callable[[str], str]) -> None:
    """Make a saved model the language model of a multimodal checkpoint."""
    path = directory / "config.json"
    path.write_text(json.dumps({**outer, "text_config": json.loads(path.read_text())}))
    file = directory / "model.safetensors"
    tensors = safetensors.torch.load(file.read_bytes())
    stored = {renamed(name): tensor for name, tensor in tensors.items()} | OF_IMAGES
    safetensors.torch.save_file(stored, file, metadata={"format": "pt"})


def older(name: str) -> str:
    return f"language_model.{name}"


def newer(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


@pytest.mark.parametrize("renamed", [older, newer])
@pytest.mark.parametrize(
    ("row", "architecture", "model_type"),
    [
        ("gemma3-odd-gqa-biases-linear-rope", "Gemma3ForConditionalGeneration", "gemma3"),
        ("ministral3-odd-gqa-tied-window", "Mistral3ForConditionalGeneration", "mistral3"),
        ("mistral-small-4", "Mistral3ForConditionalGeneration", "mistral3"),
        ("llama4", "Llama4ForConditionalGeneration", "llama4"),
    ],
)
def test_logits_are_those_of_the_language_model_alone(
    tmp_path: Path, row: str, architecture: str, model_type: str, renamed: Callable[[str], str]
) -> None:
    reference, _ = save_tiny(tiny(row), tmp_path)
    outer = {"architectures": [architecture], "model_type": model_type, "vision_config": {"hidden_size": 8}}
    rewrite(tmp_path, outer, renamed)
    ours = TinyWorker(tmp_path)
    core = ours.core()
    core.add(0, IDS)
    found = forced_logits(ours.worker, core, 0, [25, 15])
    torch.testing.assert_close(found, hf_logits(reference, IDS), atol=1e-4, rtol=0)


def test_a_tensor_in_both_forms_is_refused(tmp_path: Path) -> None:
    save_tiny(tiny("gemma3"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load(file.read_bytes())
    twice = {older(name): tensor.clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors | twice, file, metadata={"format": "pt"})
    with pytest.raises((WeightError, ValueError), match="which are the same tensor"):
        TinyWorker(tmp_path)


def test_settings_that_published_checkpoints_leave_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    checkpoint = prepare(ModelConfig(model=str(tmp_path), load_dummy=True), tmp_path / "cache", silent)
    assert (checkpoint.architecture, checkpoint.model_type, checkpoint.dtype) == (
        "Gemma3ForConditionalGeneration", "gemma3", "bfloat16",
    )  # fmt: skip
    # The context length is stated with its extension by RoPE scaling.
    assert (checkpoint.vocab_size, checkpoint.max_model_len) == (262208, 131072)
    assert checkpoint.eos_token_ids == [1, 106]
    assert checkpoint.hf_config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    overrides = json.dumps({"text_config": {"max_position_embeddings": 4096}})
    shorter = ModelConfig(model=str(tmp_path), load_dummy=True, hf_overrides=overrides)
    assert prepare(shorter, tmp_path / "cache", silent).max_model_len == 4096


@pytest.mark.parametrize("name", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_soft_caps_are_refused(tmp_path: Path, name: str) -> None:
    save_tiny(tiny("gemma3"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: 30.0}))
    with pytest.raises(ValueError, match=f"gemma3_text with {name} 30.0 is not supported"):
        TinyWorker(tmp_path)
