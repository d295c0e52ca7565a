"""Ranks of engines in lockstep, as threads: all launch the same steps, whenever their batches come."""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
import zmq

from atom.shared.messages.worker import BatchResult, ScheduledBatch, Shutdown, StepsDone, ToWorker
from atom.shared.utils.step_trace import StepTrace
from parallel.communicator import Communicator
from parallel.expert import LocalDispatch
from parallel.host_group import HostGroup
from parallel.mesh import Mesh
from tests.helpers.parallel.thread_ranks import ThreadGroup
from tests.unit.workers.graphs.test_decode_graphs import LIMITS, TwoGroups, runner
from workers.batch.step_shape import GraphSizes, StepMode, StepShape
from workers.model_runner import ModelRunner
from workers.shape_coordination import CoordinatedStep, ShapeCoordinator
from workers.step_loop import LockstepLoop
from workers.waves import Waves
from workers.worker import Worker

DECODE, PROMPT, EAGER = StepMode.DECODE_GRAPH, StepMode.PROMPT_GRAPH, StepMode.EAGER
GRAPHS = GraphSizes([1, 4], [8, 16], [2, 4])
IDLE, STEP, LEAVING = 0, 1, 2


class PlannedTokens(LocalDispatch):
    def __init__(self) -> None:
        self.planned: list[tuple[list[int], bool]] = []

    def plan(self, tokens: Sequence[int], eager: bool = False) -> None:
        self.planned.append((list(tokens), eager))


class OthersSent(HostGroup):
    """What the other ranks have sent; this one is rank `rank`."""

    def __init__(self, rank: int, *others: Sequence[int]):
        self.rank = rank
        self.others = others

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        ranks = [list(each) for each in self.others]
        ranks.insert(self.rank, list(numbers))
        return ranks


def agreement(
    host: HostGroup, tp: int, dp: int, dispatch: LocalDispatch, sizes: GraphSizes = GRAPHS
) -> ShapeCoordinator:
    dp_rank, tp_rank = divmod(host.rank, tp)
    mesh = Mesh(torch.device("cpu"), tp=Communicator(tp_rank, tp), dp=Communicator(dp_rank, dp), host=host)
    return ShapeCoordinator(mesh, dispatch, sizes)


def test_captured_steps_have_the_same_shape_on_all_ranks() -> None:
    dispatch = PlannedTokens()
    agree = agreement(OthersSent(0, (STEP, PROMPT, 8, 2, 0)), 1, 2, dispatch)
    assert agree(StepShape(DECODE, 4, 4, 1)) == StepShape(PROMPT, 8, 4)
    assert dispatch.planned == [([8, 8], False)]
    agree = agreement(OthersSent(1, (STEP, DECODE, 4, 4, 1)), 1, 2, dispatch)
    assert agree.without_step() == CoordinatedStep(StepShape(DECODE, 4, 4, 1))
    assert dispatch.planned[1:] == [([4, 4], False)]


def test_in_an_eager_step_each_rank_computes_its_own_tokens() -> None:
    dispatch = PlannedTokens()
    agree = agreement(OthersSent(0, (STEP, EAGER, 900, 3, 0), (IDLE, EAGER, 1, 1, 0)), 1, 3, dispatch)
    assert agree(StepShape(DECODE, 4, 4, 1)) == StepShape(EAGER, 4, 4)
    assert agree.without_step() == CoordinatedStep(StepShape(EAGER, 1, 1))
    assert dispatch.planned == [([4, 900, 1], True), ([1, 900, 1], True)]


def test_a_wave_ends_when_no_rank_has_a_step() -> None:
    dispatch = PlannedTokens()
    assert (
        agreement(OthersSent(0, (IDLE, EAGER, 1, 1, 0)), 1, 2, dispatch).without_step() == CoordinatedStep()
    )
    leaving = agreement(OthersSent(0, (LEAVING, EAGER, 1, 1, 0)), 1, 2, dispatch)
    assert leaving.without_step(leaving=True) == CoordinatedStep(all_leave=True)
    assert leaving.without_step() == CoordinatedStep() and dispatch.planned == []


