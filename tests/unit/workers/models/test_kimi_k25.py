"""Kimi-K2.5 as published: DeepSeek V3's architecture inside of a multimodal checkpoint."""

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.helpers.multimodal import save_multimodal
from tests.helpers.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.tiny_models import hf_logits, prompt_of, tiny

IDS = prompt_of(40, seed=3)
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "pos_emb_height": 2,
    "pos_emb_width": 2,
    "patch_size": 2,
}


def test_the_text_model_of_a_multimodal_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = save_multimodal(tiny("deepseek-v3"), "kimi_k25", VISION, tmp_path)
    publish(tmp_path)
    with caplog.at_level("INFO", "atom"):
        ours = TinyWorker(tmp_path)
    core = ours.core()
    core.add(0, IDS)
    found = forced_logits(ours.worker, core, 0, [25, 15])
    torch.testing.assert_close(found, hf_logits(reference, IDS), atol=1e-4, rtol=0)
    for pattern in ("vision_tower", "mm_projector"):
        assert re.search(rf"not loaded: \d+, as \*?{pattern}\.\*", caplog.text)


def publish(directory: Path) -> None:
    """Change what transformers saves otherwise than Moonshot does; it also renames the text's layers."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"] | {"model_type": "kimi_k2"}
    published = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    path.write_text(json.dumps(config | published))
    (file,) = directory.glob("*.safetensors")
    tensors = safetensors.torch.load(file.read_bytes())
    renamed = {
        name.removeprefix("model.").replace("model.blocks.", "model.layers."): tensor
        for name, tensor in tensors.items()
    }
    safetensors.torch.save_file(renamed, file, metadata={"format": "pt"})
