"""Quantized tiny models on a GPU, by the torch reference: logits, graphs and batch invariance."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atom.shared.config.device import DeviceConfig
from atom.shared.messages.worker import AllocateKV, KVSpec, ScheduledBatch
from atom_ops import backend
from parallel.mesh import Mesh
from tests.helpers.checkpoints.fp8 import FP8_MODELS, save_fp8
from tests.helpers.checkpoints.mxfp4 import save_mxfp4
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    checkpoint_of,
    engine_config,
    hf_logits,
    prompt_of,
)
from tests.helpers.engine.core_side import CoreSide, generate
from tests.helpers.engine.teacher_forcing import forced_logits
from workers.worker import Worker

GPU = torch.device("cuda", 0)
BLOCKS, BLOCK_SIZE, ROWS = 64, 16, 3
SAVE: dict[str, Callable[[Path], torch.nn.Module]] = {
    **{model.name: lambda directory, model=model: save_fp8(model, directory) for model in FP8_MODELS},
    "gpt-oss": lambda directory: save_mxfp4(directory).reference,
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.parametrize("name", SAVE),
]


def worker_of(directory: Path, sizes: str = "[]", **device: bool) -> tuple[Worker, list[KVSpec]]:
    config = dataclasses.replace(
        engine_config(block_size=BLOCK_SIZE),
        device=DeviceConfig(device="cuda", cudagraph_capture_sizes=sizes, **device),
    )
    worker = Worker(config, checkpoint_of(directory), Mesh(GPU), lambda *progress: None)
    specs = worker.load().kv_specs
    worker.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
    return worker, specs


def ids_of(made: tuple[Worker, list[KVSpec]], rows: int) -> list[list[int]]:
    """Greedy continuations of prompts that are prefilled together."""
    worker, specs = made

    def execute(batch: ScheduledBatch) -> bytes:
        return worker.execute(batch).result().token_ids

    core = CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE)
    prompts = [prompt_of(10 + 7 * row, row) for row in range(rows)]
    found = generate(core, execute, prompts, 16, 64)
    backend.resolve(torch.device("cpu"))
    return found


def test_logits_equal_those_of_the_dequantized_numbers(name: str, tmp_path: Path) -> None:
    reference = SAVE[name](tmp_path)
    worker, specs = worker_of(tmp_path)
    assert {"linear", "experts"} & set(backend.ran_in_torch())
    ids = prompt_of(64, seed=9)
    core = CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE, seed=3)
    core.add(0, ids)
    found = forced_logits(worker, core, 0, (40, 23, 1))
    torch.testing.assert_close(found, hf_logits(reference, ids), atol=2e-4, rtol=1e-4)
    backend.resolve(torch.device("cpu"))


def test_graphs_change_no_token(name: str, tmp_path: Path) -> None:
    SAVE[name](tmp_path)
    assert ids_of(worker_of(tmp_path, f"[{ROWS}]"), ROWS) == ids_of(worker_of(tmp_path), ROWS)


def test_batch_invariance_holds(name: str, tmp_path: Path) -> None:
    SAVE[name](tmp_path)
    together = ids_of(worker_of(tmp_path, batch_invariant=True), ROWS)
    assert ids_of(worker_of(tmp_path, batch_invariant=True), 1) == together[:1]
