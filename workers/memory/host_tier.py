"""A KV tier in memory of the host: pinned for a GPU, so that it copies without the CPU."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from atom.shared.messages.kv_tiers import BlockCopy
from atom.shared.utils.sizes import size_text
from workers.memory.pinning import pin

__all__ = ["HostTier"]

_PAGE_BYTES = 4096
_SHARE_BYTES = 256 << 20
_MOST_THREADS = 16


class HostTier:
    """Slots of each KV group; S bytes in a slot of it."""

    is_two_way = False
    part_bytes = 16 << 20
    """A step's own copies wait for the engine that copies a part: 0.3 ms at 55 GB/s."""

    def __init__(self, num_slots: Sequence[int], slot_bytes: Sequence[int], device: torch.device, room: int):
        """`num_slots` and `slot_bytes` by KV group; `room`: bytes that are left on the host.

        Raises MemoryError if the host lacks the memory, or may not pin so much.
        """
        sizes = list(zip(num_slots, slot_bytes, strict=True))
        total = sum(count * size for count, size in sizes)
        if total > room:
            raise MemoryError(_lack(total, f"{size_text(max(room, 0))} are left"))
        try:
            # Pages that were never written take no memory on a CPU; a GPU needs all of them at once.
            memory = torch.from_numpy(np.zeros(total, np.uint8))
        except MemoryError:
            raise MemoryError(_lack(total, "it cannot be allocated")) from None
        if device.type == "cuda":
            _fill_pages(memory.numpy())
            if status := pin(memory, self):
                raise MemoryError(_lack(total, f"it cannot be pinned (error {status})"))
        parts = memory.split([count * size for count, size in sizes])
        self._slots = [part.view(count, size) for part, (count, size) in zip(parts, sizes, strict=True)]
        self._arrays = [] if device.type == "cuda" else [slots.numpy() for slots in self._slots]

    def write(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        """Copy rows of bytes on the device to slots, on a GPU asynchronously; returns no failed ones."""
        if self._arrays:
            self._arrays[group][[copy.slot for copy in copies]] = rows_NS.numpy()
            return []
        for first, end, slot in _runs(copies):
            self._slots[group][slot : slot + end - first].copy_(rows_NS[first:end], non_blocking=True)
        return []

    def read(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        """Copy slots to rows of bytes on the device, on a GPU asynchronously; returns no failed ones."""
        if self._arrays:
            rows_NS.numpy()[:] = self._arrays[group][[copy.slot for copy in copies]]
            return []
        for first, end, slot in _runs(copies):
            rows_NS[first:end].copy_(self._slots[group][slot : slot + end - first], non_blocking=True)
        return []


def _fill_pages(memory: np.ndarray) -> None:
    """Make the system provide all pages, by several threads: pinning takes them one after another."""

    def fill(start: int) -> None:
        memory[start : start + _SHARE_BYTES : _PAGE_BYTES] = 0

    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with ThreadPoolExecutor(threads, "fill-pages") as pool:
        list(pool.map(fill, range(0, len(memory), _SHARE_BYTES)))


def _runs(copies: Sequence[BlockCopy]) -> Iterator[tuple[int, int, int]]:
    """Copies to or from consecutive slots, as the first one, the one after the last, and the first slot."""
    first = 0
    for end in range(1, len(copies) + 1):
        if end == len(copies) or copies[end].slot != copies[end - 1].slot + 1:
            yield first, end, copies[first].slot
            first = end


def _lack(total: int, why: str) -> str:
    return (
        f"--kv-offload-memory: {size_text(total)} of host memory for a worker: {why}; lower it, or raise the "
        "limits of this host or container (memory, ulimit -l)"
    )
