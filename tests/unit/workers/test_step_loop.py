"""The loop of a worker that shares no steps with other engines."""

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from atom.shared.messages.grammar import GrammarLoaded
from atom.shared.messages.kv_peers import EndLeases, LeasesReleased
from atom.shared.messages.profile import RankTrace
from atom.shared.messages.worker import BatchResult, ExpertLoad, ScheduledBatch, Shutdown, ToWorker
from atom.shared.utils.step_trace import StepTrace
from workers.step_loop import StepLoop
from workers.worker import Worker


class Link:
    """Gives these messages; None: there is none in time."""

    def __init__(self, *messages: ToWorker | None):
        self.sent: list[msgspec.Struct] = []
        self._messages = deque(messages)

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)

    def receive(self, timeout_ms: int) -> ToWorker | None:
        return self._messages.popleft()


def test_other_results_are_sent_while_a_step_runs() -> None:
    released = LeasesReleased(0, [(1, 2)])
    results: list[Any] = [released, GrammarLoaded(b"a"), RankTrace(0, False), ExpertLoad([1.0], 2)]
    leases, grammars, traces, loads = ([each] for each in results)
    ended: list[int] = []
    running: list[int] = []

    def execute(batch: ScheduledBatch) -> Any:
        running.append(batch.step)
        return SimpleNamespace(ready=lambda: False, result=lambda: BatchResult(batch.step, b""))

    def next_of(waiting: list[Any]) -> Any:
        return waiting.pop() if running and waiting else None

    worker = SimpleNamespace(
        tiers=None,
        leases=SimpleNamespace(next_released=lambda: next_of(leases), end=ended.extend),
        grammars=SimpleNamespace(is_loading=False, next_loaded=lambda: next_of(grammars)),
        traces=SimpleNamespace(writing=False, next_result=lambda: next_of(traces)),
        expert_load=lambda: next_of(loads),
        execute=execute,
    )
    link = Link(ScheduledBatch(1, [0]), None, EndLeases([3, 5]), Shutdown())
    StepLoop(cast(Worker, worker), link, 0, StepTrace(None, "")).run()
    assert link.sent == results and ended == [3, 5]
