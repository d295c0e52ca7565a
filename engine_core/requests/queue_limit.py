"""How long a request may wait until it is admitted for the first time (--max-queue-time)."""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable

from engine_core.requests.request import Request, State

__all__ = ["QueueLimit"]


class QueueLimit:
    """`max_s` seconds; None: no limit. A check costs what has become overdue."""

    def __init__(self, max_s: float | None, clock: Callable[[], float]):
        self._max_s = math.inf if max_s is None else max_s
        self._clock = clock
        # The oldest first. References are weak: the prompts of requests that have ended are not kept.
        self._queued: deque[tuple[float, weakref.ref[Request]]] = deque()

    def add(self, requests: Iterable[Request]) -> None:
        """Count requests that have arrived. One that continues an earlier run has waited already."""
        if self._max_s == math.inf:
            return
        new = (request for request in requests if not request.num_generated and not request.settings.replays)
        self._queued.extend((request.arrived_at, weakref.ref(request)) for request in new)

    def overdue(self) -> list[Request]:
        """Those that have waited too long and were never admitted; each of them once."""
        found = []
        latest = self._clock() - self._max_s
        while self._queued and self._queued[0][0] < latest:
            request = self._queued.popleft()[1]()
            if request is not None and not request.admitted_at and request.state is not State.ENDED:
                found.append(request)
        return found
