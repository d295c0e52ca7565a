"""Qwen3.5 as published: in multimodal checkpoints, with stacked experts, or partly in FP8."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from parallel.communicator import Communicator
from tests.helpers.checkpoints.fp8 import save_fp8
from tests.helpers.checkpoints.multimodal import save_multimodal
from tests.helpers.checkpoints.tiny_models import Tiny, hf_logits, prompt_of, save_tiny, tiny
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.parallel.thread_ranks import on_ranks
from workers.layers.linear import Linear

IDS = prompt_of(40, seed=3)
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 72,
    "num_position_embeddings": 4,
}


WIDE = Tiny(
    "qwen3.5-wide", "qwen3_5_text", 1,
    {"hidden_size": 200, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
     "intermediate_size": 256, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
     "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
     "linear_value_head_dim": 128},
)  # fmt: skip
"""Heads of whole blocks."""


def logits(directory: Path, tp: Communicator | None = None) -> torch.Tensor:
    ours = TinyWorker(directory, tp=tp or Communicator())
    core = ours.core()
    core.add(0, IDS)
    return forced_logits(ours.worker, core, 0, [25, 15])


def rewrite(directory: Path, change: Any) -> None:
    (file,) = directory.glob("*.safetensors")
    tensors = change(safetensors.torch.load(file.read_bytes()))
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "model_type"), [("qwen3.5", "qwen3_5"), ("qwen3.5-moe-mha-tied", "qwen3_5_moe")]
)
def test_the_text_model_of_a_multimodal_checkpoint(
    name: str, model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = save_multimodal(tiny(name), model_type, VISION, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "hidden_size" not in config and config["text_config"]["hidden_size"] == 72
    with caplog.at_level("INFO", "atom"):
        torch.testing.assert_close(logits(tmp_path), hf_logits(reference, IDS), atol=1e-4, rtol=0)
    assert re.search(r"not loaded: \d+, as model\.visual\.\*", caplog.text)


@pytest.mark.parametrize("size", [1, 2])
def test_stacked_experts(size: int, tmp_path: Path) -> None:
    """As published in 16 bits; transformers saves each expert alone."""
    reference, _ = save_tiny(tiny("qwen3.5-moe"), tmp_path)
    rewrite(tmp_path, stacked)
    for found in on_ranks(size, lambda tp: logits(tmp_path, tp)):
        torch.testing.assert_close(found, hf_logits(reference, IDS), atol=1e-4, rtol=0)


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts"
        by_expert = {
            part: torch.stack([tensors[f"{experts}.{expert}.{part}_proj.weight"] for expert in range(8)])
            for part in ("gate", "up", "down")
        }
        made[f"{experts}.gate_up_proj"] = torch.cat((by_expert["gate"], by_expert["up"]), 1)
        made[f"{experts}.down_proj"] = by_expert["down"]
    return made


@pytest.mark.parametrize("size", [1, 2])
def test_wide_projections_stay_in_fp8_and_those_of_gates_plain(size: int, tmp_path: Path) -> None:
    reference = save_fp8(WIDE, tmp_path, lambda name: "self_attn" in name,
                         modules_to_not_convert=["in_proj_b", "in_proj_a", "self_attn"])  # fmt: skip

    def run(tp: Communicator) -> tuple[torch.Tensor, bool]:
        ours = TinyWorker(tmp_path, tp=tp)
        core = ours.core()
        core.add(0, IDS)
        projection = ours.worker._model.get_submodule("model.layers.0.linear_attn.in_proj_wide")
        assert isinstance(projection, Linear)
        return forced_logits(ours.worker, core, 0, [25, 15]), projection.dequantizes

    for found, dequantizes in on_ranks(size, run):
        assert not dequantizes
        torch.testing.assert_close(found, hf_logits(reference, IDS), atol=1e-3, rtol=0)
