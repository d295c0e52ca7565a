"""Steps in pieces: the modes' graphs, and the same tokens as without graphs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config.device import GraphMode
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import TinyWorker
from tests.unit.workers.batch.test_step_shape import Agreement, state_of
from workers.batch.step_shape import StepMode, StepShape
from workers.graphs.call_recorder import CallRecorder
from workers.graphs.decode_graphs import DecodeGraphs
from workers.graphs.graph_recorder import Replay
from workers.graphs.prompt_graphs import PromptGraphs

DENSE: dict[str, dict[str, Any]] = {
    "llama-gqa": {},
    "mistral-window": {},
    "gemma3": {},  # two rotations
    "deepseek-v3": {"first_k_dense_replace": 9},
    "qwen3-next": {"num_experts": 0},
}
"""Without experts: their torch function has results of other shapes at each call."""


class Counting(CallRecorder):
    """Counts its recordings."""

    count = 0

    def end(self) -> Replay:
        self.count += 1
        return super().end()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, torch_ops: None) -> Counting:
    made = Counting()
    monkeypatch.setattr("workers.graphs.graph_modes.CallRecorder", lambda: made)
    monkeypatch.setattr("workers.graphs.graph_modes.PROMPT_SIZES", (16, 64))
    return made


def tokens(worker: TinyWorker) -> list[list[int]]:
    prompts = [prompt_of(length, length) for length in (64, 5, 37)]
    return generate(worker.core(), worker.execute, prompts, 12, chunk=24, stagger=2)


@pytest.mark.parametrize("name", DENSE)
def test_pieces_change_no_token(name: str, recorder: Counting, tmp_path: Path) -> None:
    model = tiny(name)
    save_tiny(replace(model, config=model.config | DENSE[name]), tmp_path)
    wanted = tokens(TinyWorker(tmp_path))
    worker = TinyWorker(tmp_path, capture_sizes="[1,4]", graph_mode="PIECEWISE")
    runner = worker.worker._runner
    assert runner._sizes.prompt_tokens == [1, 4, 16, 64]
    layers = len(runner._kv_layers)
    assert recorder.count == 4 * (layers + 1), "a piece before, between and after the layers' attention"
    runner._coordinate = agreement = Agreement(runner._sizes)
    before = state_of(runner)
    runner.dummy_step(StepShape(StepMode.PROMPT_GRAPH, 64, runner._sizes.prompt_rows[-1]))
    assert all(map(bool, (one.equal(other) for one, other in zip(before, state_of(runner), strict=True))))
    assert tokens(worker) == wanted
    assert {shape.mode for shape in agreement.planned} == {StepMode.PROMPT_GRAPH}


@pytest.mark.parametrize(
    ("mode", "decode", "others"),
    [
        ("FULL", True, True),
        ("FULL_AND_PIECEWISE", True, True),
        ("FULL_DECODE_ONLY", True, False),
        ("PIECEWISE", False, True),
        ("NONE", False, False),
    ],
)
def test_what_each_mode_captures(
    mode: GraphMode,
    decode: bool,
    others: bool,
    recorder: Counting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for whole in (DecodeGraphs, PromptGraphs):  # torch's attention cannot be captured
        monkeypatch.setattr(whole, "capture", lambda self, progress: None)
    monkeypatch.setattr("workers.worker.warm_up", lambda *args: None)
    save_tiny(tiny("llama-gqa"), tmp_path)
    sizes = TinyWorker(tmp_path, capture_sizes="[1,4]", graph_mode=mode).worker._runner._sizes
    assert bool(sizes.decode_rows) == decode
    assert bool(sizes.prompt_tokens) == others
    assert sizes.plan(3, 3, tokens_per_row=1).mode == (
        StepMode.DECODE_GRAPH if decode else StepMode.PROMPT_GRAPH if others else StepMode.EAGER
    )
