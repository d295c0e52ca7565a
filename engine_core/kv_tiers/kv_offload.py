"""KV tiers: slower memory, such as the host's, for blocks that the KV cache evicts.

    scheduler ── a waiting request ──▶ TierLoads ──┐
              ── a chunk is planned ─▶ TierStores ─┴▶ TierTransfers ── CopyBlocks ──▶ workers
    KV cache  ── blocks are freed ───▶                              ◀─ BlocksCopied ─

What all three need is in `TieredCache`; `KVOffload` is what the rest of the core sees.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from atom.shared.messages.engine import KVTierStats
from atom.shared.messages.kv_peers import ReleaseLease
from atom.shared.messages.kv_tiers import (
    PEER,
    BlocksCopied,
    BlocksFound,
    CopyBlocks,
    FindBlocks,
    StoredBlocks,
)
from engine_core.kv_tiers.block_questions import Question
from engine_core.kv_tiers.kv_tier import KVTier
from engine_core.kv_tiers.tier_copies import Load
from engine_core.kv_tiers.tier_loads import TierLoads
from engine_core.kv_tiers.tier_stores import TierStores
from engine_core.kv_tiers.tier_transfers import TierTransfers
from engine_core.kv_tiers.tiered_cache import TieredCache

__all__ = ["KVOffload"]


class KVOffload:
    """The tiers of a KV cache, and the copies under way."""

    def __init__(self, cache: TieredCache):
        self._cache = cache
        self._transfers = TierTransfers(cache)
        self.loads = TierLoads(cache, self._transfers)
        self.stores = TierStores(cache, self._transfers)
        if cache.events is not None:
            for tier in cache.tiers:
                if tier.medium == PEER:
                    continue
                removed = partial(cache.events.removed, medium=tier.medium)
                tier.pools[cache.listed_group].on_uncached = removed

    @property
    def tiers(self) -> Sequence[KVTier]:
        """In the order in which they are read."""
        return self._cache.tiers

    @property
    def stores_prompts(self) -> bool:
        """Whether each prompt is stored while it is computed, for another server that goes on with it."""
        return self._cache.policy.role == "kv_producer"

    @property
    def num_changes(self) -> int:
        """Grows with each copy that begins or ends, and each answer."""
        return self._transfers.num_changes + self.loads.num_answers

    @property
    def num_under_way(self) -> int:
        """Messages that not all workers have confirmed."""
        return self._transfers.num_messages

    def adopt(self, stored: Sequence[Sequence[StoredBlocks]]) -> int:
        """Take over the blocks that tiers have from an earlier start, by rank; returns how many."""
        count = 0
        for index, tier in enumerate(self.tiers):
            digests = [[each.digests for each in rank if each.tier == index] for rank in stored]
            if all(digests):
                count += tier.adopt([found[0] for found in digests])
        return count

    def take_messages(self) -> list[CopyBlocks | FindBlocks | ReleaseLease]:
        """Copies to begin and questions, to be sent to the workers after the step of this iteration."""
        self.stores.begin()
        messages: list[CopyBlocks | FindBlocks | ReleaseLease] = [*self._transfers.take_messages()]
        if self.loads.questions is not None:
            messages += self.loads.questions.take()
        return messages + self.loads.take_releases()

    def copied(self, message: BlocksCopied | BlocksFound) -> Load | Question | None:
        """A rank has done its copies, or answered; returns the load or question that has ended with this.

        Raises ValueError for a message that answers none of those sent.
        """
        if isinstance(message, BlocksFound):
            return self.loads.answered(message)
        ended = self._transfers.confirmed(message)
        if isinstance(ended, Load):
            self.loads.ended(ended)
            return ended
        if ended is not None:
            self.stores.ended(ended)
        return None

    def reset(self) -> None:
        """Forget all blocks of all tiers, those that are being copied included."""
        for tier in self.tiers:
            tier.clear()
        self._transfers.void()
        self.loads.reset()
        self.stores.reset()

    def stats(self, hits: Mapping[int, int]) -> list[KVTierStats]:
        """Figures of each tier; `hits`: tokens of prefixes that came from it, by its index."""
        return [
            KVTierStats(
                tier.medium,
                sum(pool.num_blocks for pool in tier.pools),
                sum(pool.num_cached for pool in tier.pools),
                hits[index],
                self.stores.num_stored[index],
                self.loads.num_loaded[index],
                self._transfers.num_failed[index],
            )
            for index, tier in enumerate(self.tiers)
        ]

    def users(self, group: int) -> Iterator[int]:
        """Blocks of a group that are in use for copies; a block may come more than once."""
        return self._transfers.users(group)

    def check_integrity(self) -> Iterator[None]:
        """Raises AssertionError unless the tiers match the copies under way. Yields at intervals."""
        yield from self._transfers.check_integrity()
        self.loads.check_integrity()
        self.stores.check_integrity()
