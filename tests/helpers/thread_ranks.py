"""Several ranks of a model in threads of one process: tensor parallelism without process groups."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

from parallel.communicator import Communicator

_SECONDS = 60
R = TypeVar("R")


class Meeting:
    """Where the threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=_SECONDS)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadRank(Communicator):
    """The collectives of one thread."""

    def __init__(self, rank: int, meeting: Meeting):
        super().__init__(rank, len(meeting.tensors))
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x))

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor."""
        self._meeting.tensors[self.rank] = x.clone()
        self._meeting.barrier.wait()
        found = list(self._meeting.tensors)
        self._meeting.barrier.wait()
        return found


def on_ranks(size: int, run: Callable[[Communicator], R]) -> list[R]:
    """`run` on every rank at once; the results in rank order."""
    if size == 1:
        return [run(Communicator())]
    meeting = Meeting(size)

    def of_rank(rank: int) -> R:
        try:
            return run(ThreadRank(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(of_rank, range(size)))
