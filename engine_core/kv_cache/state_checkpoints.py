"""Saved recurrent states: with these a model that has recurrent layers can continue from a cached prefix.

A state summarizes a whole sequence and is overwritten in each step. It is saved by a copy to another slot of
the same pool, where it is cached by the digest of the block that ends at its position:

    position          0 … 4095 | 4096 … 8191 | … prompt's last full block |
    saved after                ^             ^                            ^
    KV blocks         all are cached, as in other models

A prefix can be used up to the last of its positions whose state is saved. Chunks of a prompt end at such
positions, since the state exists only between two steps. The copies are part of the next step's batch, before
its forward pass: first saves, then restores. The slots of these copies stay in use until that batch is sent,
also if their request has ended: a KV tier may fill free slots at any time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from atom.shared.messages.worker import StateCopy
from engine_core.kv_cache.block_pool import BlockPool

__all__ = ["SavePoint", "StateCheckpoints"]

_LEAST_BLOCKS = 4
"""A chunk that is ended to save a state has at least this many blocks."""


@dataclass(frozen=True, slots=True)
class SavePoint:
    """The state of a request, in its slots, after `num_blocks` full blocks."""

    slots: list[int]
    """By state group."""
    digest: bytes
    hash_input: bytes


class StateCheckpoints:
    """What is saved of all state groups; each operation covers all of them."""

    def __init__(self, groups: Sequence[tuple[int, BlockPool]], block_size: int, interval_tokens: int):
        """`groups`: index and slots of each state group.

        States are saved every `interval_tokens`, rounded down to blocks, and at the ends of prompts.
        """
        self._groups = list(groups)
        self._block_size = block_size
        self._interval = max(1, interval_tokens // block_size) * block_size
        self._pending: list[SavePoint] = []
        self._saves: list[StateCopy] = []
        self._restores: list[StateCopy] = []
        self._held: list[tuple[BlockPool, int]] = []
        """Slots in use until the copies are sent."""

    @property
    def holds_slots(self) -> bool:
        """Whether slots are in use that `take_copies` and `cancel` free."""
        return bool(self._held)

    def chunk_end(self, start: int, end: int, num_known: int) -> int:
        """Where a chunk of positions start .. end - 1 has to end, so that the state there can be saved.

        `num_known`: tokens of the sequence with known ids.
        """
        last = (num_known - 1) // self._block_size * self._block_size
        earliest = start + _LEAST_BLOCKS * self._block_size
        multiple = -(-earliest // self._interval) * self._interval
        borders = [border for border in (multiple, last) if earliest <= border < end]
        return min(borders, default=end)

    def is_border(self, position: int, num_known: int) -> bool:
        """Whether the state at this position is saved."""
        last = (num_known - 1) // self._block_size * self._block_size
        return position > 0 and self._is_border(position, last)

    def is_interval(self, position: int) -> bool:
        """Whether a sequence that generates saves its state at this position."""
        return position % self._interval == 0

    def save(self, point: SavePoint) -> None:
        """Save the state that these slots will have when the steps in flight are done."""
        self._pending.append(point)

    def drop(self, slots: Sequence[int]) -> None:
        """Save nothing more of a request, by state group its slots, which are about to be freed."""
        self._pending = [point for point in self._pending if point.slots != slots]

    def emit(self, step: int) -> None:
        """Turn what is to be saved into copies of the next batch, `step`, as far as slots are free."""
        for point in self._pending:
            self._emit(point, step)
        self._pending.clear()

    def longest(self, digests: Sequence[bytes], hash_inputs: Sequence[bytes]) -> int:
        """The greatest number of these leading blocks after which all groups have a saved state.

        Zero where no other slot would be free for a request that continues from it.
        """
        if not all(pool.num_cached for _, pool in self._groups):
            return 0
        for length in range(len(digests), 0, -1):
            digest = digests[length - 1]
            hash_input = hash_inputs[length - 1]
            found = [(pool, pool.find(digest, hash_input)) for _, pool in self._groups]
            if all(slot is not None for _, slot in found):
                free = [pool.num_free - pool.num_free_of([slot]) for pool, slot in found if slot is not None]
                return length if min(free) > 0 else 0
        return 0

    def restore(self, digest: bytes, slots: Sequence[int]) -> int:
        """Copy the saved states of this digest to a request's slots in the next batch.

        Returns the last unconfirmed step that writes one of them; 0 if there is none.
        """
        step = 0
        for (group, pool), target in zip(self._groups, slots, strict=True):
            (source,) = pool.blocks_of([digest])
            step = max(step, pool.last_unconfirmed([source]))
            self._restores.append(StateCopy(group, source, target))
        return step

    def hold(self, digest: bytes) -> None:
        """Keep the saved states of this digest until the next batch is sent."""
        for _, pool in self._groups:
            slots = pool.blocks_of([digest])
            pool.share(slots)
            self._held += [(pool, slot) for slot in slots]

    def take_copies(self) -> tuple[list[StateCopy], list[StateCopy]]:
        """Saves and restores of the batch that is sent now."""
        copies = self._saves, self._restores
        self._saves = []
        self._restores = []
        for pool, slot in self._held:
            pool.free([slot])
        self._held.clear()
        return copies

    def cancel(self) -> None:
        """Forget the saves of the next batch, which does not come for now, so that their slots are free."""
        assert not self._restores, "a request that continues from a state is in the next batch"
        pools = dict(self._groups)
        for copy in self._saves:
            pools[copy.group].uncache(copy.target)
        self.take_copies()

    def forget_pending(self) -> None:
        """Save nothing of what steps in flight compute: one of them has failed."""
        self._pending.clear()

    def users(self, group: int) -> list[int]:
        """Slots of a group that are in use for copies; a slot may be there more than once."""
        (pool,) = (pool for index, pool in self._groups if index == group)
        return [slot for owner, slot in self._held if owner is pool]

    def _emit(self, point: SavePoint, step: int) -> None:
        for (group, pool), source in zip(self._groups, point.slots, strict=True):
            pool.share([source])
            self._held.append((pool, source))
            if pool.find(point.digest, point.hash_input) is not None or not pool.num_free:
                continue
            (target,) = pool.allocate(1)
            self._held.append((pool, target))
            # False on a collision of digests: then the slot is free again, uncached, once the batch is sent.
            if pool.cache(target, point.digest, point.hash_input, step):
                self._saves.append(StateCopy(group, source, target))

    def _is_border(self, position: int, last: int) -> bool:
        return position == last or position % self._interval == 0
