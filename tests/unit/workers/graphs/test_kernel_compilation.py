"""Which steps are captured to compile their kernels; here each of them runs."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints.tiny_models import save_tiny, tiny
from tests.helpers.engine.teacher_forcing import TinyWorker
from workers.graphs import kernel_compilation
from workers.graphs.graph_modes import GraphSettings
from workers.graphs.graph_recorder import Replay
from workers.graphs.kernel_compilation import compile_kernels

CPU = torch.device("cpu")
SETTINGS = GraphSettings("FULL_AND_PIECEWISE", [1, 2, 3, 4], 64)


class NoCapture:
    """Runs what a graph would capture."""

    def capturing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin(self) -> None:
        pass

    def end(self) -> Replay:
        return lambda: None


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[TinyWorker, list[int]]]:
    """A worker, and the tokens of each pass of its model."""
    save_tiny(tiny("mistral-window"), tmp_path)
    worker = TinyWorker(tmp_path)
    found: list[int] = []
    monkeypatch.setattr(kernel_compilation, "GraphRecorder", NoCapture)
    monkeypatch.setattr("workers.graphs.graph_modes.PROMPT_SIZES", (16, 64))
    model = worker.worker._builder.model
    hook = model.register_forward_pre_hook(lambda model, inputs: found.append(len(inputs[0])))
    yield worker, found
    hook.remove()


@pytest.mark.parametrize("compiled", [0, 7])
def test_smaller_steps_are_captured_if_kernels_of_the_largest_were_missing(
    passes: tuple[TinyWorker, list[int]], monkeypatch: pytest.MonkeyPatch, compiled: int
) -> None:
    def launched(device: torch.device, launch: Callable[[], None]) -> int:
        launch()
        return compiled

    monkeypatch.setattr("atom_ops.backend.compile_launched", launched)
    worker, found = passes
    builder = worker.worker._builder
    blocks = [8] * len(builder.model.kv_groups)
    inputs = builder.inputs(builder.longest_sequence, blocks)
    count = compile_kernels(SETTINGS, builder.model, builder.kv_layers(blocks), inputs, CPU)
    assert count == 2 * compiled
    largest = [4, 64, 64]
    assert found == largest + ([2, 1, 16, 16] if compiled else []), "prompts alone, and after cached tokens"
