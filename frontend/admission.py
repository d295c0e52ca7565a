"""How many requests may be inside at once: those that run, and a bounded queue behind them."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

from frontend.errors import OverloadedError, RequestError

__all__ = ["Admission", "AdmissionSlot"]

_MEMORY_S = 10.0
_MIN_RETRY_S, _MAX_RETRY_S = 1, 60


class Admission:
    """Places for choices. A choice has one from the moment it is let in until it ends.

    `live` tells how many choices the engine has. Request by request: `place` before its body is
    looked into, `AdmissionSlot.take` once its choices are known, `begin` as each goes to the engine.
    """

    def __init__(self, capacity: int, live: Callable[[], int]):
        self.refused = 0
        """Requests that were sent away because all places were taken."""
        self._capacity = capacity
        self._live = live
        self._coming: dict[int, AdmissionSlot] = {}  # choices with a place that the engine does not have yet
        self._uncounted = 0
        self._ends = _Recent()
        self._refusals = _Recent()

    def check(self, count: int = 1) -> None:
        """Raises OverloadedError while there is no room for `count` more choices."""
        taken = self._live() + len(self._coming) + self._uncounted
        if taken + count <= self._capacity:
            return
        self.refused += 1
        self._refusals.add(count)
        raise OverloadedError(
            f"the server is at its limit of {self._capacity} requests that run or wait; try again later",
            self._retry_after_s(),
        )

    @contextlib.contextmanager
    def place(self) -> Iterator["AdmissionSlot"]:
        """Keep one place for the block; raises OverloadedError while there is none."""
        self.check()
        place = AdmissionSlot(self)
        self._uncounted += 1
        try:
            yield place
        finally:
            place.leave()

    def begin(self, request_id: int) -> float:
        """The engine counts this choice from now on; tells when its request arrived."""
        place = self._coming.pop(request_id, None)
        return time.monotonic() if place is None else place.arrived_at

    def ended(self, count: int = 1) -> None:
        """So many choices have ended: the pace of this tells others when to come back."""
        self._ends.add(count)

    def _count(self, place: "AdmissionSlot", request_ids: Sequence[int]) -> None:
        if len(request_ids) > self._capacity:
            raise RequestError(
                f"{len(request_ids)} choices in one request, but this server takes {self._capacity} at most: "
                "ask for fewer, or start it with a larger --max-queued-requests"
            )
        self.check(len(request_ids) - 1)  # one place is its own already
        self._uncounted -= 1
        self._coming.update(dict.fromkeys(request_ids, place))

    def _release(self, request_ids: Sequence[int] | None) -> None:
        if request_ids is None:
            self._uncounted -= 1
            return
        for request_id in request_ids:
            self._coming.pop(request_id, None)

    def _retry_after_s(self) -> int:
        """Until those who were just sent away would all have found a place."""
        pace = self._ends.count() / _MEMORY_S
        if not pace:
            return _MIN_RETRY_S
        wait = math.ceil(self._refusals.count() / pace)
        return min(max(wait, _MIN_RETRY_S), _MAX_RETRY_S)


class AdmissionSlot:
    """One request on its way into the engine."""

    def __init__(self, admission: Admission):
        self.arrived_at = time.monotonic()
        self._admission = admission
        self._request_ids: Sequence[int] | None = None

    def take(self, request_ids: Sequence[int]) -> None:
        """Places for all choices. Raises OverloadedError, or RequestError if there never are as many."""
        self._admission._count(self, request_ids)
        self._request_ids = request_ids

    def leave(self) -> None:
        """Give back what the engine has not got."""
        self._admission._release(self._request_ids)


class _Recent:
    """A count that forgets: what was added t seconds ago weighs exp(-t / _MEMORY_S)."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at = time.monotonic()

    def add(self, count: int) -> None:
        self._value = self.count() + count
        self._at = time.monotonic()

    def count(self) -> float:
        return self._value * math.exp((self._at - time.monotonic()) / _MEMORY_S)
