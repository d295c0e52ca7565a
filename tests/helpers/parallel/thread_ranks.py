"""Ranks as threads of one process: collectives without process groups, for tests of many layouts."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from atom.shared.messages.worker import ScheduledBatch
from parallel.communicator import Communicator
from parallel.mesh import MeshShape
from tests.helpers.engine.core_side import CoreSide
from tests.helpers.engine.teacher_forcing import TinyWorker

DEADLINE_S = 60.0
R = TypeVar("R")


class ThreadGroup:
    """What the threads of one group exchange."""

    def __init__(self, size: int):
        self.size = size
        self._barrier = threading.Barrier(size)
        self._sent: list[Any] = [None] * size

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        """What every rank has given, in rank order."""
        self._sent[rank] = mine
        self._barrier.wait(DEADLINE_S)
        found = list(self._sent)
        self._barrier.wait(DEADLINE_S)
        return found

    def abort(self) -> None:
        """Every waiting rank raises BrokenBarrierError."""
        self._barrier.abort()


class ThreadCommunicator(Communicator):
    """A rank of a ThreadGroup; counts the calls by name."""

    def __init__(self, rank: int, group: ThreadGroup):
        super().__init__(rank, group.size)
        self._threads = group
        self.calls: Counter[str] = Counter()

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls["all_reduce"] += 1
        return torch.stack(self._threads.exchange(self.rank, x.clone())).sum(0)

    def broadcast(self, x: Tensor) -> Tensor:
        self.calls["broadcast"] += 1
        return self._threads.exchange(self.rank, x.clone())[0]

    def all_to_all_rows(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.calls["all_to_all"] += 1
        parts = self._threads.exchange(self.rank, x.clone().split(list(sent)))
        return torch.cat([part[self.rank] for part in parts])

    def reduce_scatter_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        self.calls["reduce_scatter"] += 1
        parts = self._threads.exchange(self.rank, x.clone().split(list(rows)))
        return torch.stack([part[self.rank] for part in parts]).sum(0)

    def _gathered(self, x: Tensor) -> Tensor:
        self.calls["all_gather"] += 1
        return torch.stack(self._threads.exchange(self.rank, x.clone()))


def on_ranks(size: int, run: Callable[[Communicator], R]) -> list[R]:
    """`run` on every rank of one group at once; the results in rank order."""
    if size == 1:
        return [run(Communicator())]
    group = ThreadGroup(size)

    def of_rank(rank: int) -> R:
        try:
            return run(ThreadCommunicator(rank, group))
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(of_rank, range(size)))


class RankedWorkers:
    """A tiny model on tp ranks, of which each dcp split the latent cache."""

    def __init__(self, directory: Path, tp: int, dcp: int):
        shape = MeshShape(tp=tp, dcp=dcp)
        tp_group = ThreadGroup(tp)
        dcp_groups = {ranks: ThreadGroup(dcp) for ranks in shape.groups("dcp")}
        self._groups = [tp_group, *dcp_groups.values()]
        self._pool = ThreadPoolExecutor(tp)
        self.dcp: list[ThreadCommunicator] = []
        for ranks, group in dcp_groups.items():
            self.dcp += [ThreadCommunicator(ranks.index(rank), group) for rank in ranks]

        def make(rank: int) -> TinyWorker:
            return TinyWorker(directory, tp=ThreadCommunicator(rank, tp_group), dcp=self.dcp[rank])

        self._ranks = range(tp)
        self.workers = self.on_all(make)

    def on_all(self, run: Callable[[int], R]) -> list[R]:
        """`run(rank)` on all ranks at once; the results in rank order."""

        def guarded(rank: int) -> R:
            try:
                return run(rank)
            except BaseException:
                for group in self._groups:
                    group.abort()
                raise

        futures = [self._pool.submit(guarded, rank) for rank in self._ranks]
        broken = [future.exception(DEADLINE_S) for future in futures]
        for error in broken:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]

    def execute(self, batch: ScheduledBatch) -> bytes:
        """The sampled ids, which are the same on all ranks."""
        (ids,) = set(self.on_all(lambda rank: self.workers[rank].execute(batch)))
        return ids

    def core(self) -> CoreSide:
        return self.workers[0].core()

    def close(self) -> None:
        self._pool.shutdown()
