"""Block tables: the KV blocks of each request in every KV group, and the prefix cache.

A request has one table for each group; entry i holds positions i * block_size and on:

    position      0 ........ 15 | 16 ....... 31 | 32 ....... 47 | 48 ...
    full          block 7       | block 2       | block 9       | block 4
    window        (freed)       | (freed)       | block 1       | block 3

    state         slot 5

Entries before a window stay as placeholders, so that all tables have the same index. Their value
is 0 and means nothing: block 0 is a block like any other, and no token attends that far back.
A recurrent state is one slot from the first token to the last; slots come from a pool like blocks. Other
slots hold states that were saved at ends of blocks (`engine_core.kv_cache.state_checkpoints`).

Work that grows with a prompt (hashing, looking up, freeing) is bounded by the quota of the iteration, and
continues in the next one. A block is freed by the CPU while steps in flight may still use it: the workers
execute steps in order, so a later step that gets the block writes to it after them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from xxhash import xxh64_digest

from atom.shared.config.kv_transfer import KVRole
from atom.shared.messages.admin import Miss
from atom.shared.messages.kv_peers import LeasesReleased
from atom.shared.messages.kv_tiers import PEER, BlocksCopied, BlocksFound, TierSlots
from atom.shared.messages.worker import (
    FullAttentionSpec,
    KVSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    StateCopy,
)
from engine_core.kv_cache.block_pool import CHECKED_AT_ONCE, BlockPool
from engine_core.kv_cache.kv_events import KVEventLog, listed_group
from engine_core.kv_cache.kv_plan import covering_blocks, first_visible_block, peak_blocks
from engine_core.kv_cache.prefix_lookup import visible_prefix
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.kv_cache.state_checkpoints import SavePoint, StateCheckpoints
from engine_core.kv_tiers.block_questions import Question
from engine_core.kv_tiers.kv_offload import KVOffload
from engine_core.kv_tiers.kv_tier import KVTier, PeerIndex
from engine_core.kv_tiers.leases import Leases
from engine_core.kv_tiers.tier_copies import Load, OffloadPolicy
from engine_core.kv_tiers.tiered_cache import TieredCache
from engine_core.requests.images import block_mark
from engine_core.requests.iteration_quota import FREES_PER_UNIT, LOOKUPS_PER_UNIT, IterationQuota
from engine_core.requests.recent import Recent
from engine_core.requests.token_ids import TokenIds

PLACEHOLDER = 0
_MAX_FIRST_BLOCKS = 1 << 14
_HASHED_AHEAD = 64  # blocks hashed before they are looked up


class KVCacheManager:
    """Block pools of all groups. Every operation covers all groups or changes nothing."""

    leases: Leases | None = None
    """Blocks that are kept for other engines, which read them: `lease_to`."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: Sequence[int],
        max_chunk: int,
        seed: int,
        enable_prefix_caching: bool = True,
        lists_events: bool = False,
        state_interval: int = 4096,
    ):
        """`max_chunk` is the most tokens of one request in one step; `seed` enters every digest.

        With prefix caching, recurrent states are saved every `state_interval` tokens. Raises ValueError for
        groups of different block sizes.
        """
        sizes = {spec.block_size for spec in specs if not isinstance(spec, RecurrentStateSpec)}
        if len(sizes) != 1:
            raise ValueError(f"KV groups must have one common block size, not {sorted(sizes)}")
        self.block_size = sizes.pop()
        self.specs = list(specs)
        self.pools = [BlockPool(blocks) for blocks in num_blocks]
        self.quota = IterationQuota()
        self.num_frees = 0
        """Grows whenever blocks are freed; a request that did not fit is retried only then."""
        self.num_hashed = 0
        """Blocks hashed since the start."""
        self._max_chunk = max_chunk
        self._seed = seed & ((1 << 64) - 1)
        self._caching = enable_prefix_caching
        pairs = list(zip(self.specs, self.pools, strict=True))
        self._is_state = [isinstance(spec, RecurrentStateSpec) for spec in self.specs]
        states = [(group, self.pools[group]) for group, is_state in enumerate(self._is_state) if is_state]
        self._states: StateCheckpoints | None = None
        """Saved states; None without prefix caching or recurrent layers."""
        if states and enable_prefix_caching:
            self._states = StateCheckpoints(states, self.block_size, state_interval)
        self._full = [pool for spec, pool in pairs if isinstance(spec, FullAttentionSpec)]
        self._paged = [each for each in enumerate(self.pools) if not self._is_state[each[0]]]
        self._windows = [
            (i, spec) for i, spec in enumerate(self.specs) if isinstance(spec, SlidingWindowSpec)
        ]
        self._first_blocks: Recent[bytes] = Recent(_MAX_FIRST_BLOCKS)
        """By a digest without salt: the salt of the last request that cached such a first block."""
        self._to_free: deque[tuple[BlockPool, list[int]]] = deque()
        self.offload: KVOffload | None = None  # tiers for blocks that the cache evicts: `offload_to`
        self.events = KVEventLog(self.block_size) if lists_events else None
        """What the prefix cache has gained and lost; None where it is not listed."""
        self._listed_group = listed_group(self.specs)
        if self.events is not None:
            self.pools[self._listed_group].on_uncached = self.events.removed

    def offload_to(
        self,
        tiers: Sequence[TierSlots],
        min_tokens: int = 0,
        num_ranks: int = 1,
        is_shared: bool = False,
        role: KVRole = "kv_both",
    ) -> None:
        """Keep blocks in these tiers, too; the other parameters are fields of `OffloadPolicy`.

        Raises ValueError without prefix caching: no block would be found.
        """
        if not self._caching:
            raise ValueError("KV tiers need prefix caching")
        policy = OffloadPolicy(min_tokens, num_ranks, self._max_chunk, is_shared, role)
        indexes = [PeerIndex() if slots.medium == PEER else KVTier(slots) for slots in tiers]
        self.offload = KVOffload(
            TieredCache(self.specs, self.pools, indexes, policy, self.quota, self._hash, self.events)
        )

    def lease_to(
        self, address: str, num_ranks: int, secret: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep blocks of prompts for other engines; the parameters are those of `Leases`."""
        self.leases = Leases(self.specs, self.pools, address, num_ranks, clock, secret)

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used(self) -> int:
        """Blocks of all groups that have a user, or are still to be freed."""
        return sum(pool.num_blocks - pool.num_free for pool in self.pools)

    @property
    def num_cached(self) -> int:
        """Blocks of all groups that have no user, and are in the prefix cache."""
        return sum(pool.num_evictable for pool in self.pools)

    @property
    def has_blocks_to_free(self) -> bool:
        """Whether blocks of earlier `free` calls are left for the next iterations."""
        return bool(self._to_free)

    def new_blocks(self, tokens: TokenIds) -> RequestBlocks:
        """Empty tables for a new request."""
        in_prompt = tokens.prompt_length // self.block_size
        return RequestBlocks(tokens, in_prompt, [[] for _ in self.specs], [0 for _ in self.specs])

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of that length fits when it is alone."""
        return all(
            peak_blocks(spec, num_tokens, self._max_chunk) <= pool.num_blocks
            for spec, pool in zip(self.specs, self.pools, strict=True)
        )

    def begin_iteration(self) -> None:
        """Refill the iteration's quota, and spend up to half of it on blocks that wait to be freed."""
        self.quota.refill()
        if self._to_free:
            self._free_some(reserved=self.quota.left // 2)

    def find_prefix(self, blocks: RequestBlocks) -> int | None:
        """Blocks of the longest cached prefix that every group can continue from.

        At least one token is left to compute, since a step must sample. None when the iteration's quota is
        spent before the prefix is hashed: a call in the next iteration continues.
        """
        if not self._caching:
            return 0
        limit = (len(blocks.tokens) - 1) // self.block_size
        earlier = blocks.num_found
        found_all = False
        while not found_all and blocks.num_found < limit:
            end = self._hash(blocks, min(limit, blocks.num_found + _HASHED_AHEAD))
            if end == blocks.num_found:
                return None
            end = max(end, min(limit, blocks.num_hashed))
            run = self._cached_run(blocks, blocks.num_found, end)
            found_all = blocks.num_found + run < end
            blocks.num_found += run
        if earlier:  # some of these may have been evicted since
            run = self._cached_run(blocks, 0, earlier)
            if run < earlier:
                blocks.num_found = run
        hits = blocks.num_found
        while True:  # at a shorter prefix, other blocks are the last window
            visible = self._visible_prefix(blocks, hits) if self._windows else hits
            visible = blocks.tokens.prompt.uncut(visible, self.block_size)
            saved = visible if self._states is None else self._saved_prefix(blocks, visible, self._states)
            if saved == hits or not self._windows:
                return saved
            hits = saved

    def admit(self, blocks: RequestBlocks, hits: int, num_tokens: int = 0) -> bool:
        """Put `hits` cached blocks, as `find_prefix` has found in this iteration, into empty tables.

        False, and nothing changes, when the free blocks cannot hold the rest of `num_tokens` tokens; 0:
        of those with known ids.
        """
        digests, _ = blocks.hashes(0, hits)
        starts = [self._first_visible(spec, hits * self.block_size) for spec in self.specs]
        found = [
            [] if is_state else pool.blocks_of(digests[start:])
            for pool, start, is_state in zip(self.pools, starts, self._is_state, strict=True)
        ]
        self.quota.spend(hits // LOOKUPS_PER_UNIT)
        has_room = self._has_room(num_tokens or len(blocks.tokens), hits, found)
        if self.leases is not None:
            self.leases.is_wanted = not has_room
        if not has_room:
            return False
        shared_step = 0
        for pool, start, group, table in zip(self.pools, starts, found, blocks.tables, strict=True):
            pool.share(group)
            shared_step = max(shared_step, pool.last_unconfirmed(group))
            table[:] = [PLACEHOLDER] * start + group
        if hits and self._states is not None:
            self._states.hold(digests[-1])  # `extend` takes a slot, and must not take these
        if blocks.miss is None:
            self._explain_miss(blocks, hits)
        blocks.shared_step = shared_step
        blocks.first_live[:] = starts
        blocks.num_cached = blocks.num_hits = hits
        blocks.lookup.admit()
        self.leave_peer(blocks)
        return True

    def leave_peer(self, blocks: RequestBlocks) -> None:
        """Let another engine use the blocks again that it keeps for a request."""
        if self.offload is not None:
            self.offload.loads.leave_peer(blocks)

    def end_leases(self, released: LeasesReleased | None = None) -> None:
        """End the leases that readers have released with this message, and those that are overdue."""
        if self.leases is None:
            return
        ended = self.leases.expired()
        if released is not None:
            ended += self.leases.released(released)
        for tables in ended:
            self._free_tables(tables)

    def reset(self, owners: Iterable[RequestBlocks]) -> int:
        """Uncache all blocks, and cache none of `owners` from now on; returns how many were cached.

        `owners` are all requests that have blocks: what they have computed will not be found any more.
        """
        for blocks in owners:
            blocks.collided = True
        if self._states is not None:
            self._states.forget_pending()
        if self.offload is not None:
            self.offload.reset()
        if self.events is not None:
            self.events.cleared()
        return sum(pool.reset() for pool in self.pools)

    def extend(self, blocks: RequestBlocks, start: int, end: int) -> list[list[int]] | None:
        """Allocate blocks for computing positions start .. end - 1; the new ones of each group, if any.

        Frees the blocks before the window that ends at `start`. None when a group has too few free blocks.
        """
        if self._windows:
            self._free_invisible(blocks, start)
        full = -(-end // self.block_size)
        missing = []
        for group, table in enumerate(blocks.tables):
            count = (1 if self._is_state[group] else full) - len(table)
            if count > self.pools[group].num_free and not self._end_leases_for(self.pools[group], count):
                return None
            missing.append(count)
        if not any(missing):
            return []
        added = []
        for group, count in enumerate(missing):
            new = self.pools[group].allocate(count)
            blocks.tables[group] += new
            added.append(new)
        return added

    def cache(self, blocks: RequestBlocks, num_computed: int, step: int) -> None:
        """Cache the full blocks of the first `num_computed` tokens, all scheduled by `step`.

        Stops when the iteration's quota is spent; a later call does the rest.
        """
        num_full = num_computed // self.block_size
        if not self._caching or num_full <= blocks.num_cached or blocks.collided:
            return
        if not blocks.num_cached:
            self._first_blocks.put(self._first_block(blocks), blocks.tokens.prompt.root)
        num_full = self._hash(blocks, num_full)
        in_prompt = blocks.in_prompt
        first_live = blocks.first_live
        tables = blocks.tables
        # Events carry ids alone: a router would send requests here for blocks that they cannot share.
        events = None if blocks.tokens.prompt.is_marked else self.events
        self.quota.left -= (num_full - blocks.num_cached) // LOOKUPS_PER_UNIT
        for index in range(blocks.num_cached, num_full):
            if index < in_prompt:
                prompt = blocks.tokens.prompt
                digest = prompt.digests[index]
                hash_input = prompt.hash_inputs[index]
            else:
                digest = blocks.digests[index - in_prompt]
                hash_input = blocks.hash_inputs[index - in_prompt]
            for group, pool in self._paged:
                if index >= first_live[group] and not pool.cache(
                    tables[group][index], digest, hash_input, step
                ):
                    blocks.collided = True
                    return
            if events is not None and index >= first_live[self._listed_group]:
                events.stored(digest, hash_input)
            blocks.num_cached = index + 1

    def free(self, blocks: RequestBlocks) -> None:
        """Empty the tables. Their blocks are freed now, or in later iterations once the quota is spent.

        The last blocks are freed first, so that a cached sequence is evicted from its end.
        """
        if self.offload is not None:
            self.offload.stores.freed(blocks)
        if self._states is not None:
            self._states.drop(self._slots(blocks))
        for pool, table, live in zip(self.pools, blocks.tables, blocks.first_live, strict=True):
            if len(table) > live:
                self._to_free.append((pool, table[live:]))
            table.clear()
        blocks.first_live[:] = [0] * len(self.specs)
        blocks.num_cached = 0
        self._free_some()

    def confirm(self, step: int) -> None:
        """Count blocks written by steps up to this one as valid: these steps have succeeded."""
        for pool in self.pools:
            pool.confirm(step)

    def uncache_unconfirmed(self) -> None:
        """Uncache the blocks that a step in flight writes, after one of these has failed."""
        for pool in self.pools:
            pool.uncache_unconfirmed()
        if self._states is not None:
            self._states.forget_pending()

    def copied(self, message: BlocksCopied | BlocksFound) -> Load | Question | None:
        """Process copies or an answer of a rank; returns the load or question that ends with this.

        Raises ValueError for a message that answers none of those sent.
        """
        assert self.offload is not None, "copies without a tier"
        self.num_frees += 1
        return self.offload.copied(message)

    # Saved states

    def chunk_end(self, start: int, end: int, num_known: int) -> int:
        """Where a chunk of positions start .. end - 1 ends, or earlier, to save the state there.

        `num_known`: tokens of the sequence with known ids.
        """
        return end if self._states is None else self._states.chunk_end(start, end, num_known)

    def save_prompt_state(self, blocks: RequestBlocks, num_computed: int) -> None:
        """Save the state after a chunk of the step that is sent now, if it is wanted at its end."""
        if self._states is not None and self._states.is_border(num_computed, len(blocks.tokens)):
            self._save_state(blocks, num_computed, self._states)

    def save_decode_state(self, blocks: RequestBlocks, num_computed: int) -> None:
        """Save the state after the steps in flight of a sequence that generates, if it is wanted there."""
        if self._states is not None and self._states.is_interval(num_computed):
            self._save_state(blocks, num_computed, self._states)

    def emit_saves(self, step: int) -> None:
        """Let the next batch, `step`, save the states that were chosen for it."""
        if self._states is not None:
            self._states.emit(step)

    def cancel_saves(self) -> None:
        """Forget the saves of the next batch, which does not come."""
        if self._states is not None:
            self.num_frees += self._states.holds_slots
            self._states.cancel()

    def restore_states(self, blocks: RequestBlocks, hits: int) -> None:
        """Let the next batch restore the states after `hits` cached blocks, as `admit` has found them."""
        if self._states is None or not hits:
            return
        digests, _ = blocks.hashes(hits - 1, hits)
        blocks.shared_step = max(blocks.shared_step, self._states.restore(digests[0], self._slots(blocks)))

    def take_state_copies(self) -> tuple[list[StateCopy], list[StateCopy]]:
        """Saves and restores of the batch that is sent now."""
        if self._states is None:
            return [], []
        self.num_frees += self._states.holds_slots
        return self._states.take_copies()

    def _save_state(self, blocks: RequestBlocks, position: int, states: StateCheckpoints) -> None:
        index = position // self.block_size
        if blocks.collided or blocks.num_hashed < index:
            return
        digests, hash_inputs = blocks.hashes(index - 1, index)
        states.save(SavePoint(self._slots(blocks), digests[0], hash_inputs[0]))

    def _slots(self, blocks: RequestBlocks) -> list[int]:
        """The states of a request, by state group; empty before its admission."""
        tables = zip(blocks.tables, self._is_state, strict=True)
        return [table[0] for table, is_state in tables if is_state and table]

    def _saved_prefix(self, blocks: RequestBlocks, length: int, states: StateCheckpoints) -> int:
        digests, hash_inputs = blocks.hashes(0, length)
        self.quota.spend(length // LOOKUPS_PER_UNIT)
        return states.longest(digests, hash_inputs)

    def check_integrity(self, owners: Sequence[RequestBlocks]) -> Iterator[None]:
        """Raises AssertionError unless the pools match the tables of all `owners`.

        Yields at intervals; the caller may do the rest later, if nothing has changed.
        """
        for group, pool in enumerate(self.pools):
            users = [0] * pool.num_blocks
            last_table = [-1] * pool.num_blocks
            tables = [(blocks.tables[group], blocks.first_live[group]) for blocks in owners]
            tables += [(table, 0) for owner, table in self._to_free if owner is pool]
            for number, (table, first) in enumerate(tables):
                for start in range(first, len(table), CHECKED_AT_ONCE):
                    for block in table[start : start + CHECKED_AT_ONCE]:
                        assert 0 <= block < pool.num_blocks, f"a table has an unknown block {block}"
                        assert last_table[block] != number, "a table has a block twice"
                        last_table[block] = number
                        users[block] += 1
                    yield
            if self._states is not None and self._is_state[group]:
                for slot in self._states.users(group):
                    users[slot] += 1
            if self.offload is not None:
                for block in self.offload.users(group):
                    users[block] += 1
            if self.leases is not None:
                for block in self.leases.users(group):
                    users[block] += 1
            yield from pool.check_integrity(users)
        if self.offload is not None:
            yield from self.offload.check_integrity()

    def check_covers(self, blocks: RequestBlocks, num_tokens: int) -> None:
        """Raises AssertionError unless the tables have the length for this many tokens."""
        for spec, table in zip(self.specs, blocks.tables, strict=True):
            assert len(table) == covering_blocks(spec, num_tokens), "a table does not fit its tokens"

    def _first_visible(self, spec: KVSpec, position: int) -> int:
        return 0 if isinstance(spec, RecurrentStateSpec) else first_visible_block(spec, position)

    def _cached_run(self, blocks: RequestBlocks, start: int, end: int) -> int:
        """How many blocks from `start` on, and before `end`, all full-attention groups have cached."""
        digests, hash_inputs = blocks.hashes(start, end)
        self.quota.spend(len(digests) // LOOKUPS_PER_UNIT)
        return min((pool.cached_run(digests, hash_inputs) for pool in self._full), default=end - start)

    def _visible_prefix(self, blocks: RequestBlocks, length: int) -> int:
        """The greatest number of blocks, up to `length`, whose last window is cached in every group."""
        digests, hash_inputs = blocks.hashes(0, length)
        found = visible_prefix(self._windows, digests, hash_inputs, length, self._is_cached)
        self.quota.spend((len(digests) - found) * len(self._windows) // LOOKUPS_PER_UNIT)
        return found

    def _is_cached(self, group: int, digest: bytes, hash_input: bytes) -> bool:
        return self.pools[group].find(digest, hash_input) is not None

    def _explain_miss(self, blocks: RequestBlocks, hits: int) -> None:
        """Note the first block that the cache does not have, and why."""
        blocks.miss = Miss.NONE
        if hits >= (len(blocks.tokens) - 1) // self.block_size:
            return
        blocks.missed_block = hits
        if not self._caching:
            blocks.miss = Miss.OFF
        elif blocks.num_hashed <= hits:
            blocks.miss = Miss.NEVER_CACHED
        elif any(pool.was_evicted(blocks.hashes(hits, hits + 1)[0][0]) for pool in self.pools):
            blocks.miss = Miss.EVICTED
        else:
            root = None if hits else self._first_blocks.get(self._first_block(blocks))
            has_other = root is not None and root != blocks.tokens.prompt.root
            blocks.miss = Miss.OTHER_SALT if has_other else Miss.NEVER_CACHED

    def _first_block(self, blocks: RequestBlocks) -> bytes:
        """A digest of the first block that is the same for all salts."""
        return xxh64_digest(blocks.tokens.packed(0, self.block_size), self._seed)

    def _has_room(self, num_tokens: int, hits: int, found: list[list[int]]) -> bool:
        """Whether the free blocks, except those in `found`, hold the tokens to compute."""
        rest = -(-num_tokens // self.block_size) - hits
        for spec, pool, group in zip(self.specs, self.pools, found, strict=True):
            new = min(rest, peak_blocks(spec, num_tokens, self._max_chunk) - len(group))
            if new > pool.num_free or (group and new > pool.num_free - pool.num_free_of(group)):
                return False
        return True

    def _free_invisible(self, blocks: RequestBlocks, start: int) -> None:
        for group, spec in enumerate(self.specs):
            live = blocks.first_live[group]
            visible = self._first_visible(spec, start)
            if visible <= live:
                continue
            table = blocks.tables[group]
            self.pools[group].free(table[live:visible])
            table[live:visible] = [PLACEHOLDER] * (visible - live)
            blocks.first_live[group] = visible
            self.num_frees += 1

    def _free_tables(self, tables: Sequence[list[int]]) -> None:
        self._to_free += [(pool, table) for pool, table in zip(self.pools, tables, strict=True) if table]
        self._free_some()

    def _end_leases_for(self, pool: BlockPool, count: int) -> bool:
        """End leases until a running request can have `count` blocks; False if that is not enough."""
        if self.leases is None:
            return False
        while pool.num_free < count and (tables := self.leases.end_oldest()) is not None:
            for owner, table in zip(self.pools, tables, strict=True):
                owner.free(reversed(table))  # at once: while some wait, more leases would end
                self.quota.spend(len(table) // FREES_PER_UNIT)
            self.num_frees += 1
        return pool.num_free >= count

    def _free_some(self, reserved: int = 0) -> None:
        """Free blocks until none wait or only `reserved` units of the iteration's quota are left."""
        while self._to_free and (units := self.quota.left - reserved) > 0:
            pool, table = self._to_free[0]
            first = max(len(table) - units * FREES_PER_UNIT, 0)
            self.quota.spend(-(-(len(table) - first) // FREES_PER_UNIT))
            pool.free(reversed(table[first:]))
            del table[first:]
            if not table:
                self._to_free.popleft()
        self.num_frees += 1

    def _hash(self, blocks: RequestBlocks, num_full: int) -> int:
        """Hash the first `num_full` blocks, within the iteration's quota; returns how many are hashed."""
        start = blocks.num_hashed
        left = self.quota.left
        if start >= num_full:
            return num_full
        if left < num_full - start:
            num_full = start + max(left, 0)
        self.quota.left = left - (num_full - start)
        self.num_hashed += num_full - start
        size = self.block_size
        in_prompt = blocks.in_prompt
        tokens = blocks.tokens
        images = tokens.prompt.images
        parent = blocks.digests[-1] if blocks.digests else tokens.prompt.last_digest
        for index in range(start, num_full):
            first = index * size
            mark = block_mark(images, first, first + size) if images else b""
            hash_input = parent + mark + tokens.packed(first, first + size)
            parent = xxh64_digest(hash_input, self._seed)
            hashed = tokens.prompt if index < in_prompt else blocks
            hashed.hash_inputs.append(hash_input)
            hashed.digests.append(parent)
        return num_full
