"""The copies between the KV cache and tiers that are under way, and what the workers confirm of them.

While a copy is under way its blocks and its slots are in use.
"""

from collections import Counter
from collections.abc import Iterator

from atom.shared.messages.kv_tiers import BlockCopy, BlocksCopied, CopyBlocks
from atom.shared.messages.worker import stored_bytes
from engine_core.kv_tiers.tier_copies import Copied, Load, Message, Store
from engine_core.kv_tiers.tiered_cache import TieredCache

__all__ = ["TierTransfers"]

_MESSAGE_BYTES = 32 << 20
"""A disk that reads a gigabyte in a second takes 32 ms for these."""


class TierTransfers:
    """Loads and stores that have begun, and their messages to the workers."""

    def __init__(self, cache: TieredCache):
        self.num_changes = 0
        """Grows with each message that begins or ends."""
        self.num_failed = [0] * len(cache.tiers)
        """Copies of each tier that failed."""
        self.most_at_once = max(1, _MESSAGE_BYTES // max(map(stored_bytes, cache.specs)))
        """Most blocks of a message: others wait for as many."""
        self._cache = cache
        self._under_way: dict[Store | Load, None] = {}
        self._messages: dict[int, Message] = {}
        self._last_number = 0
        self._unsent: list[CopyBlocks] = []

    @property
    def num_messages(self) -> int:
        """Messages that not all workers have confirmed."""
        return len(self._messages)

    def begin(self, transfer: Store | Load) -> None:
        """Each tier gets the copies that it has a part in, in messages that do not take it long."""
        self._under_way[transfer] = None
        for index in range(len(self._cache.tiers)):
            own = [copy for copy in transfer.copies if copy.tier == index]
            for place, start in enumerate(range(0, len(own), self.most_at_once)):
                part = own[start : start + self.most_at_once]
                self._last_number += 1
                self.num_changes += 1
                transfer.num_messages += 1
                self._messages[self._last_number] = Message(transfer, part)
                self._unsent.append(self._message(index, transfer, part, place))

    def _message(self, tier: int, transfer: Store | Load, part: list[Copied], place: int) -> CopyBlocks:
        copies = [
            BlockCopy(copy.group, copy.block, copy.slot, copy.digest, copy.hash_input, copy.replaced)
            if self._cache.tiers[tier].by_content
            else BlockCopy(copy.group, copy.block, copy.slot)
            for copy in part
        ]
        lease = None
        if isinstance(transfer, Load) and tier == self._cache.peer_tier:
            assert transfer.lease is not None, "blocks of another engine without a lease"
            lease = transfer.lease
        return CopyBlocks(self._last_number, tier, isinstance(transfer, Load), copies, place, lease)

    def take_messages(self) -> list[CopyBlocks]:
        """Messages to be sent to the workers."""
        unsent = self._unsent
        self._unsent = []
        return unsent

    def confirmed(self, message: BlocksCopied) -> Store | Load | None:
        """A rank has done its copies; returns the transfer if it has ended with this.

        Raises ValueError for a message that answers none of those sent.
        """
        sent = self._messages.get(message.number)
        if (
            sent is None
            or message.rank in sent.confirmed
            or any(not 0 <= index < len(sent.copies) for index in message.failed)
        ):
            raise ValueError(
                f"worker {message.rank} confirmed copies {message.number}, "
                "which were not sent to it or are done"
            )
        sent.confirmed.add(message.rank)
        for index in message.failed:
            sent.copies[index].has_failed = True
        if len(sent.confirmed) < self._cache.policy.num_ranks:
            return None
        del self._messages[message.number]
        self.num_changes += 1
        transfer = sent.transfer
        transfer.num_messages -= 1
        if transfer.num_messages:
            return None
        del self._under_way[transfer]
        return transfer

    def release(self, transfer: Store | Load) -> None:
        """Free the blocks and slots of a transfer that has ended; those of the last are evicted first."""
        for copy in reversed(transfer.copies):
            self.num_failed[copy.tier] += copy.has_failed
            self._cache.tiers[copy.tier].release(copy.group, copy.slot)
            self._cache.pools[copy.group].free([copy.block])

    def void(self) -> None:
        """Cache nothing of the transfers under way when they end."""
        for transfer in self._under_way:
            transfer.is_void = True

    def loads(self) -> Iterator[Load]:
        """The loads under way."""
        return (transfer for transfer in self._under_way if isinstance(transfer, Load))

    def copies(self, kind: type[Store] | type[Load]) -> Iterator[Copied]:
        """The copies of all stores, or of all loads, under way."""
        for transfer in self._under_way:
            if isinstance(transfer, kind):
                yield from transfer.copies

    def users(self, group: int) -> Iterator[int]:
        """Blocks of a group that are in use for copies; a block may come more than once."""
        for transfer in self._under_way:
            yield from (copy.block for copy in transfer.copies if copy.group == group)
        for load in self.loads():
            yield from load.kept[group][1]

    def check_integrity(self) -> Iterator[None]:
        """Raises AssertionError unless the tiers match the copies under way. Yields at intervals."""
        copies = [*self.copies(Store), *self.copies(Load)]
        for index, tier in enumerate(self._cache.tiers):
            held = [
                [copy.slot for copy in copies if copy.tier == index and copy.group == group]
                for group in range(len(self._cache.specs))
            ]
            yield from tier.check_integrity(held)
        sent = Counter(message.transfer for message in self._messages.values())
        assert sent == {each: each.num_messages for each in self._under_way}, "a transfer never ends"
