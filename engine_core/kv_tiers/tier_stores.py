"""Stores: blocks of the KV cache are copied to tiers.

    freed     when a request frees its blocks: those that were hit, or that belong to a long enough prefix
    pushed    while a prompt is computed, to the tier in which another server looks for it

Both wait in queues for each tier, of which each iteration begins as many as may be under way: what is pushed
first, since a request waits for it in the middle of its stream, and a few blocks of each request in turn.
"""

from atom.shared.messages.worker import stored_bytes
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.kv_tiers.store_queue import StoreQueue
from engine_core.kv_tiers.tier_copies import Copied, Freed, Store
from engine_core.kv_tiers.tier_transfers import TierTransfers
from engine_core.kv_tiers.tiered_cache import UNITS_PER_LOOKED_UP, TieredCache

__all__ = ["TierStores"]

_STORED_BYTES = 128 << 20
_STORED_BLOCKS = 256
_PUSHED_BYTES = 512 << 20
"""A step of 8,192 tokens fills 400 MB, and a worker that launches the next one confirms nothing meanwhile."""
_PUSHED_BLOCKS = 2048
_STORED_SHARE = 8
"""Blocks that are being stored take at most this fraction (1 / 8) of a group's blocks."""
_TURN_BLOCKS = 16
"""Blocks of a request that are begun before those of the next one."""
_LOOKED_UP_AT_ONCE = 512
"""Blocks that one iteration looks up, in a few milliseconds; the next step waits for it."""


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
        self._pushed = [StoreQueue() for _ in cache.tiers]
        self._freed = [StoreQueue() for _ in cache.tiers]
        self._looked_up = 0
        """Blocks that were looked up in this iteration."""
        most = min(pool.num_blocks for pool in cache.pools) // _STORED_SHARE
        size = max(map(stored_bytes, cache.specs))
        self._most_stored = max(1, min(_STORED_BLOCKS, most, _STORED_BYTES // size))
        self._most_pushed = max(1, min(_PUSHED_BLOCKS, most, _PUSHED_BYTES // size))

    def freed(self, blocks: RequestBlocks) -> None:
        """Note the cached blocks of a request whose tables are about to be emptied."""
        long_enough = blocks.num_cached * self._cache.block_size >= self._cache.policy.min_tokens
        long_enough |= blocks.shared_store.is_awaited
        count = blocks.num_cached if long_enough else min(blocks.num_hits, blocks.num_cached)
        if not count or blocks.collided:
            return
        for tier in range(len(self._cache.tiers)):
            if tier == self._cache.peer_tier:
                continue
            if tier == self._cache.shared_tier and blocks.shared_store.is_awaited:
                self._push_rest(tier, blocks, count)
            else:
                self._queue(self._freed[tier], tier, blocks, (0, count), list(blocks.first_live))

    def push(self, blocks: RequestBlocks) -> None:
        """Store what a running request has computed so far where other engines find it."""
        start, end = blocks.shared_store.num_pushed, blocks.num_cached
        if self._cache.shared_tier is None or end <= start or blocks.collided:
            return
        # Only the last blocks of a window are used, and states are saved at the end.
        starts = [max(blocks.first_live[group] - start, 0) for group in range(len(self._cache.specs))]
        starts = [first if group in self._cache.full_groups else end for group, first in enumerate(starts)]
        tier = self._cache.shared_tier
        self._queue(self._pushed[tier], tier, blocks, (start, end), starts)
        blocks.shared_store.num_pushed = end

    def _push_rest(self, tier: int, blocks: RequestBlocks, count: int) -> None:
        """Store what was not pushed: the request has ended, or computes and pushes its blocks again."""
        pushed = min(blocks.shared_store.num_pushed, count)
        blocks.shared_store.num_pushed = 0
        start = pushed if len(self._cache.full_groups) == len(self._cache.specs) else 0
        starts = [
            max(first, pushed if group in self._cache.full_groups else 0) - start
            for group, first in enumerate(blocks.first_live)
        ]
        if start < count:
            self._queue(self._pushed[tier], tier, blocks, (start, count), starts)

    def _queue(
        self, queue: StoreQueue, tier: int, blocks: RequestBlocks, span: tuple[int, int], starts: list[int]
    ) -> None:
        """Note blocks start .. end - 1, the `span`, to be stored; `starts` by group, counted from start."""
        if tier == self._cache.shared_tier and self._cache.policy.role == "kv_consumer":
            return
        store = blocks.shared_store if tier == self._cache.shared_tier else None
        count = span[1] - span[0]
        queue.add(Freed(*blocks.hashes(*span), starts, count, blocks.tokens.prompt.is_marked, store))

    def begin(self) -> None:
        """Begin to store blocks that wait, as many as may be under way."""
        self.has_work = False
        self._looked_up = 0
        for tier in range(len(self._cache.tiers)):
            copies: list[Copied] = []
            self._take_turns(tier, self._pushed[tier], self._most_pushed, copies)
            self._take_turns(tier, self._freed[tier], self._most_stored, copies)
            most = self._transfers.most_at_once
            for start in range(0, len(copies), most):
                self._transfers.begin(Store(copies[start : start + most]))

    def _take_turns(self, tier: int, queue: StoreQueue, most: int, copies: list[Copied]) -> None:
        """Add copies of blocks that wait, as long as fewer than `most` are being stored."""
        num_blocked = 0  # requests in a row whose next block is still being computed
        while num_blocked < len(queue) and len(self._storing[tier]) < most:
            if self._cache.quota.is_spent or self._looked_up >= _LOOKED_UP_AT_ONCE:
                self.has_work = True
                return
            is_blocked = not self._take_turn(tier, queue, most, copies)
            num_blocked = num_blocked + 1 if is_blocked else 0
            queue.end_turn()

    def _take_turn(self, tier: int, queue: StoreQueue, most: int, copies: list[Copied]) -> bool:
        """Look up the last blocks of the first entry; False if a step that writes the next one may fail."""
        freed = queue.first()
        for _ in range(min(freed.left, _TURN_BLOCKS)):
            if len(self._storing[tier]) >= most:
                break
            found = self._to_store(tier, freed, freed.left - 1)
            if found is None:
                return False
            copies += found
            queue.done(freed, len(found))
            self._looked_up += 1
            self._cache.quota.spend(UNITS_PER_LOOKED_UP * len(self._cache.pools))
        return True

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
        for queue in (*self._pushed, *self._freed):
            queue.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the blocks that are being stored, and that wait, are counted."""
        copies = self._transfers.copies(Store)
        storing = sorted((copy.tier, copy.group, copy.digest) for copy in copies)
        noted = sorted((tier, *key) for tier, keys in enumerate(self._storing) for key in keys)
        assert storing == noted, "a store is lost"
        for queue in (*self._pushed, *self._freed):
            queue.check_integrity()
