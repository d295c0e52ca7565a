"""Admission control: bounds the running and queued sequences of this process."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import NoReturn, Protocol

from frontend.errors import OverloadedError, RequestError
from frontend.metrics.metrics import Metrics

__all__ = ["Admission", "AdmissionSlot", "Load"]

_RATE_WINDOW_S = 10.0
_MIN_RETRY_S = 1
_MAX_RETRY_S = 60


class Load(Protocol):
    """The sequences in progress."""

    @property
    def capacity(self) -> int:
        """How many there may be now."""

    @property
    def running_capacity(self) -> float:
        """How many of them can run at once now; the others wait."""

    def __len__(self) -> int:
        """How many there are."""


class Admission:
    """Admits sequences up to the capacity of `load`; each counts from its admission until it ends.

    `most` is the largest capacity: a request for more can never be served. A request calls `slot` before its
    body is read, `AdmissionSlot.reserve` once the number of its sequences is known, and `AdmissionSlot.begin`
    as they are sent to an engine.
    """

    def __init__(self, load: Load, most: int, metrics: Metrics, max_queue_s: float | None = None):
        """`max_queue_s`: most seconds that a request may wait until it runs; None: no limit."""
        self._load = load
        self._max_queue_s = max_queue_s
        self._most = most
        self._metrics = metrics
        self._reserved = 0  # sequences that the engines do not have yet
        self._finished = _DecayingCount()
        self._refusals = _DecayingCount()

    def check(self, count: int = 1) -> None:
        """Raises OverloadedError if `count` more sequences exceed the capacity."""
        taken = len(self._load) + self._reserved
        capacity = self._load.capacity
        if taken + count > capacity:
            self._refuse(
                count,
                f"the server is at its limit of {capacity} running and queued requests; try again later",
                0.0,
            )
        if self._max_queue_s is not None and (excess_s := self.wait_s(count) - self._max_queue_s) > 0:
            self._refuse(
                count,
                f"the request would wait for about {excess_s + self._max_queue_s:.1f} s, and at most "
                f"{self._max_queue_s:g} s are allowed (--max-queue-time); try again later",
                excess_s,
            )

    def wait_s(self, count: int = 1) -> float:
        """Seconds until `count` more sequences run, at the rate of the last ends; 0 without any."""
        rate = self._finished.count() / _RATE_WINDOW_S
        waiting = len(self._load) + self._reserved + count - self._load.running_capacity
        return max(waiting, 0.0) / rate if rate else 0.0

    def _refuse(self, count: int, message: str, least_s: float) -> NoReturn:
        """Raises OverloadedError; the client may try again after `least_s` at the earliest."""
        self._metrics.refused += 1
        self._refusals.add(count)
        raise OverloadedError(message, max(self.retry_after_s(), min(math.ceil(least_s), _MAX_RETRY_S)))

    @contextlib.contextmanager
    def slot(self) -> Iterator["AdmissionSlot"]:
        """Reserve one sequence for the block; raises OverloadedError when the server is full."""
        self.check()
        slot = AdmissionSlot(self)
        self._reserved += 1
        try:
            yield slot
        finally:
            slot.release()

    def ended(self, count: int = 1) -> None:
        """Count finished sequences: their rate determines Retry-After."""
        self._finished.add(count)

    def retry_after_s(self) -> int:
        """Time in which the recently refused requests could all be admitted."""
        rate = self._finished.count() / _RATE_WINDOW_S
        if not rate:
            return _MIN_RETRY_S
        wait = math.ceil(self._refusals.count() / rate)
        return min(max(wait, _MIN_RETRY_S), _MAX_RETRY_S)


class AdmissionSlot:
    """The reservation of one request: of one sequence, until `reserve`."""

    def __init__(self, admission: Admission):
        self.arrived_at = time.monotonic()
        self._admission = admission
        self._count = 1

    def reserve(self, count: int) -> None:
        """Reserve all sequences. Raises OverloadedError, or RequestError above the capacity."""
        admission = self._admission
        if count > admission._most:
            raise RequestError(
                f"{count} choices in one request, but this server takes {admission._most} at most: "
                "request fewer, or start the server with a larger --max-queued-requests"
            )
        admission.check(count - self._count)
        self._set(count)

    def begin(self, count: int) -> None:
        """The engines count so many of the sequences from now on."""
        self._set(self._count - count)

    def release(self) -> None:
        """Release the sequences that were not sent to an engine."""
        self._set(0)

    def _set(self, count: int) -> None:
        self._admission._reserved += count - self._count
        self._count = count


class _DecayingCount:
    """A count with exponential decay: the weight after t seconds is exp(-t / _RATE_WINDOW_S)."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at = time.monotonic()

    def add(self, count: int) -> None:
        self._value = self.count() + count
        self._at = time.monotonic()

    def count(self) -> float:
        return self._value * math.exp((self._at - time.monotonic()) / _RATE_WINDOW_S)
