"""Times calls on a device, and measures the device's roofline.

Large calls get several sets of arguments in turn, so that weights are read from memory as in a
model; the arguments of small calls stay in the caches, as in a model.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workers.graphs.graph_recorder import GraphRecorder

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
    """call: by the host's clock; graph: replays of a captured graph; launches: queued launches."""


@dataclass(frozen=True)
class Roofline:
    """The rates of the device's own copy and GEMM."""

    bytes_per_s: float
    flops_per_s: float

    def floor(self, moved: float, flops: float) -> float:
        """Least seconds for this work."""
        return max(moved / self.bytes_per_s, flops / self.flops_per_s)

    def bound(self, moved: float, flops: float) -> str:
        """Which rate gives the floor."""
        return "compute" if flops / self.flops_per_s > moved / self.bytes_per_s else "memory"


class Clock:
    """Times calls for `budget_s` seconds each, or a little longer."""

    def __init__(self, device: torch.device, budget_s: float):
        self._device = device
        self._budget_s = budget_s

    def time(self, calls: Sequence[Call]) -> Timing:
        """Time of one call; the calls differ only in their arguments, and each runs once untimed."""
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
        """Seconds of rounds, by events."""
        taken: list[float] = []
        ends = time.perf_counter() + self._budget_s
        while len(taken) < _FEWEST_ROUNDS or (time.perf_counter() < ends and len(taken) < _MOST_ROUNDS):
            first = torch.Event("cuda", enable_timing=True)
            last = torch.Event("cuda", enable_timing=True)
            first.record()
            body()
            last.record()
            last.synchronize()
            taken.append(float(first.elapsed_time(last)) / 1e3)
        return taken


def _waits(body: Call) -> bool:
    """Whether the call synchronises, which a graph cannot capture."""
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
    """A replay of the captured call; None if it cannot be captured."""
    try:
        return GraphRecorder()(body, "timed")[0]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None


def measure_roofline(clock: Clock, device: torch.device, dtype: torch.dtype) -> Roofline:
    """The rates of a large copy and a large GEMM, each the best of several runs."""
    return Roofline(_copy_rate(clock, device), _gemm_rate(clock, device, dtype))


def _copy_rate(clock: Clock, device: torch.device) -> float:
    """Bytes read and written per second."""
    source = torch.ones(1 << (26 if device.type == "cpu" else 29), dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    best = clock.time([lambda: target.copy_(source)]).best
    return 2 * source.numel() * source.element_size() / best


def _gemm_rate(clock: Clock, device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second."""
    width = 1536 if device.type == "cpu" else 8192
    a, b = torch.randn(2, width, width, device=device).to(dtype)
    return 2 * width**3 / clock.time([lambda: torch.mm(a, b)]).best
