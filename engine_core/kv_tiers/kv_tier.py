"""The index of one KV tier: which blocks it has, and in which slots. The workers have the data.

The slots of a KV group are a `BlockPool`: a slot that is being read or written is in use, one that holds a
block is cached by its content, and the least recently used of those is taken for another block.
"""

from collections.abc import Iterator, Sequence

from atom.shared.messages.kv_tiers import PEER, TierSlots
from engine_core.kv_cache.block_pool import BlockPool

__all__ = ["KVTier", "PeerIndex"]

_DIGEST_BYTES = 8


class KVTier:
    """Slots for blocks of each KV group.

    A tier by content has no hash inputs: the reader of a block compares it. A block there is found by its
    digest as long as it is not replaced, also by a later start.
    """

    def __init__(self, slots: TierSlots):
        self.medium = slots.medium
        self.by_content = slots.by_content
        self.pools = [BlockPool(count) for count in slots.num_slots]
        self._written: list[dict[int, bytes]] = [{} for _ in slots.num_slots]
        """In a tier by content, the digest that was written last to each slot, cached or not."""

    def find(self, group: int, digest: bytes, hash_input: bytes) -> int | None:
        """The slot that has this block."""
        return self.pools[group].find(digest, b"" if self.by_content else hash_input)

    def use(self, group: int, slot: int) -> None:
        """Count a slot as the one that was used last."""
        self.pools[group].share([slot])
        self.pools[group].free([slot])

    def hold(self, group: int, slot: int) -> None:
        """Keep what a slot has until it is released."""
        self.pools[group].share([slot])

    def reserve(self, group: int, digest: bytes) -> tuple[int, bytes] | None:
        """A slot to write a block to, and the digest of the one to remove, or nothing.

        The least recently used block is lost. None while all slots are held.
        """
        pool = self.pools[group]
        if not pool.num_free:
            return None
        (slot,) = pool.allocate(1)
        if not self.by_content:
            return slot, b""
        replaced = self._written[group].get(slot, b"")
        self._written[group][slot] = digest
        is_elsewhere = replaced == digest or pool.find(replaced, b"") is not None
        return slot, b"" if is_elsewhere else replaced

    def keep(self, group: int, slot: int, digest: bytes, hash_input: bytes) -> bool:
        """Index this block in a slot that is held. False, and it has none, if digests collide."""
        return self.pools[group].cache(slot, digest, b"" if self.by_content else hash_input, step=0)

    def adopt(self, stored: Sequence[Sequence[bytes]]) -> int:
        """Take over the blocks that all ranks have stored; `stored[rank][group]` are packed digests.

        Returns how many these are. Others keep a slot until it is written, and cannot be found.
        """
        count = 0
        for group, pool in enumerate(self.pools):
            ranks = [_unpack(digests[group]) for digests in stored]
            common = set(ranks[0]).intersection(*ranks[1:])
            rest = dict.fromkeys(digest for digests in ranks for digest in digests if digest not in common)
            for digest in [*rest, *ranks[0]]:
                if (digest in rest and pool.num_free <= len(common)) or not pool.num_free:
                    continue
                (slot,) = pool.allocate(1)
                self._written[group][slot] = digest
                if digest in common:
                    self.keep(group, slot, digest, b"")
                    count += 1
            pool.free(range(pool.num_blocks - pool.num_free))
        return count

    def note(self, group: int, digest: bytes) -> None:
        """Index a block that another engine has stored: it can be read, and is that engine's to remove.

        Without a free slot it is not noted. A file of this engine that was in the slot stays until the slot
        is written, so that there are never more files than slots.
        """
        pool = self.pools[group]
        if pool.find(digest, b"") is None and pool.num_free:
            (slot,) = pool.allocate(1)
            pool.cache(slot, digest, b"", step=0)
            pool.free([slot])

    def lose(self, group: int, slot: int) -> None:
        """Forget the block of a slot that is held: it cannot be read."""
        self.pools[group].uncache(slot)

    def release(self, group: int, slot: int) -> None:
        """Let go of a slot that is neither read nor written any more."""
        self.pools[group].free([slot])

    def clear(self) -> None:
        """Forget all blocks; slots that are held stay so."""
        for pool in self.pools:
            pool.reset()

    def check_integrity(self, held: Sequence[Sequence[int]]) -> Iterator[None]:
        """Raises AssertionError unless just the slots `held`, by group, are in use. Yields at intervals."""
        for pool, slots in zip(self.pools, held, strict=True):
            users = [0] * pool.num_blocks
            for slot in slots:
                users[slot] += 1
            yield from pool.check_integrity(users)


class PeerIndex(KVTier):
    """The caches of other engines: each request knows itself what they hold for it, as slots.

    Nothing is held or kept here: leases do it there.
    """

    def __init__(self) -> None:
        super().__init__(TierSlots(PEER, []))

    def find(self, group: int, digest: bytes, hash_input: bytes) -> int | None:
        """No block is there for all requests."""
        return None

    def hold(self, group: int, slot: int) -> None:
        """The lease does."""

    def lose(self, group: int, slot: int) -> None:
        """The request that has asked for it does not find it any more (`PeerPrefix.drop`)."""

    def release(self, group: int, slot: int) -> None:
        """It ends with the lease."""

    def check_integrity(self, held: Sequence[Sequence[int]]) -> Iterator[None]:
        """There is nothing to check."""
        return iter(())


def _unpack(digests: bytes) -> list[bytes]:
    return [digests[start : start + _DIGEST_BYTES] for start in range(0, len(digests), _DIGEST_BYTES)]