def test_a_batch_that_reached_one_rank_of_an_engine_is_awaited_by_the_others() -> None:
    """Rank 3 is the second of engine 1, whose first has a batch. It exchanges once for this step."""
    idle, dispatch = (IDLE, EAGER, 1, 1, 0), PlannedTokens()
    host = OthersSent(3, idle, idle, (STEP, DECODE, 4, 4, 1))
    agree = agreement(host, 2, 2, dispatch)
    assert agree.without_step() == CoordinatedStep(StepShape(DECODE, 4, 4, 1), has_batch=True)
    host.others = ()
    assert agree(StepShape(DECODE, 4, 4, 1)) == StepShape(DECODE, 4, 4, 1)
    assert len(dispatch.planned) == 1


MakeWaves = Callable[[int], list[Waves]]


@pytest.fixture
def waves_of(tmp_path: Path) -> Iterator[MakeWaves]:
    """Makes the waves of so many ranks."""
    made: list[Waves] = []

    def make(ranks: int) -> list[Waves]:
        endpoints = [f"ipc://{tmp_path}/{rank}" for rank in range(ranks)]
        made.extend(Waves(context, endpoints, rank) for rank in range(ranks))
        return made

    with zmq.Context() as context:
        yield make
        for waves in made:
            waves.close()


def test_a_start_of_an_earlier_wave_has_no_effect(waves_of: MakeWaves) -> None:
    first, second = waves_of(2)
    first.begin()
    assert first.is_awake and not second.is_awake and second.socket.poll(60_000)
    second.receive()
    assert second.is_awake
    second.begin()
    assert not first.socket.poll(100), "the others are awake"
    for waves in (first, second):
        waves.end()
        assert not waves.is_awake
    first.begin()
    second.begin()  # both had a batch: the message of the other is not read before the wave is over
    for waves in (first, second):
        waves.end()
        assert waves.socket.poll(60_000)
        waves.receive()
        assert not waves.is_awake


class ThreadHost(HostGroup):
    def __init__(self, rank: int, group: ThreadGroup):
        self.rank = rank
        self._group = group

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._group.exchange(self.rank, list(numbers))


class _NoGrammars:
    is_loading = False

    def next_loaded(self) -> None:
        """None is loaded."""


def test_captured_and_eager_steps_with_graphs_of_another_rank_sample_the_same_tokens() -> None:
    """Two engines with graphs: one has fewer steps, of other shapes, and then runs dummy steps."""
    group, dispatches = ThreadGroup(2), [PlannedTokens(), PlannedTokens()]

    def run(rank: int) -> tuple[list[bytes], int]:
        made, dummies = runner([1, 2, 4, 6]), 0
        agree = agreement(ThreadHost(rank, group), 1, 2, dispatches[rank], made._sizes)
        made._coordinate = agree
        ids = launched(made, rank)
        while (shape := agree.without_step().shape) is not None:
            made.dummy_step(shape)
            dummies += 1
        return ids, dummies

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    assert [ids for ids, _ in found] == [launched(runner([1, 2, 4, 6]), rank) for rank in range(2)]
    assert found[0][1] == 4 and found[1][1] == 0
    assert dispatches[0].planned == dispatches[1].planned
    assert {eager for _, eager in dispatches[0].planned} == {True, False}


def launched(made: ModelRunner, rank: int) -> list[bytes]:
    """9 steps of rank 0; 13 of rank 1, where one prompt is too long for a graph."""
    core, found = TwoGroups(300, LIMITS.block_size), []
    for row in range(3):
        core.add(row, [(11 * rank + 7 * row + i) % 90 for i in range(7 + row + 21 * rank * (row == 1))])
    steps: list[dict[int, int]] = [{0: 7}, {0: 1, 1: 5}, {1: 3, 2: 9}, *[{0: 1, 1: 1, 2: 1}] * 6]
    if rank == 1:
        steps = [{0: 4}, {0: 3}, {1: 29}, {0: 1, 2: 9}, *[{0: 1, 1: 1, 2: 1}] * 9]
    for counts in steps:
        found.append(made.launch(core.plan(counts)).result().token_ids)
        core.add_sampled(found[-1])
    return found


