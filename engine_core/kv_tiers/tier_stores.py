"""Stores: blocks of the KV cache are copied to tiers.

    freed     when a request frees its blocks: those that were hit, or that belong to a long enough prefix
    pushed    while a prompt is computed, to the tier in which another server looks for it

Both wait in a queue for each tier, of which each iteration begins as many as may be under way.
"""

from collections import deque

from atom.shared.messages.worker import stored_bytes
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.kv_tiers.tier_copies import Copied, Freed, Store
from engine_core.kv_tiers.tier_transfers import TierTransfers
from engine_core.kv_tiers.tiered_cache import UNITS_PER_LOOKED_UP, TieredCache

__all__ = ["TierStores"]

_STORED_BYTES = 128 << 20
_STORED_BLOCKS = 256
_STORED_SHARE = 8
"""Blocks that are being stored take at most this fraction (1 / 8) of a group's blocks."""
_MAX_FREED = 1 << 16
"""Blocks that wait to be stored; the oldest are dropped."""


class TierStores:
    """Blocks that wait to be stored, by tier, and those that are being stored."""

    def __init__(self, cache: TieredCache, transfers: TierTransfers):
        self.has_work = False
        """Whether the iteration's quota ended the search for blocks to store."""
        self.num_stored = [0] * len(cache.tiers)
        """Blocks copied to each tier."""
        self._cache = cache
        self._transfers = transfers
        self._storing: list[set[tuple[int, bytes]]] = [set() for _ in cache.tiers]
        """By tier, the group and digest of each."""
        self._freed: list[deque[Freed]] = [deque() for _ in cache.tiers]
        self._num_freed = [0] * len(cache.tiers)
        most = min(pool.num_blocks for pool in cache.pools) // _STORED_SHARE
        by_size = _STORED_BYTES // max(map(stored_bytes, cache.specs))
        self._most_stored = max(1, min(_STORED_BLOCKS, most, by_size))

    def freed(self, blocks: RequestBlocks) -> None:
        """Note the cached blocks of a request whose tables are about to be emptied."""
        long_enough = blocks.num_cached * self._cache.block_size >= self._cache.policy.min_tokens
        count = blocks.num_cached if long_enough else min(blocks.num_hits, blocks.num_cached)
        if not count or blocks.collided:
            return
        for tier in range(len(self._cache.tiers)):
            self._queue(tier, blocks, 0, count, list(blocks.first_live))

    def push(self, blocks: RequestBlocks) -> None:
        """Store what a running request has computed so far where other engines find it."""
        start, end = blocks.shared_store.num_pushed, blocks.num_cached
        if self._cache.shared_tier is None or end <= start or blocks.collided:
            return
        # Only the last blocks of a window are used, and states are saved at the end.
        starts = [max(blocks.first_live[group] - start, 0) for group in range(len(self._cache.specs))]
        starts = [first if group in self._cache.full_groups else end for group, first in enumerate(starts)]
        self._queue(self._cache.shared_tier, blocks, start, end, starts)
        blocks.shared_store.num_pushed = end

    def _queue(self, tier: int, blocks: RequestBlocks, start: int, end: int, starts: list[int]) -> None:
        """Note blocks start .. end - 1 to be stored; `starts` by group, counted from `start`."""
        if tier == self._cache.shared_tier and self._cache.policy.role == "kv_consumer":
            return
        queue = self._freed[tier]
        store = blocks.shared_store if tier == self._cache.shared_tier else None
        freed = Freed(*blocks.hashes(start, end), starts, end - start, blocks.tokens.prompt.is_marked, store)
        queue.append(freed)
        freed.count(freed.left)
        self._num_freed[tier] += freed.left
        while self._num_freed[tier] > _MAX_FREED and len(queue) > 1:
            oldest = queue.popleft()
            oldest.count(-oldest.left)
            self._num_freed[tier] -= oldest.left

    def begin(self) -> None:
        """Begin to store blocks that wait, as many as may be under way."""
        self.has_work = False
        for tier in range(len(self._cache.tiers)):
            self._begin(tier)

    def _begin(self, tier: int) -> None:
        queue = self._freed[tier]
        copies: list[Copied] = []
        room = self._most_stored - len(self._storing[tier])
        while queue and room > len(copies):
            if self._cache.quota.is_spent:
                self.has_work = True
                break
            freed = queue[0]
            if not freed.left:
                queue.popleft()
                continue
            found = self._to_store(tier, freed, freed.left - 1)
            if found is None:
                break
            copies += found
            freed.left -= 1
            freed.count(len(found) - 1)
            self._num_freed[tier] -= 1
            self._cache.quota.spend(UNITS_PER_LOOKED_UP * len(self._cache.pools))
        if copies:
            self._transfers.begin(Store(copies))

    def _to_store(self, tier: int, freed: Freed, index: int) -> list[Copied] | None:
        """Copies of the blocks at an index that the tier lacks; None while a step that writes it may fail."""
        digest = freed.digests[index]
        hash_input = freed.hash_inputs[index]
        wanted = []
        for group, pool in enumerate(self._cache.pools):
            block = pool.find(digest, hash_input) if index >= freed.starts[group] else None
            if block is None or (group, digest) in self._storing[tier]:
                continue
            if (slot := self._cache.tiers[tier].find(group, digest, hash_input)) is not None:
                self._cache.tiers[tier].use(group, slot)
            elif not pool.is_confirmed(block):
                return None
            else:
                wanted.append((group, block))
        copies = []
        for group, block in wanted:
            reserved = self._cache.tiers[tier].reserve(group, digest)
            if reserved is not None:
                slot, replaced = reserved
                self._cache.pools[group].share([block])
                self._storing[tier].add((group, digest))
                listed = group == self._cache.listed_group and not freed.is_salted
                where = group, block, tier, slot
                copies.append(Copied(*where, digest, hash_input, replaced, listed, freed.store))
        return copies

    def ended(self, store: Store) -> None:
        """Index the blocks that their tier has now."""
        for copy in reversed(store.copies):  # parents come first
            tier = self._cache.tiers[copy.tier]
            self._storing[copy.tier].discard((copy.group, copy.digest))
            if copy.store is not None:
                copy.store.num_left -= 1
            is_kept = not copy.has_failed and not store.is_void
            if is_kept and tier.keep(copy.group, copy.slot, copy.digest, copy.hash_input):
                self.num_stored[copy.tier] += 1
                if copy.is_listed and self._cache.events is not None:
                    self._cache.events.stored(copy.digest, copy.hash_input, tier.medium)
        self._transfers.release(store)

    def reset(self) -> None:
        """Forget the blocks that wait to be stored."""
        for queue in self._freed:
            for freed in queue:
                freed.count(-freed.left)
            queue.clear()
        self._num_freed = [0] * len(self._freed)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the blocks that are being stored, and that wait, are counted."""
        copies = self._transfers.copies(Store)
        storing = sorted((copy.tier, copy.group, copy.digest) for copy in copies)
        noted = sorted((tier, *key) for tier, keys in enumerate(self._storing) for key in keys)
        assert storing == noted, "a store is lost"
        assert self._num_freed == [sum(freed.left for freed in queue) for queue in self._freed]
