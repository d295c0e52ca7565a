"""A backend with its own KV layout and metadata, bound to the attention layers when a model is built."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atom.shared.messages.worker import ScheduledBatch
from atom_ops import backend, register_attention_backend
from atom_ops.attention_backend import ATTENTION_BACKENDS
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.heads_first import Cache, HeadsFirst
from tests.helpers.engine.teacher_forcing import TinyWorker
from tests.unit.workers.batch.test_step_shape import Agreement, state_of
from tests.unit.workers.graphs.test_decode_graphs import Rerun
from workers.batch.step_shape import StepMode, StepShape
from workers.layers.attention.attention import KVGroup
from workers.memory.kv_cache import kv_specs

CPU = torch.device("cpu")


@pytest.fixture
def heads_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeadsFirst]:
    """Registered, and preferred on a CPU."""
    made = HeadsFirst()
    register_attention_backend(made)
    monkeypatch.setitem(backend._DEFAULT_ORDER, "cpu", (made.name, *backend._DEFAULT_ORDER["cpu"]))
    yield made
    del ATTENTION_BACKENDS[made.name]
    monkeypatch.undo()
    backend.resolve(CPU)


def outputs(directory: Path) -> tuple[TinyWorker, list[list[int]]]:
    """Greedy ids of three prompts in one batch, prompt chunks with decodes, and dummy steps between."""
    worker = TinyWorker(directory)

    def execute(batch: ScheduledBatch) -> bytes:
        worker.worker._runner.dummy_step(StepShape(StepMode.EAGER, 5, 3))
        return worker.execute(batch)

    prompts = [prompt_of(length, length) for length in (64, 5, 37)]
    return worker, generate(worker.core(), execute, prompts, 16, chunk=24, stagger=2)


@pytest.mark.parametrize(
    ("name", "backends"),
    [
        ("llama-gqa", ["heads_first"]),
        ("qwen3-odd-gqa-biases-windows", ["interleaved_kv", "heads_first"]),
        ("gpt-oss", ["interleaved_kv", "heads_first"]),
        ("qwen3-next", ["heads_first", None]),
        ("deepseek-v3", [None]),
    ],
)
def test_another_layout_gives_the_same_tokens(
    name: str, backends: list[str | None], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    save_tiny(tiny(name), tmp_path)
    _, plain = outputs(tmp_path)
    made: HeadsFirst = request.getfixturevalue("heads_first")
    worker, found = outputs(tmp_path)
    groups = worker.worker._model.kv_groups
    bound = [group.backend.name if isinstance(group, KVGroup) else None for group in groups]
    assert sorted(map(str, bound)) == sorted(map(str, backends))
    for number, group in enumerate(groups):
        for layer in group.layers:
            cache = worker.worker._runner._kv_layers[layer]
            assert isinstance(cache, Cache) == (bound[number] == made.name)
    assert found == plain


SHAPES = [
    StepShape(StepMode.EAGER, 7, 3),
    StepShape(StepMode.PROMPT_GRAPH, 64, 16),
    StepShape(StepMode.DECODE_GRAPH, 4, 4, 1),
]


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-moe", "qwen3-next"])
def test_captured_steps_and_dummy_steps(
    heads_first: HeadsFirst, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of captured steps have no host rows; dummy steps of every mode write nothing."""
    save_tiny(tiny(name), tmp_path)
    _, plain = outputs(tmp_path)
    monkeypatch.setattr("workers.graphs.graph_modes.CallRecorder", Rerun)
    monkeypatch.setattr("workers.graphs.graph_modes.PROMPT_SIZES", (16, 64))
    worker = TinyWorker(tmp_path, capture_sizes="[1,4]")
    runner = worker.worker._runner
    runner._coordinate = agreement = Agreement(runner._sizes)

    def execute(batch: ScheduledBatch) -> bytes:
        before = state_of(runner)
        for shape in SHAPES:
            runner.dummy_step(shape)
        assert all(map(torch.equal, before, state_of(runner)))
        return worker.execute(batch)

    prompts = [prompt_of(length, length) for length in (64, 5, 37)]
    assert generate(worker.core(), execute, prompts, 16, chunk=24, stagger=2) == plain
    assert {shape.mode for shape in agreement.planned} == {StepMode.DECODE_GRAPH, StepMode.PROMPT_GRAPH}


def test_the_metadata_of_a_step_is_planned_once(heads_first: HeadsFirst, tmp_path: Path) -> None:
    save_tiny(tiny("llama-gqa"), tmp_path)
    worker = TinyWorker(tmp_path)
    heads_first.planned = 0
    core = worker.core()
    core.add(0, prompt_of(9, 0))
    for count in (5, 4, 1, 1):
        core.add_sampled(worker.execute(core.plan({0: count})))
    assert heads_first.planned == 4


def test_the_engine_core_gets_the_bytes_of_the_layout(heads_first: HeadsFirst) -> None:
    class Wide(HeadsFirst):
        def bytes_per_block(self, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
            return 1000

    groups = [KVGroup([0, 2], 2, 16, backend=Wide()), KVGroup([1], 2, 16)]
    assert [spec.bytes_per_block for spec in kv_specs(groups, 4, torch.float32)] == [2000, 2 * 4 * 2 * 16 * 4]


def test_names_are_checked(heads_first: HeadsFirst) -> None:
    with pytest.raises(ValueError, match="already an attention backend heads_first"):
        register_attention_backend(HeadsFirst())
    with pytest.raises(ValueError, match="'heads_first' cannot run on cuda: it needs a CPU"):
        backend.resolve(torch.device("cuda"), ["heads_first"])
    backend.resolve(CPU, ["heads_first"])
    with pytest.raises(ValueError, match="there are:.*heads_first"):
        backend.resolve(CPU, ["heads_last"])
