"""Traces of one rank, and the names of their steps and modules."""

import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.observability import ObservabilityConfig
from atom.shared.messages.profile import RankTrace
from atom.shared.messages.worker import AllocateKV, NewRow, ScheduledBatch
from atom_ops import native_impl
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    engine_config,
    place,
    prompt_of,
    save_tiny,
    tiny,
)
from tests.helpers.engine.core_side import GREEDY, CoreSide, generate
from tests.unit.workers.graphs.test_decode_graphs import Rerun
from tools import parse_trace
from tools.traces.events import read_events
from tools.traces.steps import captures_of, read_steps, steps_of
from workers import profiler
from workers.batch.step_label import step_label
from workers.graphs.trace_ranges import RangeRecorder
from workers.profiler import TraceRecorder
from workers.worker import Worker

CPU = torch.device("cpu")
DEADLINE_S = 60.0
NAME = re.compile(r"a_tiny_model_ts_\d{8}_\d{6}_\d{3}\.pt\.trace\.json\.gz")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save_tiny(tiny("llama-gqa"), tmp_path_factory.mktemp("model"))[1]


def worker_of(
    checkpoint: Checkpoint, directory: Path | None, mark: bool = False, capture_sizes: str = "[]"
) -> Worker:
    config = engine_config()
    graphs = {"cudagraph_capture_sizes": capture_sizes, "cudagraph_mode": "FULL_DECODE_ONLY"}
    config = replace(
        config,
        model=replace(config.model, model="/models/a tiny:model"),
        device=replace(config.device, **graphs),
        observability=ObservabilityConfig(
            torch_profiler_dir=None if directory is None else str(directory), mark_trace=mark
        ),
    )
    worker = Worker(config, checkpoint, place(), lambda *progress: None)
    worker.load()
    worker.allocate(AllocateKV([64], MAX_MODEL_LEN))
    return worker


def run(worker: Worker) -> list[list[int]]:
    prompts = [prompt_of(9, 0), prompt_of(5, 1)]
    return generate(
        CoreSide(64, 4), lambda batch: worker.execute(batch).result().token_ids, prompts, 4, chunk=16
    )


def result_of(traces: TraceRecorder) -> RankTrace:
    deadline = time.monotonic() + DEADLINE_S
    while (result := traces.next_result()) is None:
        assert time.monotonic() < deadline, "no result in time"
        time.sleep(0.005)
    return result


def recorded(worker: Worker) -> Path:
    assert worker.traces is not None
    worker.traces.switch(True)
    assert result_of(worker.traces).error == ""
    run(worker)
    worker.traces.switch(False)
    result = result_of(worker.traces)
    assert result.error == "" and result.steps == 4 and result.elapsed_s > 0
    assert not worker.traces.recording
    return Path(result.directory, result.file)


def test_a_recording_holds_its_steps_and_modules(checkpoint: Checkpoint, tmp_path: Path) -> None:
    worker = worker_of(checkpoint, tmp_path, mark=True)
    path = recorded(worker)
    assert path.parent == tmp_path / "rank_0" and NAME.fullmatch(path.name)
    assert list(path.parent.iterdir()) == [path], "a half-written file was left"
    steps = read_steps(path)
    assert [step.label for step in steps] == [
        "prefill[bs=2 tok=14 ctx=[9,5]]",
        *["decode[bs=2 tok=2 d=2]"] * 3,
    ]
    parts = [
        "self_attn.qkv_proj",
        "self_attn.attention",
        "self_attn.o_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
    ]
    wanted = {f"model.layers.{layer}.{part}" for layer in range(3) for part in parts}
    for step in steps:
        modules = {kernel.module for kernel in step.kernels}
        assert wanted | {"model.embed_tokens", "model.rotary.0", "model.norm", "lm_head"} <= modules
        assert 0 < step.kernel_ns <= step.duration_ns


LAYER_KERNELS = [
    ("self_attn.qkv_proj", "native::rms_norm"),
    ("self_attn.attention", "native::rotate_and_write"),
    ("self_attn.attention", "native::attend"),
    ("mlp.gate_up_proj", "native::rms_norm"),
    ("mlp.down_proj", "native::silu_and_mul"),
]


