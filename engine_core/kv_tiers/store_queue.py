"""Blocks of requests that wait to be stored in one tier. The requests take turns."""

from collections import OrderedDict, deque

from engine_core.kv_tiers.tier_copies import Freed

__all__ = ["StoreQueue"]

_MOST_BLOCKS = 1 << 16


class StoreQueue:
    """Requests, each with entries in their order. Of more than `_MOST_BLOCKS` blocks some are dropped."""

    def __init__(self) -> None:
        self.num_left = 0
        """Blocks of all entries."""
        self._requests: OrderedDict[int, deque[Freed]] = OrderedDict()

    def __len__(self) -> int:
        """Requests."""
        return len(self._requests)

    def add(self, freed: Freed) -> None:
        """The blocks of `freed` wait from now on."""
        # An object that an entry refers to keeps its id.
        self._requests.setdefault(id(freed.store or freed), deque()).append(freed)
        freed.count(freed.left)
        self.num_left += freed.left
        while self.num_left > _MOST_BLOCKS and self.first() is not freed:
            self._drop_first()

    def first(self) -> Freed:
        """The first entry of the request whose turn it is."""
        return next(iter(self._requests.values()))[0]

    def done(self, freed: Freed, num_copies: int) -> None:
        """The last block of the first entry waits no longer: `num_copies` of it are under way."""
        freed.left -= 1
        freed.count(num_copies - 1)
        self.num_left -= 1

    def end_turn(self) -> None:
        """Go on with the next request."""
        key, entries = self._requests.popitem(last=False)
        if not entries[0].left:
            entries.popleft()
        if entries:
            self._requests[key] = entries

    def clear(self) -> None:
        """Drop all entries."""
        while self._requests:
            self._drop_first()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the blocks are counted."""
        left = sum(freed.left for entries in self._requests.values() for freed in entries)
        assert self.num_left == left, "a block to store is not counted"

    def _drop_first(self) -> None:
        key, entries = next(iter(self._requests.items()))
        freed = entries.popleft()
        freed.count(-freed.left)
        self.num_left -= freed.left
        if not entries:
            del self._requests[key]
