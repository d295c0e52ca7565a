"""Blocks of requests that wait to be stored in one tier. The requests take turns."""

from collections import deque

from engine_core.kv_tiers.tier_copies import Freed

__all__ = ["StoreQueue"]

_MOST_BLOCKS = 1 << 16


class StoreQueue:
    """Entries with blocks left. Of more than `_MOST_BLOCKS` blocks the oldest entries are dropped."""

    def __init__(self) -> None:
        self.num_left = 0
        """Blocks of all entries."""
        self._entries: deque[Freed] = deque()

    def __len__(self) -> int:
        """Entries."""
        return len(self._entries)

    def add(self, freed: Freed) -> None:
        """The blocks of `freed` wait from now on."""
        self._entries.append(freed)
        freed.count(freed.left)
        self.num_left += freed.left
        while self.num_left > _MOST_BLOCKS and len(self._entries) > 1:
            self._drop(self._entries.popleft())

    def first(self) -> Freed:
        """The entry whose turn it is."""
        return self._entries[0]

    def done(self, freed: Freed, num_copies: int) -> None:
        """The last block of the first entry waits no longer: `num_copies` of it are under way."""
        freed.left -= 1
        freed.count(num_copies - 1)
        self.num_left -= 1

    def end_turn(self) -> None:
        """Go on with the next entry."""
        freed = self._entries.popleft()
        if freed.left:
            self._entries.append(freed)

    def clear(self) -> None:
        """Drop all entries."""
        while self._entries:
            self._drop(self._entries.popleft())

    def check_integrity(self) -> None:
        """Raises AssertionError unless the blocks are counted."""
        assert self.num_left == sum(freed.left for freed in self._entries), "a block to store is not counted"

    def _drop(self, freed: Freed) -> None:
        freed.count(-freed.left)
        self.num_left -= freed.left
