"""Captured decode steps on a GPU: the same tokens as without graphs, and no synchronisation."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import DeviceConfig
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.engine import Sampling
from atom.shared.messages.worker import AllocateKV, ScheduledBatch
from atom_ops import backend
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, engine_config, prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import GREEDY, CoreSide, generate
from tests.unit.workers.batch.test_step_shape import Agreement, state_of
from workers.batch.step_shape import StepMode, StepShape
from workers.memory.kv_cache import kv_specs
from workers.worker import Worker

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BLOCKS, BLOCK_SIZE = 256, 16
HOT = Sampling(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, seed=7)
LIMITED = Sampling(temperature=1.2, top_k=30, top_p=0.9, min_p=0.01, seed=7)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    yield save_tiny(tiny("qwen3"), tmp_path_factory.mktemp("model"))[1]
    backend.resolve(CPU)


def config(sizes: str, dtype: str = "bfloat16") -> EngineConfig:
    base = engine_config(block_size=BLOCK_SIZE)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, dtype=dtype),
        device=DeviceConfig(device="cuda", cudagraph_capture_sizes=sizes),
    )


def worker(checkpoint: Checkpoint, sizes: str, dtype: str = "bfloat16") -> Worker:
    made = Worker(config(sizes, dtype), checkpoint, Mesh(GPU), lambda *progress: None)
    specs = made.load().kv_specs
    made.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
    return made


def run(made: Worker, sampling: Sampling, rows: int = 9) -> list[list[int]]:
    def execute(batch: ScheduledBatch) -> bytes:
        return made.execute(batch).result().token_ids

    prompts = [prompt_of(3 + 5 * row, seed=row) for row in range(rows)]
    return generate(CoreSide(BLOCKS, BLOCK_SIZE), execute, prompts, 40, 16, 3, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, HOT, LIMITED], ids=["greedy", "hot", "limited"])
def test_graphs_change_no_token(checkpoint: Checkpoint, sampling: Sampling) -> None:
    """In float32: captured steps attend by another kernel, and in bfloat16 near ties are many."""
    wanted = run(worker(checkpoint, "[]", "float32"), sampling)
    assert len({token for row in wanted for token in row}) > 20
    for sizes in ("[9]", "[1,2,4,8]"):
        assert run(worker(checkpoint, sizes, "float32"), sampling) == wanted


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("sizes", ["[]", "[1,4,16]"])
@pytest.mark.parametrize("sampling", [GREEDY, HOT, LIMITED], ids=["greedy", "hot", "limited"])
def test_no_step_synchronises(checkpoint: Checkpoint, sizes: str, sampling: Sampling) -> None:
    made = worker(checkpoint, sizes)
    core = CoreSide(BLOCKS, BLOCK_SIZE)
    for row in range(3):
        core.add(row, prompt_of(20 + row, seed=row), sampling)
    steps = [
        {0: 20, 1: 8},
        {0: 1, 1: 13, 2: 3},
        {0: 1, 1: 1, 2: 19},
        *[{0: 1, 1: 1, 2: 1}] * 20,
        {0: 1, 2: 1},
    ]
    one_by_one = []
    for counts in steps:  # compiles kernels
        one_by_one.append(made.execute(core.plan(counts)).result().token_ids)
        core.add_sampled(one_by_one[-1])
    core = CoreSide(BLOCKS, BLOCK_SIZE)
    for row in range(3):
        core.add(row, prompt_of(20 + row, seed=row), sampling)
    pending = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for counts in steps:
            pending.append(made.execute(core.plan(counts)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [step.result().token_ids for step in pending] == one_by_one
    assert all(len(ids) for ids in one_by_one[1:])
    assert made._runner._inputs.device_rows.positions_N[-1] == -1  # padding stays padding


FAMILIES = ("qwen3", "qwen3-moe", "gpt-oss", "deepseek-v3", "deepseek-v3.2", "qwen3-next")
SHAPES = [
    StepShape(StepMode.EAGER, 1, 1),
    StepShape(StepMode.EAGER, 300, 5),
    StepShape(StepMode.PROMPT_GRAPH, 64, 16),
    StepShape(StepMode.DECODE_GRAPH, 4, 4, 1),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_dummy_steps_write_nothing(name: str, tmp_path: Path) -> None:
    """Between real steps, and padded ones too: in float32 every token stays the same."""
    made = worker(save_tiny(tiny(name), tmp_path)[1], "[1,4]", "float32")
    specs = kv_specs(made._model.kv_groups, BLOCK_SIZE, torch.float32)
    prompts = [prompt_of(5 + 30 * row, seed=row) for row in range(3)]

    def run_with_dummies(shapes: list[StepShape]) -> list[list[int]]:
        def execute(batch: ScheduledBatch) -> bytes:
            before = state_of(made._runner)
            for shape in shapes:
                made._runner.dummy_step(shape)
            for old, new in zip(before, state_of(made._runner), strict=True):
                assert torch.equal(old, new)
            return made.execute(batch).result().token_ids

        return generate(CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE), execute, prompts, 20, 16, 3)

    plain = run_with_dummies([])
    assert run_with_dummies(SHAPES) == plain
    for shape in (StepShape(StepMode.PROMPT_GRAPH, 64, 16), StepShape(StepMode.EAGER, 90, 7)):
        made._runner._coordinate = Agreement(made._runner._sizes, shape)
        assert run_with_dummies([shape]) == plain
    backend.resolve(CPU)
