"""Every --cudagraph-mode and --level on a GPU: the same tokens; and too little memory for graphs."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor.async_compile import shutdown_compile_workers

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import GraphMode
from atom.shared.messages.worker import AllocateKV
from atom_ops import backend
from parallel.mesh import Mesh
from tests.gpu.test_step_graphs import BLOCK_SIZE, BLOCKS, config
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import GREEDY, CoreSide, generate
from tests.unit.workers.batch.test_step_shape import Agreement, state_of
from workers.batch.step_shape import StepMode, StepShape
from workers.graphs import graph_recorder
from workers.worker import Worker

GPU = torch.device("cuda", 0)
FAMILIES = ("qwen3", "gpt-oss", "deepseek-v3.2", "qwen3-next")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def resolved_again() -> Iterator[None]:
    yield
    backend.resolve(torch.device("cpu"))


def worker(checkpoint: Checkpoint, mode: GraphMode, level: int = 3) -> tuple[Worker, CoreSide]:
    base = config("[2,6]" if mode != "NONE" else "[]", "float32")
    settings = dataclasses.replace(base.device, cudagraph_mode=mode, level=level)
    settings = dataclasses.replace(base, device=settings)
    made = Worker(settings, checkpoint, Mesh(GPU), lambda *progress: None)
    specs = made.load().kv_specs
    made.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
    return made, CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE, seed=3)


def tokens(made: Worker, core: CoreSide) -> list[list[int]]:
    prompts = [prompt_of(3 + 5 * row, seed=row) for row in range(6)]
    return generate(core, lambda batch: made.execute(batch).result().token_ids, prompts, 40, 16, 3, GREEDY)


@pytest.mark.parametrize("name", FAMILIES)
def test_modes_change_no_token(name: str, tmp_path: Path) -> None:
    checkpoint = save_tiny(tiny(name), tmp_path)[1]
    wanted = tokens(*worker(checkpoint, "NONE"))
    for mode, launched in (
        ("PIECEWISE", {StepMode.PROMPT_GRAPH}),
        ("FULL_AND_PIECEWISE", {StepMode.DECODE_GRAPH, StepMode.PROMPT_GRAPH}),
        ("FULL_DECODE_ONLY", {StepMode.DECODE_GRAPH, StepMode.EAGER}),
    ):
        made, core = worker(checkpoint, mode)
        runner = made._runner
        runner._coordinate = agreement = Agreement(runner._sizes)
        assert tokens(made, core) == wanted, mode
        assert {shape.mode for shape in agreement.planned} == launched
        if mode != "FULL_DECODE_ONLY":
            before = state_of(runner)
            runner.dummy_step(StepShape(StepMode.PROMPT_GRAPH, 64, runner._sizes.prompt_rows[-1]))
            assert all(one.equal(other) for one, other in zip(before, state_of(runner), strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, at import of its compiler
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("level", [1, 2])
def test_levels_change_no_token(
    name: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path / "cache"))
    checkpoint = save_tiny(tiny(name), tmp_path)[1]
    wanted = tokens(*worker(checkpoint, "NONE"))
    for mode in ("NONE", "FULL") if level == 2 else ("PIECEWISE",):
        assert tokens(*worker(checkpoint, mode, level)) == wanted, mode
    torch.compiler.reset()
    shutdown_compile_workers()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), RuntimeError("CUDA error: out of memory")])
def test_too_little_memory_for_graphs_is_one_line(
    mode: GraphMode, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a capture; afterwards the GPU captures again."""
    checkpoint = save_tiny(tiny("qwen3"), tmp_path)[1]
    begin, captures = graph_recorder.GraphRecorder.begin, 0

    def fail(self: graph_recorder.GraphRecorder) -> None:
        nonlocal captures
        begin(self)
        captures += 1
        if captures > 20:
            raise error

    monkeypatch.setattr(graph_recorder.GraphRecorder, "begin", fail)
    with pytest.raises(MemoryError, match="too little memory for graphs: .* capture fewer") as raised:
        worker(checkpoint, mode)
    assert "\n" not in str(raised.value)
    monkeypatch.undo()
    assert len(tokens(*worker(checkpoint, mode))) == 6
