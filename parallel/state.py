"""The tensor-parallel group of one engine."""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TPGroup:
    """This process's rank in the group."""

    rank: int
    size: int
    device: torch.device

    def close(self) -> None:
        """Leave the group; later collectives fail."""
        # This is torch's default group. A reference to it would keep gloo's threads alive after the
        # group is destroyed, which occasionally aborts the process at exit.
        if self.size > 1:
            dist.destroy_process_group()


def init_tensor_parallel(
    rank: int, size: int, rendezvous_file: str | Path, device: torch.device, timeout: float = 300.0
) -> TPGroup:
    """Join the other ranks; returns when all have joined.

    The ranks find one another through `rendezvous_file`, which must not exist before the first rank
    opens it. `timeout`, in seconds, applies to joining and to every later collective; after it they
    raise torch's RuntimeError. All ranks are on this host: gloo is bound to the loopback interface
    unless GLOO_SOCKET_IFNAME names another.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not among {size} ranks")
    if size == 1:
        return TPGroup(0, 1, device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=timeout)
    store = dist.FileStore(str(rendezvous_file), size)
    store.set_timeout(limit)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=limit,
        device_id=device if device.type == "cuda" else None,
    )
    return TPGroup(rank, size, device)
