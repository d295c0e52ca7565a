"""The points of the charts: one a second for five minutes, and coarser ones for an hour and six.

Each range has a ring of 300 points of about 1 kB: all of them take less than 1 MB, however long the
server runs.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from frontend.metrics.metrics import EngineMetrics, Metrics
from frontend.status.latency import Window, summed
from frontend.status.records import Point, Quantiles, Rank

__all__ = ["MAX_POINTS", "RANGES", "History"]

MAX_POINTS = 300
"""Points of each range."""
RANGES = {"5m": 1, "1h": 12, "6h": 72}
"""Looks, of one second each, that a point of a range stands for."""
_WINDOW = 15
"""Looks whose latencies are in a point that stands for one."""
_LATENCIES = ("time_to_first_token", "inter_token", "queue_time")


class _Rates(NamedTuple):
    """Figures of one look: those of `Point`, without latencies."""

    prefill: float
    decode: float
    running: float
    waiting: float
    requests: float
    errors: float


class _Buckets(NamedTuple):
    """A histogram over all engines; both lists are empty before there is an engine."""

    bounds: list[float]
    counts: list[int]


class History:
    """Keeps the points of all ranges."""

    def __init__(self) -> None:
        self._rings = {name: _Ring(looks) for name, looks in RANGES.items()}
        self._before: tuple[float, int, int] | None = None
        """Time, ended sequences and HTTP errors of the last look."""

    def add(self, at: float, ranks: Sequence[Rank], metrics: Metrics) -> Point:
        """Take in a look at the time `at`, in seconds since the epoch; returns the point of this second."""
        rates = self._rates(at, ranks, metrics)
        latencies = [_buckets(list(metrics.engines.values()), name) for name in _LATENCIES]
        for ring in self._rings.values():
            ring.add(at, rates, latencies)
        return self._rings["5m"].points[-1]

    def points(self, name: str) -> list[Point]:
        """The points of a range of RANGES, the oldest first."""
        return list(self._rings[name].points)

    def _rates(self, at: float, ranks: Sequence[Rank], metrics: Metrics) -> _Rates:
        ended = sum(sum(engine.finish_reasons.values()) for engine in metrics.engines.values())
        errors = sum(count for status, count in metrics.responses.items() if status >= 400)
        then, ended_then, errors_then = self._before or (at, ended, errors)
        self._before = (at, ended, errors)
        seconds = max(at - then, 1e-3)  # the clock may be set back
        return _Rates(
            prefill=sum(rank.prefill for rank in ranks),
            decode=sum(rank.decode for rank in ranks),
            running=sum(rank.running for rank in ranks),
            waiting=sum(rank.waiting for rank in ranks),
            # Counts fall where the figures of another frontend cannot be read.
            requests=max(ended - ended_then, 0) / seconds,
            errors=max(errors - errors_then, 0) / seconds,
        )


class _Ring:
    """The points of one range, each of so many `looks`."""

    def __init__(self, looks: int):
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._looks = looks
        self._pending: list[_Rates] = []
        self._windows: list[Window] | None = None

    def add(self, at: float, rates: _Rates, latencies: Sequence[_Buckets]) -> None:
        """Take in a look; the last one of a point adds it."""
        if self._windows is None:  # what was counted before the first look is in no point
            self._windows = [Window(_WINDOW if self._looks == 1 else 1) for _ in latencies]
            self._move(self._windows, latencies)
        self._pending.append(rates)
        if len(self._pending) < self._looks:
            return
        means = (sum(values) / self._looks for values in zip(*self._pending, strict=True))
        self._pending.clear()
        self.points.append(Point(at, *means, *self._move(self._windows, latencies)))

    @staticmethod
    def _move(windows: Sequence[Window], latencies: Sequence[_Buckets]) -> list[Quantiles | None]:
        return [window.move(*buckets) for window, buckets in zip(windows, latencies, strict=True)]


def _buckets(engines: Sequence[EngineMetrics], name: str) -> _Buckets:
    if not engines:
        return _Buckets([], [])
    return _Buckets(getattr(engines[0], name).bounds, summed([getattr(engine, name) for engine in engines]))
