"""Exchanges a few numbers between the processes of a mesh, on the host."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class HostGroup:
    """All ranks of a mesh, in the order of their world ranks."""

    def __init__(self, rank: int, process_group: dist.ProcessGroup):
        """`process_group` is one of gloo."""
        self.rank = rank
        self._process_group: dist.ProcessGroup | None = process_group

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self._process_group)

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, which are as many on each; by rank.

        Raises RuntimeError if a rank has ended, or does not call it before the group's timeout.
        """
        if self._process_group is None:
            raise RuntimeError("the group is closed")
        mine = torch.tensor(numbers, dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self._process_group)
        rows: list[list[int]] = torch.stack(gathered).tolist()
        return rows

    def close(self) -> None:
        """Forget the process group, which the mesh destroys."""
        self._process_group = None
