"""The ranks that run collectives together, and their named groups.

World rank = (dp * tp_size) + tp: tensor-parallel ranks are neighbours, on one host where possible.

    tp 2 x dp 2         tp 0      tp 1        tp groups: rows         {0, 1}  {2, 3}
                dp 0   rank 0    rank 1       dp groups: columns      {0, 2}  {1, 3}
                dp 1   rank 2    rank 3       ep group:  all ranks    {0, 1, 2, 3}

tp   split every layer; their tokens are the same
dcp  neighbours within a tp group, which split the latent KV cache by tokens (decode context parallel)
dp   compute different tokens with the same share of the layers
ep   share the experts: every rank of tp x dp

Data-parallel engines without shared experts share no collective: each has a mesh of its own, with dp 1.
With several data-parallel ranks there is also a group of all ranks for numbers on the host.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from atom.shared.messages.launch import Rendezvous
from atom.shared.utils import envs
from parallel.communicator import Communicator
from parallel.host_group import HostGroup
from parallel.rendezvous import MeetingPoint

GroupName = Literal["tp", "dcp", "dp", "ep"]


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh's dimensions. Raises ValueError for sizes that are not supported."""

    tp: int = 1
    dp: int = 1
    dcp: int = 1
    """Ranks of each dcp group; divides tp."""

    def __post_init__(self) -> None:
        if min(self.tp, self.dp) < 1:
            raise ValueError(f"the sizes of a mesh are at least 1: tp {self.tp}, dp {self.dp}")
        if self.dcp < 1 or self.tp % self.dcp:
            raise ValueError(f"decode context parallel ranks must divide tp {self.tp}: dcp {self.dcp}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    def groups(self, name: GroupName) -> list[tuple[int, ...]]:
        """The world ranks of every group of that name, in the order of their ranks within it."""
        ranks = range(self.size)
        match name:
            case "tp":
                return [tuple(ranks[first : first + self.tp]) for first in ranks[:: self.tp]]
            case "dcp":
                return [tuple(ranks[first : first + self.dcp]) for first in ranks[:: self.dcp]]
            case "dp":
                return [tuple(ranks[first :: self.tp]) for first in ranks[: self.tp]]
            case "ep":
                return [tuple(ranks)]


@dataclass(frozen=True)
class Mesh:
    """This process's device and its group of each name; `Mesh(device)` has one rank."""

    device: torch.device
    tp: Communicator = field(default_factory=Communicator)
    dcp: Communicator = field(default_factory=Communicator)
    dp: Communicator = field(default_factory=Communicator)
    ep: Communicator = field(default_factory=Communicator)
    host: HostGroup | None = None
    """All ranks; None with one data-parallel rank."""
    meeting: MeetingPoint | None = None
    """None: one rank, without process groups."""

    def close(self) -> None:
        """Leave the groups; later collectives fail. Returns when all ranks have, or after seconds."""
        # A reference to a process group would keep gloo's threads alive after it is destroyed, which
        # occasionally aborts the process at exit.
        for group in (self.tp, self.dcp, self.dp, self.ep):
            group.close()
        if self.host is not None:
            self.host.close()
        if self.meeting is not None:
            # NCCL would wait for the graphs that captured its kernels: its groups end with the process.
            if self.device.type != "cuda":
                dist.destroy_process_group()
            self.meeting.close()


def join_mesh(
    shape: MeshShape, rank: int, where: Rendezvous | None, device: torch.device, timeout: float = 300.0
) -> Mesh:
    """Join the other ranks of `where`; returns when all have joined.

    `rank` is the world rank. `timeout`, in seconds, applies to joining and to every later collective;
    after it they raise RuntimeError. One rank needs no rendezvous and makes no process group.
    """
    if not 0 <= rank < shape.size:
        raise ValueError(f"rank {rank} is not among {shape.size} ranks")
    if shape.size == 1:
        return Mesh(device)
    if where is None:
        raise ValueError(f"rank {rank} of {shape.size} was given no rendezvous")
    meeting = MeetingPoint(where, rank, shape.size, timeout)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=meeting.store,
        rank=rank,
        world_size=shape.size,
        timeout=limit,
        device_id=device if device.type == "cuda" else None,
    )
    made = _process_groups(shape, limit)
    tp, dcp, dp, ep = (_communicator(shape.groups(name), rank, made) for name in _NAMES)
    # By gloo on a GPU too: these numbers are needed on the host, before a launch.
    host = HostGroup(rank, dist.new_group(backend="gloo", timeout=limit)) if shape.dp > 1 else None
    return Mesh(device, tp, dcp, dp, ep, host, meeting)


_NAMES: tuple[GroupName, ...] = ("tp", "dcp", "dp", "ep")
_ProcessGroups = dict[tuple[int, ...], dist.ProcessGroup]


def _process_groups(shape: MeshShape, timeout: timedelta) -> _ProcessGroups:
    """A process group for each set of several ranks, by its ranks; names with the same ranks share it.

    Every rank makes all groups, those of others too, in the same order: torch requires it.
    """
    assert dist.group.WORLD is not None
    made: _ProcessGroups = {tuple(range(shape.size)): dist.group.WORLD}
    for name in _NAMES:
        for ranks in shape.groups(name):
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=timeout)
    return made


def _communicator(groups: list[tuple[int, ...]], rank: int, made: _ProcessGroups) -> Communicator:
    (ranks,) = (ranks for ranks in groups if rank in ranks)
    fused_norm = envs.ATOM_ENABLE_ALLREDUCE_RMSNORM_FUSION
    return Communicator(ranks.index(rank), len(ranks), made.get(ranks), fused_norm=fused_norm)
