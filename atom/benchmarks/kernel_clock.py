"""How long calls take on a device, and what the device can do at best.

Calls that work on more bytes than the caches hold are given several sets of arguments in turn, so
that weights are read from memory, as in a model; small ones find theirs in the caches, as there.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workers.graph_recorder import GraphRecorder

__all__ = ["Clock", "Roofline", "Timing", "measure_roofline"]

Call = Callable[[], object]

_FEWEST_ROUNDS = 3
_MOST_ROUNDS = 1000


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    median: float
    best: float
    how: str
    """call: on the host's clock; graph: replayed by the device; launches: queued one by one."""


@dataclass(frozen=True)
class Roofline:
    """The rates of the device's own copy and matrix product."""

    bytes_per_s: float
    flops_per_s: float

    def floor(self, moved: float, flops: float) -> float:
        """Seconds that such work takes at least."""
        return max(moved / self.bytes_per_s, flops / self.flops_per_s)

    def bound(self, moved: float, flops: float) -> str:
        """What the floor comes from."""
        return "compute" if flops / self.flops_per_s > moved / self.bytes_per_s else "memory"


class Clock:
    """Times calls for `budget_s` seconds each, or a little longer."""

    def __init__(self, device: torch.device, budget_s: float):
        self._device = device
        self._budget_s = budget_s

    def time(self, calls: Sequence[Call]) -> Timing:
        """The calls do the same on different arguments; each runs once untimed."""
        if self._device.type == "cpu":
            return self._on_host(calls)
        return self._on_gpu(calls)

    def _on_host(self, calls: Sequence[Call]) -> Timing:
        for call in calls:
            call()
        seconds: list[float] = []
        ends = time.perf_counter() + self._budget_s
        while len(seconds) < _FEWEST_ROUNDS or (
            time.perf_counter() < ends and len(seconds) < _MOST_ROUNDS * len(calls)
        ):
            for call in calls:
                began = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - began)
        return Timing(statistics.median(seconds), min(seconds), "call")

    def _on_gpu(self, calls: Sequence[Call]) -> Timing:
        def body() -> None:
            for call in calls:
                call()

        body()
        torch.cuda.synchronize()
        replay = None if _waits(body) else _recorded(body)
        rounds = [seconds / len(calls) for seconds in self._rounds(replay or body)]
        return Timing(statistics.median(rounds), min(rounds), "graph" if replay else "launches")

    def _rounds(self, body: Call) -> list[float]:
        """Seconds of rounds between two events."""
        taken: list[float] = []
        ends = time.perf_counter() + self._budget_s
        while len(taken) < _FEWEST_ROUNDS or (time.perf_counter() < ends and len(taken) < _MOST_ROUNDS):
            first, last = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
            first.record()
            body()
            last.record()
            last.synchronize()
            taken.append(float(first.elapsed_time(last)) / 1e3)
        return taken


def _waits(body: Call) -> bool:
    """Whether the host waits for the device in it, which no graph can hold."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        body()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize()
    return False


def _recorded(body: Call) -> Call | None:
    """What replays it; None for calls that the driver lets no graph hold."""
    try:
        return GraphRecorder()(body, "timed")[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None


def measure_roofline(clock: Clock, device: torch.device, dtype: torch.dtype) -> Roofline:
    """Copy a large tensor, and multiply two large matrices: the best of some tries."""
    return Roofline(_copy_rate(clock, device), _product_rate(clock, device, dtype))


def _copy_rate(clock: Clock, device: torch.device) -> float:
    """Bytes read and written a second."""
    source = torch.ones(1 << (26 if device.type == "cpu" else 29), dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    best = clock.time([lambda: target.copy_(source)]).best
    return 2 * source.numel() * source.element_size() / best


def _product_rate(clock: Clock, device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second."""
    width = 1536 if device.type == "cpu" else 8192
    a, b = torch.randn(2, width, width, device=device).to(dtype)
    return 2 * width**3 / clock.time([lambda: torch.mm(a, b)]).best
