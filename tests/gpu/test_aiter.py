"""Tiny models on an MI300 or MI350 in bfloat16: AITER's kernels round about as much as ours do."""

import dataclasses
from pathlib import Path

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import DeviceConfig
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.worker import AllocateKV
from atom_ops import aiter_impl, backend
from atom_ops.attention_backend import ATTENTION_BACKENDS
from atom_ops.op import REGISTRY
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    engine_config,
    hf_logits,
    prompt_of,
    save_tiny,
)
from tests.helpers.engine.core_side import CoreSide
from tests.helpers.engine.teacher_forcing import forced_logits
from tests.unit.atom_ops.aiter_impl.test_aiter_impl import MODELS
from workers.worker import Worker

GPU = torch.device("cuda", 0)
BLOCKS, BLOCK_SIZE = 64, 16
# A prompt in two chunks, one token, and then again some.
COUNTS = (40, 1, 20, 3)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not aiter_impl.runs_on(GPU), reason=f"needs {aiter_impl.NEEDS}"),
]


@pytest.mark.parametrize("name", list(MODELS))
def test_rounds_as_much_as_our_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_aiter, without = divergences(name, GPU, tmp_path, monkeypatch)
    print(f"{name}: mean KL {with_aiter:.2e}, without AITER {without:.2e}")
    assert with_aiter < 4 * without + 1e-5


def divergences(
    name: str, device: torch.device, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """Mean KL divergence from transformers in float32, in nats a token: with AITER first, and without it."""
    reference, checkpoint = save_tiny(MODELS[name], directory)
    ids = prompt_of(sum(COUNTS), seed=9)
    wanted = hf_logits(reference, ids).log_softmax(-1)
    config = engine_config(block_size=BLOCK_SIZE)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype="bfloat16"),
        device=DeviceConfig(device=device.type, cudagraph_capture_sizes="[]"),
    )
    found = []
    order = backend._DEFAULT_ORDER[device.type]
    assert "aiter" in order and "aiter" in ATTENTION_BACKENDS
    for names in (order, tuple(each for each in order if each != "aiter")):
        monkeypatch.setitem(backend._DEFAULT_ORDER, device.type, names)
        logits = _logits(config, dataclasses.replace(checkpoint, dtype="bfloat16"), device, ids)
        assert ("aiter" in REGISTRY["rms_norm"].order) == ("aiter" in names)
        found.append(float((wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean()))
    monkeypatch.setitem(backend._DEFAULT_ORDER, device.type, order)
    backend.resolve(torch.device("cpu"))
    return found[0], found[1]


def _logits(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, ids: list[int]
) -> torch.Tensor:
    worker = Worker(config, checkpoint, Mesh(device), lambda *progress: None)
    specs = worker.load().kv_specs
    worker.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
    core = CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE, seed=3)
    core.add(0, ids)
    return forced_logits(worker, core, 0, COUNTS)
