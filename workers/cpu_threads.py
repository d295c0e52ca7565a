"""How many threads a CPU worker computes with: fewer while other programs use the CPUs.

The threads of an operator wait for the slowest one. When another program runs on the CPU of a thread, the
thread waits milliseconds for its turn, again and again in the hundreds of operators of a step, while the
others spin. So two threads on one and a half CPUs are several times slower than one. The results do not
depend on the number of threads.
"""

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from atom.shared.utils.logger import get_logger

__all__ = ["CpuThreads"]

_STAT = Path("/proc/stat")
_INTERVAL_S = 0.3
"""Between two measurements; the kernel counts in units of 10 ms."""
_SHARE = 0.4
"""A thread more than the whole CPUs that are free is used if this share of another CPU is free.

With one busy program on two CPUs, two threads get 1.33 CPUs; a server's other processes use 0.3 or less."""


class CpuThreads:
    """Sets the number of threads of this process, from what it and others used since the last time."""

    def __init__(
        self,
        most: int,
        cpus: Collection[int],
        stat: Callable[[], str] = _STAT.read_text,
        clocks: Callable[[], tuple[float, float]] = lambda: (time.monotonic(), time.process_time()),
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ):
        """`most`: the threads of a quiet machine. `cpus`: those that this process may run on.

        `clocks` are the time, and the CPU time of this process, in seconds.
        """
        self._most = most
        self._names = {f"cpu{cpu}" for cpu in cpus}
        self._stat = stat
        self._clocks = clocks
        self._set_threads = set_threads
        self._next = 0.0
        self._before: tuple[float, float, float, float] | None = None
        self.num_threads = most

    def adjust(self) -> None:
        """Measure and set, if the last time was long enough ago: before each step."""
        now, own_s = self._clocks()
        if now < self._next:
            return
        self._next = now + _INTERVAL_S
        last = self._before
        self._before = (now, own_s, *self._counted())
        if last is None:
            return
        wall_s, used_s, idle_s, all_s = (new - old for new, old in zip(self._before, last, strict=True))
        if all_s < wall_s / 2:
            return  # a sandbox whose counters stand still
        free = (used_s + idle_s) / wall_s
        threads = max(1, min(self._most, int(free + 1 - _SHARE)))
        if threads != self.num_threads:
            get_logger().debug("%d of %d threads compute: %.1f CPUs are free", threads, self._most, free)
            self.num_threads = threads
            self._set_threads(threads)

    def _counted(self) -> tuple[float, float]:
        """Seconds that the CPUs have been idle, and all that were counted, since the machine started."""
        idle = 0
        total = 0
        for line in self._stat().splitlines():
            name, *times = line.split()
            if name in self._names:  # user, nice, system, idle, waiting for I/O, …
                idle += int(times[3]) + int(times[4])
                total += sum(map(int, times[:8]))
        hertz = os.sysconf("SC_CLK_TCK")
        return idle / hertz, total / hertz
