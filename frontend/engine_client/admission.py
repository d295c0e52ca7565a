"""Admission control: bounds the running and queued sequences of this process."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

from frontend.errors import OverloadedError, RequestError
from frontend.metrics.metrics import Metrics

__all__ = ["Admission", "AdmissionSlot"]

_RATE_WINDOW_S = 10.0
_MIN_RETRY_S, _MAX_RETRY_S = 1, 60


class Admission:
    """Admits at most `capacity()` sequences; each counts from its admission until it ends.

    `most` is the largest capacity: a request for more can never be served. `live` returns the number of
    sequences that the engines have. A request calls `slot` before its body
    is read, `AdmissionSlot.reserve` once the number of its sequences is known, and `begin` as each
    sequence is sent to the engine.
    """

    def __init__(self, capacity: Callable[[], int], most: int, live: Callable[[], int], metrics: Metrics):
        self._capacity = capacity
        self._most = most
        self._metrics = metrics
        self._live = live
        self._reserved: dict[int, AdmissionSlot] = {}  # by request id: reserved, not yet sent to the engine
        self._slots = 0
        self._finished = _DecayingCount()
        self._refusals = _DecayingCount()

    def check(self, count: int = 1) -> None:
        """Raises OverloadedError if `count` more sequences exceed the capacity."""
        taken = self._live() + len(self._reserved) + self._slots
        capacity = self._capacity()
        if taken + count <= capacity:
            return
        self._metrics.refused += 1
        self._refusals.add(count)
        raise OverloadedError(
            f"the server is at its limit of {capacity} running and queued requests; try again later",
            self._retry_after_s(),
        )

    @contextlib.contextmanager
    def slot(self) -> Iterator["AdmissionSlot"]:
        """Reserve one sequence for the block; raises OverloadedError when the server is full."""
        self.check()
        slot = AdmissionSlot(self)
        self._slots += 1
        try:
            yield slot
        finally:
            slot.release()

    def begin(self, request_id: int) -> float:
        """The engine counts this sequence from now on; returns its request's arrival time."""
        slot = self._reserved.pop(request_id, None)
        return time.monotonic() if slot is None else slot.arrived_at

    def ended(self, count: int = 1) -> None:
        """Count finished sequences: their rate determines Retry-After."""
        self._finished.add(count)

    def _reserve(self, slot: "AdmissionSlot", request_ids: Sequence[int]) -> None:
        if len(request_ids) > self._most:
            raise RequestError(
                f"{len(request_ids)} choices in one request, but this server takes {self._most} at most: "
                "request fewer, or start the server with a larger --max-queued-requests"
            )
        self.check(len(request_ids) - 1)  # the slot itself reserves one
        self._slots -= 1
        self._reserved.update(dict.fromkeys(request_ids, slot))

    def _release(self, request_ids: Sequence[int] | None) -> None:
        if request_ids is None:
            self._slots -= 1
            return
        for request_id in request_ids:
            self._reserved.pop(request_id, None)

    def _retry_after_s(self) -> int:
        """Time in which the recently refused requests could all be admitted."""
        rate = self._finished.count() / _RATE_WINDOW_S
        if not rate:
            return _MIN_RETRY_S
        wait = math.ceil(self._refusals.count() / rate)
        return min(max(wait, _MIN_RETRY_S), _MAX_RETRY_S)


class AdmissionSlot:
    """The reservation of one request."""

    def __init__(self, admission: Admission):
        self.arrived_at = time.monotonic()
        self._admission = admission
        self._request_ids: Sequence[int] | None = None

    def reserve(self, request_ids: Sequence[int]) -> None:
        """Reserve all sequences. Raises OverloadedError, or RequestError above the capacity."""
        self._admission._reserve(self, request_ids)
        self._request_ids = request_ids

    def release(self) -> None:
        """Release the sequences that were not sent to the engine."""
        self._admission._release(self._request_ids)


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