@pytest.mark.skipif(not native_impl.runs_on(CPU), reason="needs a C++ compiler")
def test_kernels_in_cpp_and_recorded_steps_are_named_in_a_trace(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps are replays of a recording; the other step is computed kernel by kernel."""
    worker = worker_of(checkpoint, tmp_path, mark=True, capture_sizes="[2]")
    path = recorded(worker)
    prefill, *decodes = read_steps(path)
    for step in (prefill, *decodes):
        found = {(kernel.module, kernel.name) for kernel in step.kernels if "native::" in kernel.name}
        layers = {(f"model.layers.{n}.{module}", name) for n in range(3) for module, name in LAYER_KERNELS}
        assert found == layers | {("model.norm", "native::rms_norm")}
        assert {f"model.layers.{n}.self_attn.o_proj" for n in range(3)} <= {
            kernel.module for kernel in step.kernels
        }
    assert "replay_graph_bs_2" in {event.name for event in read_events(path)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["parse_trace", str(path), "--layer", "1"])
    parse_trace.main()
    assert {each.name for each in tmp_path.glob("*.xlsx")} == {
        "prefill_breakdown.xlsx",
        "decode_breakdown.xlsx",
    }


def test_a_second_recording_is_another_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    worker = worker_of(checkpoint, tmp_path)
    first, second = recorded(worker), recorded(worker)
    assert first != second
    for path in (first, second):
        steps = read_steps(path)
        assert len(steps) == 4
        assert {kernel.module for step in steps for kernel in step.kernels} == {""}


def test_recording_changes_no_token_and_costs_nothing_else(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plain, traced = worker_of(checkpoint, None), worker_of(checkpoint, tmp_path, mark=True)
    expected = run(plain)
    assert plain.traces is None and traced.traces is not None
    traced.traces.switch(True)
    assert run(traced) == expected
    traced.traces.close()
    assert result_of(traced.traces).on
    assert result_of(traced.traces).file
    plain_layer = plain._model.get_submodule("model.layers.0.mlp")
    assert "forward" not in vars(plain_layer)


def test_close_writes_the_recording(checkpoint: Checkpoint, tmp_path: Path) -> None:
    worker = worker_of(checkpoint, tmp_path)
    assert worker.traces is not None
    worker.traces.switch(True)
    run(worker)
    worker.traces.close()
    assert len(list((tmp_path / "rank_0").glob("*.json.gz"))) == 1


def test_atom_profiler_more_records_shapes_and_stacks(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(checkpoint, tmp_path)
    plain = read_events(recorded(worker))
    monkeypatch.setenv("ATOM_PROFILER_MORE", "1")
    more = read_events(recorded(worker))
    assert not any("Input Dims" in (event.args or {}) for event in plain)
    assert any("Input Dims" in (event.args or {}) for event in more)
    assert {event.cat for event in more} - {event.cat for event in plain} >= {"python_function"}


def test_steps_go_on_while_a_trace_is_written(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, may_end, write = worker_of(checkpoint, tmp_path), threading.Event(), profiler._write

    def slowly(recorded: Any, path: Path) -> None:
        assert may_end.wait(DEADLINE_S)
        write(recorded, path)

    monkeypatch.setattr(profiler, "_write", slowly)
    assert worker.traces is not None
    worker.traces.switch(True)
    assert result_of(worker.traces).on
    expected = run(worker)
    worker.traces.switch(False)
    assert run(worker) == expected
    assert worker.traces.writing and worker.traces.next_result() is None
    may_end.set()
    assert result_of(worker.traces).steps == 4


def test_starting_or_stopping_twice(tmp_path: Path) -> None:
    traces = TraceRecorder(str(tmp_path), "m", 3, CPU)
    traces.switch(False)
    assert traces.next_result() == RankTrace(3, False, str(tmp_path / "rank_3"))
    traces.switch(True)
    traces.switch(True)
    assert [result_of(traces).error for _ in range(2)] == ["", "a recording runs already"]
    traces.switch(False)
    assert result_of(traces).file


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    traces = TraceRecorder(str(tmp_path / "file"), "m", 0, CPU)
    traces.switch(True)
    assert "Not a directory" in result_of(traces).error and not traces.recording
    traces = TraceRecorder(str(tmp_path / "gone"), "m", 0, CPU)
    traces.switch(True)
    (tmp_path / "gone" / "rank_0").rmdir()
    traces.switch(False)
    assert [result_of(traces).error != "" for _ in range(2)] == [False, True]


def test_captures_and_replays_are_named(tmp_path: Path) -> None:
    traces = TraceRecorder(str(tmp_path), "m", 0, CPU)

    with traces.capture():
        replay, result = RangeRecorder(Rerun())(lambda: torch.tensor(7), "bs_4")
    (path,) = (tmp_path / "rank_0").glob("capture_graph_m_ts_*.pt.trace.json.gz")
    assert captures_of(read_events(path)) == {"bs_4": []}
    traces.switch(True)
    with traces.step("decode[bs=4 tok=4 d=4]"):
        replay()
    assert result == 7
    traces.switch(False)
    assert result_of(traces).on
    trace = result_of(traces)
    events = read_events(Path(trace.directory, trace.file))
    assert "replay_graph_bs_4" in {event.name for event in events}
    assert [step.kind for step in steps_of(events, {})] == ["decode"]


def new_row(row: int) -> NewRow:
    return NewRow(row, 8, 0, [[]], GREEDY, 8)


@pytest.mark.parametrize(
    ("batch", "lengths", "label"),
    [
        (ScheduledBatch(1, [0, 1]), [(5, 5), (9, 8)], "decode[bs=2 tok=2 d=2]"),
        (ScheduledBatch(1, [4], [3], [new_row(4)]), [(0, 8)], "prefill[bs=1 tok=3 ctx=[3]]"),
        (ScheduledBatch(1, [4, 0], [5, 1]), [(3, 8), (5, 5)], "prefill[bs=2 tok=6 ctx=[8] d=1]"),
        (
            ScheduledBatch(1, list(range(17)), [2] * 17),
            [(1, 9)] * 17,
            f"prefill[bs=17 tok=34 ctx=[{'3,' * 16}…]]",
        ),
    ],
)
def test_a_label_says_what_a_step_computes(
    batch: ScheduledBatch, lengths: list[tuple[int, int]], label: str
) -> None:
    assert step_label(batch, lengths) == label
