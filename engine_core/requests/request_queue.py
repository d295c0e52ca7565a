"""Waiting requests, in the order of a scheduling policy."""

from heapq import heapify, heappop, heappush
from typing import Literal, get_args

from engine_core.requests.request import Request

Policy = Literal["fcfs", "priority"]
Rank = tuple[int, int]

_HEAP_SLACK = 64


class RequestQueue:
    """A queue under `fcfs` (order of arrival) or `priority` (smaller first, then arrival).

    A preempted request keeps its rank, and so comes before later arrivals.
    """

    def __init__(self, policy: str):
        """Raises ValueError for an unknown policy."""
        if policy not in get_args(Policy):
            raise ValueError(
                f"scheduling policy must be one of {', '.join(get_args(Policy))}, not {policy!r}"
            )
        self._by_priority = policy == "priority"
        self._heap: list[tuple[Rank, Request]] = []
        self._waiting: dict[int, Request] = {}  # in the order of entry; the heap may hold removed ones

    def __len__(self) -> int:
        return len(self._waiting)

    def rank(self, request: Request) -> Rank:
        """Scheduling order: the smallest runs first and is preempted last."""
        return (request.priority if self._by_priority else 0, request.arrival)

    def has(self, request: Request) -> bool:
        """Whether the request waits here."""
        return request.request_id in self._waiting

    def charge(self, request: Request, tokens: int) -> None:
        """The request computes so many tokens: nothing to a queue that does not share by tokens."""

    def add(self, request: Request) -> None:
        """Add a request."""
        self._waiting[request.request_id] = request
        heappush(self._heap, (self.rank(request), request))

    def first(self) -> Request | None:
        """The request that runs next; it remains in the queue."""
        while self._heap and self._waiting.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, request: Request) -> None:
        """Remove a waiting request."""
        del self._waiting[request.request_id]
        if len(self._heap) > 2 * len(self._waiting) + _HEAP_SLACK:
            self._heap = [(self.rank(waiting), waiting) for waiting in self._waiting.values()]
            heapify(self._heap)

    def oldest_arrival(self) -> float:
        """Arrival time of the request that entered the queue first; raises StopIteration if empty."""
        return next(iter(self._waiting.values())).arrived_at
