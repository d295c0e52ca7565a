"""The index of one KV tier: which blocks it has, and in which slots. The workers have the data.

The slots of a KV group are a `BlockPool`: a slot that is being read or written is in use, one that holds a
block is cached by its content, and the least recently used of those is taken for another block.
"""

from collections.abc import Iterator, Sequence

from atom.shared.messages.kv_tiers import TierSlots
from engine_core.block_pool import BlockPool

__all__ = ["KVTier"]


class KVTier:
    """Slots for blocks of each KV group."""

    def __init__(self, slots: TierSlots):
        self.medium = slots.medium
        self.pools = [BlockPool(count) for count in slots.num_slots]

    def find(self, group: int, digest: bytes, hash_input: bytes) -> int | None:
        """The slot that has this block."""
        return self.pools[group].find(digest, hash_input)

    def use(self, group: int, slot: int) -> None:
        """Count a slot as the one that was used last."""
        self.pools[group].share([slot])
        self.pools[group].free([slot])

    def hold(self, group: int, slot: int) -> None:
        """Keep what a slot has until it is released."""
        self.pools[group].share([slot])

    def reserve(self, group: int) -> int | None:
        """A slot to write to; the least recently used block is lost. None while all slots are held."""
        pool = self.pools[group]
        return pool.allocate(1)[0] if pool.num_free else None

    def keep(self, group: int, slot: int, digest: bytes, hash_input: bytes) -> None:
        """The slot, which is held, has this block now."""
        self.pools[group].cache(slot, digest, hash_input, step=0)

    def lose(self, group: int, slot: int) -> None:
        """What this slot, which is held, has cannot be read."""
        self.pools[group].uncache(slot)

    def release(self, group: int, slot: int) -> None:
        """The slot is neither read nor written any more."""
        self.pools[group].free([slot])

    def clear(self) -> None:
        """Forget all blocks; slots that are held stay so."""
        for pool in self.pools:
            pool.reset()

    def check_integrity(self, held: Sequence[Sequence[int]]) -> Iterator[None]:
        """Raises AssertionError unless exactly the slots `held`, by group, are in use. Yields at intervals."""
        for pool, slots in zip(self.pools, held, strict=True):
            users = [0] * pool.num_blocks
            for slot in slots:
                users[slot] += 1
            yield from pool.check_integrity(users)
