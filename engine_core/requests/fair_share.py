"""A queue that gives every API key its share: deficit round robin over tokens.

Keys take turns. A key's requests are admitted while its deficit is positive; what they compute is deducted:
prompt tokens that were not cached, and generated tokens. A key whose deficit is used up waits until those of
all keys with waiting requests are: then each gets a quantum. So over time keys compute equal numbers of
tokens, however many requests each one sends. What was admitted before, and returns after a preemption, comes
first.
"""

from collections import OrderedDict

from engine_core.requests.request import Request
from engine_core.requests.request_queue import RequestQueue

__all__ = ["FairShareQueue"]

QUANTUM = 2048
"""Tokens that a key may compute in a turn, besides the rest of its last request."""


class FairShareQueue(RequestQueue):
    """A queue for each key; within it the order is that of the policy."""

    def __init__(self, policy: str):
        """Raises ValueError for an unknown policy."""
        super().__init__(policy)
        self._policy = policy
        self._resumed = RequestQueue(policy)
        self._by_key: OrderedDict[str, RequestQueue] = OrderedDict()
        """By key, those with waiting requests; the first one's turn it is."""
        self._deficits: dict[str, int] = {}
        """Tokens by key; those of other keys are debts, and kept as long as any request waits."""

    def add(self, request: Request) -> None:
        super().add(request)
        if _was_admitted(request):
            self._resumed.add(request)
            return
        key = request.settings.tenant
        if key not in self._by_key:
            self._by_key[key] = RequestQueue(self._policy)
            self._deficits.setdefault(key, 0)
        self._by_key[key].add(request)

    def first(self) -> Request | None:
        resumed = self._resumed.first()
        if resumed is not None or not self._by_key:
            return resumed
        if all(self._deficits[key] <= 0 for key in self._by_key):
            most = max(self._deficits[key] for key in self._by_key)
            for key in self._by_key:
                self._deficits[key] += QUANTUM * (-most // QUANTUM + 1)
        while self._deficits[key := next(iter(self._by_key))] <= 0:
            self._by_key.move_to_end(key)
        return self._by_key[key].first()

    def remove(self, request: Request) -> None:
        super().remove(request)
        if self._resumed.has(request):
            self._resumed.remove(request)
            return
        key = request.settings.tenant
        self._by_key[key].remove(request)
        if not len(self._by_key[key]):
            del self._by_key[key]
            self._deficits[key] = min(self._deficits[key], 0)
        if not self._by_key:
            self._deficits.clear()

    def charge(self, request: Request, tokens: int) -> None:
        """The request computes so many tokens; free while no request waits."""
        if self._by_key:
            key = request.settings.tenant
            self._deficits[key] = self._deficits.get(key, 0) - tokens
            if self._deficits[key] <= 0 and key in self._by_key:
                self._by_key.move_to_end(key)  # its turn has ended


def _was_admitted(request: Request) -> bool:
    """Whether it has run before, here or in another engine."""
    return request.cached_tokens is not None or request.settings.replays > 0 or request.num_generated > 0
