"""Tiny models on a GPU: their logits against transformers on the CPU, in float32."""

import dataclasses
from pathlib import Path

import pytest
import torch

from atom.shared.config.device import DeviceConfig
from atom.shared.messages.worker import AllocateKV
from atom_ops import backend
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    engine_config,
    hf_logits,
    prompt_of,
    save_tiny,
    tiny,
)
from tests.helpers.engine.core_side import CoreSide
from tests.helpers.engine.teacher_forcing import forced_logits
from workers.worker import Worker

GPU = torch.device("cuda", 0)
BLOCKS, BLOCK_SIZE = 64, 16
PLAIN = ("llama-gqa", "llama-odd-gqa", "llama-llama3-rope", "qwen3", "qwen3-odd-gqa-biases-windows")
OTHERS = ("qwen3-moe", "gpt-oss", "deepseek-v2-groups-yarn", "deepseek-v3", "deepseek-v3.2", "glm-5")
OTHERS += ("deepseek-v4",)
STATEFUL = ("qwen3-next", "qwen3-next-odd-heads-biases", "qwen3-next-every-second-mha-tied")
STATEFUL += (
    "qwen3.5",
    "qwen3.5-odd-heads-biases",
    "qwen3.5-every-second-mha-tied",
    "qwen3.5-moe",
    "kimi-linear",
)
DENSE = ("smollm3-odd-gqa-biases-windows", "gemma3-odd-gqa-biases-linear-rope", "olmo3-odd-gqa-biases")
DENSE += (
    "phi3-odd-gqa-tied-window-longrope",
    "granite-odd-gqa-biases-tied",
    "granite4",
    "olmo2-odd-gqa-biases",
)
DENSE += ("ministral-odd-gqa-tied", "ministral3-odd-gqa-tied-window")
DENSE += ("gemma2", "gemma2-odd-gqa-biases-windows")
EXPERTS = ("minimax-m2", "minimax-m2-odd-gqa-tied", "glm-4.7-flash", "glm-4.7-flash-odd-heads-biases-tied")
EXPERTS += ("llama4", "llama4-odd-gqa-biases-dense", "llama4-mha-chunks-everywhere")
OURS = {"rms_norm", "add_rms_norm", "silu_and_mul", "embedding", "rotation_at", "rotate_and_write_kv"}
OURS |= {"causal_conv", "gated_delta_rule", "kimi_delta_attention", "gated_rms_norm", "sigmoid_and_mul"}
OURS |= {"normalised_queries_keys", "weigh_inputs"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS, *STATEFUL, *DENSE, *EXPERTS])
def test_logits_equal_at_every_position(name: str, tmp_path: Path) -> None:
    reference, checkpoint = save_tiny(tiny(name), tmp_path)
    config = dataclasses.replace(
        engine_config(block_size=BLOCK_SIZE), device=DeviceConfig(device="cuda", cudagraph_capture_sizes="[]")
    )
    worker = Worker(config, checkpoint, Mesh(GPU), lambda *progress: None)
    specs = worker.load().kv_specs
    worker.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
    assert not OURS & set(backend.ran_in_torch())
    ids = prompt_of(64, seed=9)
    core = CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE, seed=3)
    core.add(0, ids)
    found = forced_logits(worker, core, 0, (40, 23, 1))
    torch.testing.assert_close(found, hf_logits(reference, ids), atol=2e-4, rtol=0)
    backend.resolve(torch.device("cpu"))
