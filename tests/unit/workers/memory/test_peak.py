"""The memory that is measured before the KV cache gets what is left; a CPU stands in for the GPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atom.shared.messages.worker import ScheduledBatch
from tests.helpers.checkpoints.tiny_models import engine_config, place, save_tiny, tiny
from workers import warm_up
from workers.memory import peak
from workers.memory.peak import peak_bytes
from workers.model_runner import ModelRunner
from workers.worker import Worker

KV, OTHERS = 100, 20


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The counts of the steps that are run; torch's figures are made up."""
    found: list[list[int]] = []

    def counters() -> Iterator[int]:
        while True:  # before and after the allocation of the KV cache
            yield OTHERS
            yield OTHERS + KV

    def record(runner: ModelRunner, batch: ScheduledBatch) -> None:
        found.append(batch.counts)
        warm_up.run_step(runner, batch)

    allocated = counters()
    reserved = iter([1000, 1030])
    peaks = iter([700, 900])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(reserved))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(peak, "run_step", record)
    return found


@pytest.mark.parametrize(("sizes", "graphs"), [("[]", 0), ("[1,2]", 30)])
def test_the_peak_is_that_of_the_largest_step_and_of_the_graphs(
    steps: list[list[int]], tmp_path: Path, sizes: str, graphs: int
) -> None:
    config = engine_config()
    config = replace(config, device=replace(config.device, cudagraph_capture_sizes=sizes))
    worker = Worker(config, save_tiny(tiny("llama-gqa"), tmp_path)[1], place(), lambda *progress: None)
    worker.load()
    assert peak_bytes(worker._builder) == 900 - KV + graphs
    assert [sum(counts) for counts in steps] == [512, 512] and max(steps[0]) < max(steps[1])
