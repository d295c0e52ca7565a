"""Blocks of prompts that are kept for other engines, which read them from the workers' memory.

A lease counts as a user of its blocks, as a request does. It ends when all readers have released it, after a
deadline, or when a running request needs blocks. The workers hear of it before any step that may write to the
blocks, so that a reader that is late finds its lease ended.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from atom.shared.messages.kv_peers import LEASE_SLOTS, EndLeases, Lease, LeasedBlocks, LeasesReleased
from atom.shared.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec, SlidingWindowSpec
from atom.shared.utils.lease_seal import engine_name, seal, with_statement
from atom.shared.utils.logger import RareWarning
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.kv_plan import first_visible_block
from engine_core.kv_cache.prefix_lookup import visible_prefix
from engine_core.kv_cache.request_blocks import RequestBlocks

__all__ = ["LEASE_S", "Leases"]

LEASE_S = 60.0
"""A lease lasts no longer: its reader has ended, or waits in a long queue, and computes the prompt."""
_WANTED_S = 10.0
"""Nor so long while a prompt waits for room."""


@dataclass(eq=False, slots=True)
class _Granted:
    slot: int
    generation: int
    at: float
    """When it was granted."""
    tables: list[list[int]]
    """By KV group."""
    released: set[int] = field(default_factory=set)
    """Ranks whose readers have released it."""


class Leases:
    """The leases of one engine."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        pools: Sequence[BlockPool],
        address: str,
        num_ranks: int,
        clock: Callable[[], float],
        secret: bytes,
    ):
        """`address`: `Lease.address`; `num_ranks`: workers, each of which has a reader in another engine.

        The `secret` is for seals.
        """
        self.num_ended_early = 0
        """Leases that ended before all ranks had released them."""
        self.is_wanted = False
        """Whether a prompt waits for room."""
        self._warning = RareWarning()
        self._specs = list(specs)
        self._pools = list(pools)
        self._address = address
        self._num_ranks = num_ranks
        self._clock = clock
        self._secret = secret
        self._engine = engine_name(secret)
        self._block_size = next(one.block_size for one in specs if not isinstance(one, RecurrentStateSpec))
        self._full = [index for index, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        self._windows = [
            (index, spec) for index, spec in enumerate(specs) if isinstance(spec, SlidingWindowSpec)
        ]
        self._states = [index for index, spec in enumerate(specs) if isinstance(spec, RecurrentStateSpec)]
        self._granted: dict[int, _Granted] = {}
        """By slot, the oldest first."""
        self._free_slots = deque((slot, 0) for slot in range(LEASE_SLOTS))
        self._ended: list[int] = []

    def __len__(self) -> int:
        return len(self._granted)

    def grant(self, blocks: RequestBlocks) -> LeasedBlocks | None:
        """Keep the cached blocks of a prompt that is computed; None if none are cached."""
        length = self._usable(blocks)
        if not length or not self._free_slots:
            return None
        digests, _ = blocks.hashes(0, length)
        tables = []
        for spec, pool in zip(self._specs, self._pools, strict=True):
            table = pool.blocks_of(digests[_first(spec, length) :])
            if pool.last_unconfirmed(table):
                return None  # a step in flight writes an equal block, and may fail
            tables.append(table)
        for pool, table in zip(self._pools, tables, strict=True):
            pool.share(table)
        slot, generation = self._free_slots.popleft()
        self._granted[slot] = _Granted(slot, generation, self._clock(), tables)
        packed = [array("i", table).tobytes() for table in tables]
        content = blocks.tokens.content(length * self._block_size)
        return self._sealed(
            LeasedBlocks(Lease(self._address, slot, generation, self._engine), length, content, packed)
        )

    def released(self, message: LeasesReleased) -> list[list[list[int]]]:
        """Readers of a rank need leases no more; returns the tables of leases that have ended with this."""
        ended = []
        for slot, generation in message.leases:
            lease = self._granted.get(slot)
            if lease is None or lease.generation != generation:
                continue  # it has ended by its deadline
            lease.released.add(message.rank)
            if len(lease.released) >= self._num_ranks:
                ended.append(self._end(lease))
        return ended

    def expired(self) -> list[list[list[int]]]:
        """End the leases that have lasted too long; returns their tables."""
        late = []
        for lease in self._granted.values():
            if not self._is_late(lease):
                break
            late.append(lease)
        if late:
            self.num_ended_early += len(late)
            self._warning.log(
                f"KV blocks of {len(late)} prompts were kept for another engine for {self._most_s:.0f} s, "
                "and were not read: it has ended, or its queue is long; it computes them"
            )
        return [self._end(lease) for lease in late]

    @property
    def is_overdue(self) -> bool:
        """Whether a lease has lasted too long."""
        oldest = next(iter(self._granted.values()), None)
        return oldest is not None and self._is_late(oldest)

    def end_oldest(self) -> list[list[int]] | None:
        """End the oldest lease, whose blocks a running request needs; returns its tables."""
        if not self._granted:
            return None
        self.num_ended_early += 1
        self._warning.log(
            "a running request needs the KV blocks that were kept for another engine, which computes them: "
            "give the KV cache more memory, or lower --max-num-seqs"
        )
        return self._end(next(iter(self._granted.values())))

    def take_messages(self) -> list[EndLeases]:
        """Messages to be sent to the workers before the next step."""
        ended = self._ended
        self._ended = []
        return [EndLeases(ended)] if ended else []

    def users(self, group: int) -> Iterator[int]:
        """Blocks of a group that leases keep; a block may come more than once."""
        for lease in self._granted.values():
            yield from lease.tables[group]

    @property
    def _most_s(self) -> float:
        return _WANTED_S if self.is_wanted else LEASE_S

    def _is_late(self, lease: _Granted) -> bool:
        return self._clock() >= lease.at + self._most_s

    def _end(self, lease: _Granted) -> list[list[int]]:
        del self._granted[lease.slot]
        self._free_slots.append((lease.slot, lease.generation + 1))
        self._ended.append(lease.slot)
        return lease.tables

    def _sealed(self, leased: LeasedBlocks) -> LeasedBlocks:
        own = msgspec.structs.replace(leased.lease, seal=seal(with_statement(leased), self._secret))
        return msgspec.structs.replace(leased, lease=own)

    def _usable(self, blocks: RequestBlocks) -> int:
        """The longest prefix, in blocks of the prompt, of which every group has what a later token needs."""
        prompt = blocks.tokens.prompt
        length = min(blocks.in_prompt, blocks.num_hashed)
        digests, hash_inputs = blocks.hashes(0, length)
        for group in self._full:
            length = min(length, self._pools[group].cached_run(digests[:length], hash_inputs[:length]))
        while length:
            visible = visible_prefix(self._windows, digests, hash_inputs, length, self._has)
            saved = visible = prompt.uncut(visible, self._block_size)
            while saved and not all(
                self._has(group, digests[saved - 1], hash_inputs[saved - 1]) for group in self._states
            ):
                saved -= 1
            if saved == length:
                break
            length = saved
        return length

    def _has(self, group: int, digest: bytes, hash_input: bytes) -> bool:
        return self._pools[group].find(digest, hash_input) is not None


def _first(spec: KVSpec, length: int) -> int:
    """The first block that a group needs of a prefix."""
    if isinstance(spec, RecurrentStateSpec):
        return length - 1
    return first_visible_block(spec, length * spec.block_size)