@dataclass
class Rank:
    """A worker and its link: batches arrive late, at random moments."""

    agree: ShapeCoordinator
    waves: Waves
    messages: deque[ToWorker]
    source: random.Random
    traces: None = None
    tiers: None = None
    leases: None = None
    grammars: _NoGrammars = field(default_factory=_NoGrammars)
    steps: list[str] = field(default_factory=list)
    """The steps of the mesh, as this rank saw them: its own, a dummy one, or the end of a wave."""

    def receive(self, timeout_ms: int) -> ToWorker | None:
        ready = self.waves.socket.poll(min(timeout_ms, self.source.randrange(4)))
        if ready:
            self.waves.receive()
        return self.messages.popleft() if self.messages and self.source.random() < 0.3 else None

    def send(self, message: msgspec.Struct) -> None:
        """A result."""

    def execute(self, batch: ScheduledBatch) -> Any:
        self.agree(StepShape(EAGER, len(batch.rows), len(batch.rows)))
        self.steps.append("step")
        return _Result(batch.step)

    def expert_load(self) -> None:
        """None is measured."""

    def idle_step(self, leaving: bool) -> CoordinatedStep:
        agreed = self.agree.without_step(leaving)
        if not agreed.has_batch:
            self.steps.append("end" if agreed.shape is None else "dummy")
        return agreed


@dataclass
class _Result:
    step: int

    def ready(self) -> bool:
        return True

    def result(self) -> BatchResult:
        return BatchResult(self.step, b"")


def messages_of(engine: int, source: random.Random) -> list[ToWorker]:
    """Runs of batches with pauses between them, as a core sends them."""
    messages: list[ToWorker] = []
    for _ in range(source.randrange(5)):
        messages += [ScheduledBatch(0, list(range(1 + engine)))] * source.randint(1, 6)
        messages.append(StepsDone())
    return [*messages, Shutdown()]


@pytest.mark.parametrize("seed", range(8))
def test_ranks_stay_in_step_whenever_their_batches_come(
    waves_of: MakeWaves, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.step_loop._LEAVE_S", 60.0)
    tp, dp, source = (2, 2, random.Random(seed)) if seed % 2 else (1, 3, random.Random(seed))
    group, waves = ThreadGroup(tp * dp), waves_of(tp * dp)
    sent = [messages_of(engine, source) for engine in range(dp)]
    dispatches = [PlannedTokens() for _ in range(tp * dp)]
    ranks = [
        Rank(
            agreement(ThreadHost(rank, group), tp, dp, dispatches[rank], GraphSizes()),
            waves[rank],
            deque(sent[rank // tp]),
            random.Random(1000 * seed + rank),
        )
        for rank in range(tp * dp)
    ]

    def run(rank: Rank) -> None:
        worker, trace = cast(Worker, rank), StepTrace(None, "")
        LockstepLoop(worker, rank, 0, trace, rank.waves).run()

    with ThreadPoolExecutor(len(ranks)) as pool:
        began = time.monotonic()
        list(pool.map(run, ranks))
    assert time.monotonic() - began < 50, "no rank left by its deadline"
    assert all(dispatch.planned == dispatches[0].planned for dispatch in dispatches)
    for engine in range(dp):
        own = [rank.steps for rank in ranks[engine * tp : (engine + 1) * tp]]
        assert own[0] == own[-1], "the ranks of an engine run the same steps"
        assert own[0].count("step") == sum(isinstance(each, ScheduledBatch) for each in sent[engine])
        assert [step == "end" for step in own[0]] == [step == "end" for step in ranks[0].steps]
    if total := sum(len(each) for each in sent) - dp:
        assert dispatches[0].planned or not total
