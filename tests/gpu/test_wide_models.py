"""Models of real width with few layers and random weights on a GPU: logits of kernels and of torch ops."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from atom.shared.config.device import DeviceConfig
from atom.shared.messages.worker import AllocateKV
from atom_ops import backend
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, checkpoint_of, engine_config
from tests.helpers.engine.core_side import CoreSide
from tests.helpers.engine.teacher_forcing import forced_logits
from workers import worker as worker_module
from workers.worker import Worker

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BLOCKS, BLOCK_SIZE, TOKENS = 64, 16, 48
FP8_BLOCKS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
}  # fmt: skip
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {"num_hidden_layers": 2, "first_k_dense_replace": 1, "quantization_config": FP8_BLOCKS},
    ),
    "gpt_oss": ("GptOssForCausalLM", {"num_hidden_layers": 2, "quantization_config": MXFP4}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {"num_hidden_layers": 2, "first_k_dense_replace": 1}),
    "qwen3_next": ("Qwen3NextForCausalLM", {"num_hidden_layers": 4}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {"num_hidden_layers": 4}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {"num_hidden_layers": 4}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {"num_hidden_layers": 2, "quantization_config": FP8_BLOCKS}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {"num_hidden_layers": 2}),
    "mistral4": ("Mistral4ForCausalLM", {"num_hidden_layers": 2}),
}
LARGEST_ERROR = {"deepseek_v3": 0.05, "gpt_oss": 0.03, "glm_moe_dsa": 0.03, "qwen3_next": 0.03}
LARGEST_ERROR |= {"qwen3_5_text": 0.03, "qwen3_5_moe_text": 0.03, "minimax_m2": 0.05, "glm4_moe_lite": 0.03}
LARGEST_ERROR |= {"mistral4": 0.03}
"""RMS of the logits' differences, as a part of the logits' RMS: FP8 kernels round activations to 8 bits."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("released"),
]


def save_wide(model_type: str, directory: Path, **sizes: Any) -> None:
    """config.json of the published model with a few layers; `sizes` replace others of its numbers."""
    architecture, given = MODELS[model_type]
    layers = given["num_hidden_layers"]
    config = AutoConfig.for_model(model_type, num_hidden_layers=layers).to_dict()
    config |= {"architectures": [architecture], "dtype": "bfloat16", "max_position_embeddings": 4096}
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if isinstance(config.get(key), list):
            config[key] = config[key][:layers]
    (directory / "config.json").write_text(json.dumps(config | given | sizes))


def logits_of(directory: Path, device: torch.device = GPU) -> torch.Tensor:
    """Logits of every position of a text in two chunks and a last token alone, [tokens, V] in float32."""
    config = engine_config(block_size=BLOCK_SIZE, load_dummy=True, dtype="bfloat16")
    config = replace(config, device=DeviceConfig(device=device.type, cudagraph_capture_sizes="[]"))
    checkpoint = checkpoint_of(directory)
    worker = Worker(config, checkpoint, Mesh(device), lambda *progress: None)
    specs = worker.load().kv_specs
    worker.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
    core = CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE, seed=3)
    generator = torch.Generator().manual_seed(2)
    core.add(0, torch.randint(3, checkpoint.vocab_size - 400, (TOKENS,), generator=generator).tolist())
    return forced_logits(worker, core, 0, (30, TOKENS - 31, 1))


def differences(
    directory: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device = GPU
) -> tuple[float, float]:
    """(RMS of the differences of logits, positions with the same best token), as parts of all."""
    found = logits_of(directory, device)
    assert not backend.ran_in_torch() or device == CPU
    torch.cuda.empty_cache()
    monkeypatch.setattr(
        worker_module, "resolve_ops", lambda device, *model: backend.resolve(device, ["torch"])
    )
    wanted = logits_of(directory, device)
    same = (found.argmax(1) == wanted.argmax(1)).float().mean()
    return float((found - wanted).norm() / wanted.norm()), float(same)


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_agree_with_the_torch_ops(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "tune", lambda *given: None)  # it takes longer than all else here
    save_wide(model_type, tmp_path)
    error, same = differences(tmp_path, monkeypatch)
    print(f"{model_type}: logits differ by {error:.4f}, the best token is the same at {same:.3f}")
    assert error < LARGEST_ERROR[model_type] and same > 0.8
