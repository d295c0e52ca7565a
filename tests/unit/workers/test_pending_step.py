"""Launched steps on a device that works asynchronously, with a fake for its events."""

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.engine import AddRequest, pack_ids
from atom.shared.messages.worker import AllocateKV
from engine_core.core import EngineCore
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.scheduler import MAX_IN_FLIGHT, Limits
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    engine_config,
    place,
    prompt_of,
    save_tiny,
    tiny,
)
from tests.helpers.engine.core_driver import Clock
from tests.helpers.engine.core_side import GREEDY, CoreSide
from workers import runner_builder
from workers.memory.kv_cache import kv_specs
from workers.worker import Worker

BLOCKS, BLOCK_SIZE = 64, 4


class FakeEvent:
    """Done once the test or `synchronize` says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save_tiny(tiny("llama-gqa"), tmp_path_factory.mktemp("model"))[1]


@pytest.fixture
def worker(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(runner_builder, "event_recorder", lambda device: FakeEvent)
    made = Worker(engine_config(), checkpoint, place(), lambda *progress: None)
    made.load()
    made.allocate(AllocateKV([BLOCKS], MAX_MODEL_LEN))
    return made


def test_a_step_that_samples_nothing_is_done_when_the_device_is(worker: Worker) -> None:
    core = CoreSide(BLOCKS, BLOCK_SIZE)
    core.add(0, prompt_of(20, 0))
    for count, sampled in ((8, 0), (12, 1), (1, 1)):
        pending = worker.execute(core.plan({0: count}))
        assert isinstance(pending._done, FakeEvent) and not pending.ready()
        pending._done.done = True
        assert pending.ready()
        token_ids = pending.result().token_ids
        assert len(token_ids) == 4 * sampled
        core.add_sampled(token_ids)


def test_the_core_waits_for_prompt_steps_and_measures_their_time(worker: Worker) -> None:
    """No more than `MAX_IN_FLIGHT` chunks are launched; each result takes the device's 5 s."""
    clock = Clock()
    specs = kv_specs(worker._model.kv_groups, BLOCK_SIZE, torch.float32)
    core = EngineCore(
        Limits(max_num_seqs=4, max_num_batched_tokens=8, delay_factor=1.0),
        KVCacheManager(specs, [BLOCKS], 8, seed=7),
        MAX_MODEL_LEN,
        clock,
    )
    assert core.add(AddRequest([1], pack_ids(prompt_of(40, 1)), 1, GREEDY), b"a") is None
    pending = []
    for _ in range(3):
        while (batch := core.schedule()) is not None:
            pending.append(worker.execute(batch))
        assert len(pending) == MAX_IN_FLIGHT
        assert not any(step.ready() for step in pending)
        clock.now += 5.0
        oldest = pending.pop(0)
        oldest._done.synchronize()
        core.update_from_output(oldest.result())
        assert core._scheduler._results.prompt_step_s == 5.0
