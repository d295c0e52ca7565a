"""Percentiles of the last seconds, from histograms that only grow."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from frontend.metrics.metrics import Histogram
from frontend.status.records import Quantiles

__all__ = ["Window", "quantiles", "summed"]

_FRACTIONS = (0.5, 0.9, 0.99)


class Window:
    """The values that were observed in the last `length` calls of `move`."""

    def __init__(self, length: int):
        self._totals: deque[list[int]] = deque(maxlen=length + 1)

    def move(self, bounds: list[float], total: list[int]) -> Quantiles | None:
        """The percentiles of the values since `length` calls ago; `total` are the counts of a histogram."""
        self._totals.append(total)
        if not total:
            return None
        before = self._totals[0] or [0] * len(total)  # there was no engine then
        # Counts fall where the figures of another frontend cannot be read.
        new = [max(now - then, 0) for now, then in zip(total, before, strict=True)]
        return quantiles(bounds, new)


def summed(histograms: Sequence[Histogram]) -> list[int]:
    """The counts of all `histograms`, which have the same bounds; empty without one."""
    return list(map(sum, zip(*(histogram.counts for histogram in histograms), strict=True)))


def quantiles(bounds: list[float], counts: list[int]) -> Quantiles | None:
    """Interpolated inside the buckets; None without values. Values above all bounds count as the last."""
    cumulative = list(accumulate(counts))
    if not cumulative[-1]:
        return None
    median, most, nearly_all = (_quantile(bounds, cumulative, fraction) for fraction in _FRACTIONS)
    return median, most, nearly_all


def _quantile(bounds: list[float], cumulative: list[int], fraction: float) -> float:
    wanted = fraction * cumulative[-1]
    index = next(i for i, count in enumerate(cumulative) if count >= wanted)
    if index == len(bounds):
        return bounds[-1]
    low = bounds[index - 1] if index else 0.0
    before = cumulative[index - 1] if index else 0
    share = (wanted - before) / (cumulative[index] - before)
    return low + (bounds[index] - low) * share
