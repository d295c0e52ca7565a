"""Copies of blocks between the KV cache and slower tiers, such as host memory.

    stored   when a request frees its blocks: those that were hit, or that belong to a long enough prefix
    loaded   before a waiting request is admitted: it waits outside the queue, and no step waits

A load fills free blocks, which are then cached as if they had been computed: the request is admitted as any
other that finds its prefix in the cache. While a copy is under way its blocks and its slots are in use. A
request waits for tiers a few times at most, and computes what has not come.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from atom.shared.messages.engine import KVTierStats
from atom.shared.messages.kv_tiers import (
    BlockCopy,
    BlocksCopied,
    BlocksFound,
    CopyBlocks,
    FindBlocks,
    StoredBlocks,
)
from atom.shared.messages.worker import (
    FullAttentionSpec,
    KVSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    stored_bytes,
)
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.kv_events import KVEventLog, listed_group
from engine_core.kv_cache.kv_plan import first_visible_block, peak_blocks
from engine_core.kv_cache.prefix_lookup import visible_prefix
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.kv_tiers.block_questions import ASKED_AT_ONCE, BlockQuestions, Question
from engine_core.kv_tiers.kv_tier import KVTier
from engine_core.kv_tiers.tier_copies import Copied, Freed, Load, Message, OffloadPolicy, Store, Transfer
from engine_core.requests.iteration_quota import LOOKUPS_PER_UNIT, IterationQuota

__all__ = ["KVOffload"]

LOAD_DEADLINE_S = 10.0
"""A request does not wait longer for a load. While one takes longer, no further one begins."""
_MAX_LOADS = 2
_LOOKED_UP_AT_ONCE = 64
_STORED_BYTES = 128 << 20
_STORED_BLOCKS = 256
_STORED_SHARE = 8
"""Blocks that are being stored take at most this fraction (1 / 8) of a group's blocks."""
_LOADED_BLOCKS = 2048
"""Most blocks of one load: a request may wait for several, so that none takes an iteration long to plan."""
_UNITS_PER_LOADED = 4
_UNITS_PER_LOOKED_UP = 4
_MAX_FREED = 1 << 16
"""Blocks that wait to be stored; the oldest are dropped."""


_Missing = tuple[int, int, int, int]
"""Group, index in the sequence, tier and slot of a block that the cache lacks."""


class KVOffload:
    """Tiers, in the order in which they are read, and the copies under way."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        pools: Sequence[BlockPool],
        tiers: Sequence[KVTier],
        policy: OffloadPolicy,
        quota: IterationQuota,
        hash_blocks: Callable[[RequestBlocks, int], int],
    ):
        """`hash_blocks(blocks, n)` hashes n leading blocks within the quota; returns how many are hashed."""
        self.tiers = list(tiers)
        self.has_work = False
        """Whether the iteration's quota ended the search for blocks to store."""
        self.num_copies = 0
        """Grows with each copy that begins or ends."""
        self.num_stored = [0] * len(tiers)
        """Blocks copied to each tier."""
        self.num_loaded = [0] * len(tiers)
        """Blocks that each tier gave back."""
        self.num_failed = [0] * len(tiers)
        """Copies of each tier that failed."""
        self._specs = list(specs)
        self._pools = list(pools)
        self._policy = policy
        self._quota = quota
        self._hash = hash_blocks
        self._listed_group = listed_group(specs)
        self._full = [index for index, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        self._windows = [(i, spec) for i, spec in enumerate(specs) if isinstance(spec, SlidingWindowSpec)]
        self._states = [index for index, spec in enumerate(specs) if isinstance(spec, RecurrentStateSpec)]
        self._events: KVEventLog | None = None
        self._messages: dict[int, Message] = {}
        self._last_number = 0
        self._unsent: list[CopyBlocks] = []
        self._transfers: dict[Store | Load, None] = {}
        self._loading: dict[tuple[int, bytes], Load] = {}
        self._storing: list[set[tuple[int, bytes]]] = [set() for _ in tiers]
        self._freed: list[deque[Freed]] = [deque() for _ in tiers]
        self._num_freed = [0] * len(tiers)
        self._shared: int | None = None
        """The tier that other engines share."""
        self._questions: BlockQuestions | None = None
        if policy.is_shared:
            self._shared = max(index for index, tier in enumerate(tiers) if tier.by_content)
            shared = tiers[self._shared]
            if policy.role != "kv_producer":
                self._questions = BlockQuestions(shared, self._shared, len(specs), policy.num_ranks)
        most = min(pool.num_blocks for pool in pools) // _STORED_SHARE
        by_size = _STORED_BYTES // max(map(stored_bytes, specs))
        self._most_stored = max(1, min(_STORED_BLOCKS, most, by_size))

    def list_events(self, events: KVEventLog) -> None:
        """Note in this log what the tiers, and the cache from them, gain and lose."""
        self._events = events
        for tier in self.tiers:
            tier.pools[self._listed_group].on_uncached = partial(events.removed, medium=tier.medium)

    @property
    def stores_prompts(self) -> bool:
        """Whether each prompt is stored while it is computed, for another server that goes on with it."""
        return self._policy.role == "kv_producer"

    @property
    def num_under_way(self) -> int:
        """Messages that not all workers have confirmed."""
        return len(self._messages)

    def adopt(self, stored: Sequence[Sequence[StoredBlocks]]) -> int:
        """Take over the blocks that tiers have from an earlier start, by rank; returns how many."""
        count = 0
        for index, tier in enumerate(self.tiers):
            digests = [[each.digests for each in rank if each.tier == index] for rank in stored]
            if all(digests):
                count += tier.adopt([found[0] for found in digests])
        return count

    # Loads

    def look_up(self, blocks: RequestBlocks) -> bool:
        """Look up how many leading blocks the full-attention groups have in the cache or in a tier.

        False when the iteration's quota is spent; a call in the next iteration continues.
        """
        lookup = blocks.lookup
        lookup.num_present = max(lookup.num_present, blocks.num_found)
        limit = self._limit(blocks)
        while (start := lookup.num_present) < limit:
            end = self._hash(blocks, min(limit, start + _LOOKED_UP_AT_ONCE))
            if end <= start:
                return False
            end = min(end, start + _LOOKED_UP_AT_ONCE)
            digests, hash_inputs = blocks.hashes(start, end)
            self._quota.spend(_UNITS_PER_LOOKED_UP * len(digests))
            for digest, hash_input in zip(digests, hash_inputs, strict=True):
                if not all(self._has(group, digest, hash_input) for group in self._full):
                    return self._may_ask(blocks, limit)
                lookup.num_present += 1
            if self._quota.is_spent:
                return False
        return self._may_ask(blocks, limit)

    def _may_ask(self, blocks: RequestBlocks, limit: int) -> bool:
        """Whether the blocks have digests for which the workers are to be asked next, if any."""
        lookup = blocks.lookup
        if self._questions is None or lookup.num_asked > lookup.num_present:
            return True
        end = min(limit, lookup.num_present + ASKED_AT_ONCE)
        return self._hash(blocks, end) >= end

    def wait_for(self, blocks: RequestBlocks, hits: int, now: float) -> Load | Question | None:
        """What a request waits for that is looked up, and has `hits` cached blocks: a question, then loads.

        None when it need not wait: no tier has more of its prefix, it has waited before, or the free blocks
        do not hold its tokens.
        """
        lookup = blocks.lookup
        if any(load.deadline <= now for load in self._loads()):
            return None
        if self._questions is not None and not self._questions.is_slow(now):
            start = lookup.num_present
            digests, _ = blocks.hashes(start, min(self._limit(blocks), start + ASKED_AT_ONCE))
            if digests and lookup.num_asked <= start:
                lookup.ask(len(digests))
                return self._questions.ask(digests, now + LOAD_DEADLINE_S)
        most_loads = _MAX_LOADS + len(self._specs) * lookup.num_present // _LOADED_BLOCKS
        if lookup.num_loads >= most_loads or lookup.num_present <= hits:
            return None
        while (length := self._usable(blocks, hits)) > hits:
            found = self._begin(blocks, length, now)
            if isinstance(found, int):  # lost since it was looked up: what is before it may still be there
                lookup.num_present = found
                continue
            if found is not None:
                lookup.wait_for_load()
            return found
        return None

    def _usable(self, blocks: RequestBlocks, hits: int) -> int:
        """The longest prefix of which the cache and the tiers have what every group needs; `hits` or more."""
        prompt = blocks.tokens.prompt
        length = prompt.uncut(blocks.lookup.num_present, self._block_size)
        digests, hash_inputs = blocks.hashes(0, length)
        self._quota.spend(
            max(length - hits, 0) * (len(self._windows) + len(self._states)) // LOOKUPS_PER_UNIT
        )
        while length > hits:
            visible = visible_prefix(self._windows, digests, hash_inputs, length, self._has)
            saved = visible = prompt.uncut(visible, self._block_size)
            while saved > hits and not all(
                self._has(group, digests[saved - 1], hash_inputs[saved - 1]) for group in self._states
            ):
                saved -= 1
            if saved == length:
                break
            length = saved
        return max(length, hits)

    def _begin(self, blocks: RequestBlocks, length: int, now: float) -> Load | int | None:
        """Begin to load what the cache lacks of the first `length` blocks, or find the load that has some.

        The index of a block that a tier has lost since it was looked up; None without room for the tokens.
        """
        found: list[list[int]] = []
        needed: list[int] = []
        missing: list[_Missing] = []
        digests, hash_inputs = blocks.hashes(0, length)
        for group, (spec, pool) in enumerate(zip(self._specs, self._pools, strict=True)):
            first = length - 1 if isinstance(spec, RecurrentStateSpec) else self._first(spec, length)
            needed.append(length - first)
            run = first + pool.cached_run(digests[first:], hash_inputs[first:])
            found.append(pool.blocks_of(digests[first:run]))
            self._quota.spend((run - first) // LOOKUPS_PER_UNIT)
            for index in range(run, length):
                if len(missing) == _LOADED_BLOCKS:
                    break
                digest = digests[index]
                block = pool.find(digest, hash_inputs[index])
                if block is not None:
                    found[group].append(block)
                elif (load := self._loading.get((group, digest))) is not None:
                    return load
                elif (place := self._find(group, digest, hash_inputs[index])) is not None:
                    missing.append((group, index, *place))
                else:
                    return index
        if not missing or not self._has_room(len(blocks.tokens), length, found, needed):
            return None
        kept = list(zip(self._pools, found, strict=True))
        for pool, cached in kept:
            pool.share(cached)  # the allocation must not evict them
        copies = []
        for group, index, tier, slot in missing:
            (block,) = self._pools[group].allocate(1)
            copies.append(Copied(group, block, tier, slot, digests[index], hash_inputs[index]))
        self._quota.spend(_UNITS_PER_LOADED * len(copies))
        load = Load(copies, now + LOAD_DEADLINE_S, blocks, kept)
        for copy in copies:
            self._loading[copy.group, copy.digest] = load
            self.tiers[copy.tier].hold(copy.group, copy.slot)
        self._send(load)
        return load

    def _has_room(
        self, num_tokens: int, length: int, found: Sequence[Sequence[int]], needed: Sequence[int]
    ) -> bool:
        """Whether the free blocks hold what is loaded, and the tokens that are computed after it.

        `needed`: blocks of the prefix by group, of which `found` are cached.
        """
        for group, (spec, pool) in enumerate(zip(self._specs, self._pools, strict=True)):
            loaded = needed[group] - len(found[group])
            if isinstance(spec, RecurrentStateSpec):
                new = 1
            else:
                rest = -(-num_tokens // spec.block_size) - length
                peak = peak_blocks(spec, num_tokens, self._policy.max_chunk)
                new = min(rest, peak - len(found[group]) - loaded)
            if loaded + max(new, 0) > pool.num_free - pool.num_free_of(found[group]):
                return False
        return True

    def _end_load(self, load: Load) -> None:
        """Cache the blocks that have arrived."""
        lookup = load.blocks.lookup
        lookup.num_loaded = lookup.num_loaded or [0] * len(self.tiers)
        events = None if _is_salted(load.blocks) else self._events
        for copy in load.copies:
            del self._loading[copy.group, copy.digest]
            if copy.has_failed:
                self.tiers[copy.tier].lose(copy.group, copy.slot)
                continue
            if load.is_void:
                continue
            self.num_loaded[copy.tier] += 1
            is_cached = self._pools[copy.group].cache(copy.block, copy.digest, copy.hash_input, step=0)
            if is_cached and copy.group == self._listed_group:
                lookup.num_loaded[copy.tier] += 1
                if events is not None:
                    events.stored(copy.digest, copy.hash_input)
        self._release(load)
        for pool, cached in load.kept:
            pool.free(reversed(cached))

    # Stores

    def freed(self, blocks: RequestBlocks) -> None:
        """Note the cached blocks of a request whose tables are about to be emptied."""
        long_enough = blocks.num_cached * self._block_size >= self._policy.min_tokens
        count = blocks.num_cached if long_enough else min(blocks.num_hits, blocks.num_cached)
        if not count or blocks.collided:
            return
        for tier in range(len(self.tiers)):
            self._queue(tier, blocks, 0, count, list(blocks.first_live))

    def push(self, blocks: RequestBlocks) -> None:
        """Store what a running request has computed so far where other engines find it."""
        start, end = blocks.shared_store.num_pushed, blocks.num_cached
        if self._shared is None or end <= start or blocks.collided:
            return
        # Only the last blocks of a window are used, and states are saved at the end.
        starts = [max(blocks.first_live[group] - start, 0) for group in range(len(self._specs))]
        starts = [first if group in self._full else end for group, first in enumerate(starts)]
        self._queue(self._shared, blocks, start, end, starts)
        blocks.shared_store.num_pushed = end

    def _queue(self, tier: int, blocks: RequestBlocks, start: int, end: int, starts: list[int]) -> None:
        """Note blocks start .. end - 1 to be stored; `starts` by group, counted from `start`."""
        if tier == self._shared and self._policy.role == "kv_consumer":
            return
        queue = self._freed[tier]
        store = blocks.shared_store if tier == self._shared else None
        freed = Freed(*blocks.hashes(start, end), starts, end - start, _is_salted(blocks), store)
        queue.append(freed)
        freed.count(freed.left)
        self._num_freed[tier] += freed.left
        while self._num_freed[tier] > _MAX_FREED and len(queue) > 1:
            oldest = queue.popleft()
            oldest.count(-oldest.left)
            self._num_freed[tier] -= oldest.left

    def take_messages(self) -> list[CopyBlocks | FindBlocks]:
        """Copies to begin and questions, to be sent to the workers after the step of this iteration."""
        self.has_work = False
        for tier in range(len(self.tiers)):
            self._store(tier)
        unsent: list[CopyBlocks | FindBlocks] = [*self._unsent]
        self._unsent = []
        if self._questions is not None:
            unsent += self._questions.take()
        return unsent

    def _store(self, tier: int) -> None:
        """Begin to store freed blocks, as many as may be under way."""
        queue = self._freed[tier]
        copies: list[Copied] = []
        room = self._most_stored - len(self._storing[tier])
        while queue and room > len(copies):
            if self._quota.is_spent:
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
            self._quota.spend(_UNITS_PER_LOOKED_UP * len(self._pools))
        if copies:
            self._send(Store(copies))

    def _to_store(self, tier: int, freed: Freed, index: int) -> list[Copied] | None:
        """Copies of the blocks at an index that the tier lacks; None while a step that writes it may fail."""
        digest = freed.digests[index]
        hash_input = freed.hash_inputs[index]
        wanted = []
        for group, pool in enumerate(self._pools):
            block = pool.find(digest, hash_input) if index >= freed.starts[group] else None
            if block is None or (group, digest) in self._storing[tier]:
                continue
            if (slot := self.tiers[tier].find(group, digest, hash_input)) is not None:
                self.tiers[tier].use(group, slot)
            elif not pool.is_confirmed(block):
                return None
            else:
                wanted.append((group, block))
        copies = []
        for group, block in wanted:
            reserved = self.tiers[tier].reserve(group, digest)
            if reserved is not None:
                slot, replaced = reserved
                self._pools[group].share([block])
                self._storing[tier].add((group, digest))
                listed = group == self._listed_group and not freed.is_salted
                where = group, block, tier, slot
                copies.append(Copied(*where, digest, hash_input, replaced, listed, freed.store))
        return copies

    def _end_store(self, store: Store) -> None:
        """Index the blocks that their tier has now."""
        for copy in reversed(store.copies):  # parents come first
            tier = self.tiers[copy.tier]
            self._storing[copy.tier].discard((copy.group, copy.digest))
            if copy.store is not None:
                copy.store.num_left -= 1
            is_kept = not copy.has_failed and not store.is_void
            if is_kept and tier.keep(copy.group, copy.slot, copy.digest, copy.hash_input):
                self.num_stored[copy.tier] += 1
                if copy.is_listed and self._events is not None:
                    self._events.stored(copy.digest, copy.hash_input, tier.medium)
        self._release(store)

    # Both

    def copied(self, message: BlocksCopied | BlocksFound) -> Load | Question | None:
        """A rank has done its copies, or answered; returns the load that has ended with this, if one has.

        Raises ValueError for a message that answers none of those sent.
        """
        if isinstance(message, BlocksFound):
            if self._questions is None:
                raise ValueError(f"worker {message.rank} found blocks without a question")
            self.num_copies += 1
            return self._questions.answered(message)
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
        if len(sent.confirmed) < self._policy.num_ranks:
            return None
        del self._messages[message.number]
        self.num_copies += 1
        transfer = sent.transfer
        transfer.num_messages -= 1
        if transfer.num_messages:
            return None
        del self._transfers[transfer]
        if isinstance(transfer, Store):
            self._end_store(transfer)
            return None
        self._end_load(transfer)
        return transfer

    def _release(self, transfer: Transfer) -> None:
        """Free the blocks and slots of a transfer that has ended; those of the last are evicted first."""
        for copy in reversed(transfer.copies):
            self.num_failed[copy.tier] += copy.has_failed
            self.tiers[copy.tier].release(copy.group, copy.slot)
            self._pools[copy.group].free([copy.block])

    def reset(self) -> None:
        """Forget all blocks of all tiers, those that are being copied included."""
        for tier in self.tiers:
            tier.clear()
        for transfer in self._transfers:
            transfer.is_void = True
        if self._questions is not None:
            self._questions.reset()
        for queue in self._freed:
            for freed in queue:
                freed.count(-freed.left)
            queue.clear()
        self._num_freed = [0] * len(self.tiers)

    def stats(self, hits: Mapping[int, int]) -> list[KVTierStats]:
        """Figures of each tier; `hits`: tokens of prefixes that came from it, by its index."""
        return [
            KVTierStats(
                tier.medium,
                sum(pool.num_blocks for pool in tier.pools),
                sum(pool.num_cached for pool in tier.pools),
                hits[index],
                self.num_stored[index],
                self.num_loaded[index],
                self.num_failed[index],
            )
            for index, tier in enumerate(self.tiers)
        ]

    def users(self, group: int) -> Iterator[int]:
        """Blocks of a group that are in use for copies; a block may come more than once."""
        for transfer in self._transfers:
            yield from (copy.block for copy in transfer.copies if copy.group == group)
        for load in self._loads():
            yield from load.kept[group][1]

    def check_integrity(self) -> Iterator[None]:
        """Raises AssertionError unless the tiers match the copies under way. Yields at intervals."""
        copies = [copy for transfer in self._transfers for copy in transfer.copies]
        for index, tier in enumerate(self.tiers):
            held = [
                [copy.slot for copy in copies if copy.tier == index and copy.group == group]
                for group in range(len(self._specs))
            ]
            yield from tier.check_integrity(held)
            assert self._num_freed[index] == sum(freed.left for freed in self._freed[index])
        sent = Counter(message.transfer for message in self._messages.values())
        assert sent == {each: each.num_messages for each in self._transfers}, "a transfer never ends"
        loading = {(copy.group, copy.digest): load for load in self._loads() for copy in load.copies}
        assert loading == self._loading, "a load is lost"
        stores = [each.copies for each in self._transfers if isinstance(each, Store)]
        storing = sorted((copy.tier, copy.group, copy.digest) for part in stores for copy in part)
        noted = sorted((tier, *key) for tier, keys in enumerate(self._storing) for key in keys)
        assert storing == noted, "a store is lost"

    def _loads(self) -> Iterator[Load]:
        """The loads under way."""
        return (transfer for transfer in self._transfers if isinstance(transfer, Load))

    def _send(self, transfer: Store | Load) -> None:
        """Begin a transfer: each tier gets the copies that it has a part in."""
        self._transfers[transfer] = None
        for index, tier in enumerate(self.tiers):
            part = [copy for copy in transfer.copies if copy.tier == index]
            if not part:
                continue
            self._last_number += 1
            self.num_copies += 1
            transfer.num_messages += 1
            self._messages[self._last_number] = Message(transfer, part)
            copies = [
                BlockCopy(copy.group, copy.block, copy.slot, copy.digest, copy.hash_input, copy.replaced)
                if tier.by_content
                else BlockCopy(copy.group, copy.block, copy.slot)
                for copy in part
            ]
            self._unsent.append(CopyBlocks(self._last_number, index, isinstance(transfer, Load), copies))

    def _has(self, group: int, digest: bytes, hash_input: bytes) -> bool:
        return (
            self._pools[group].find(digest, hash_input) is not None
            or self._find(group, digest, hash_input) is not None
        )

    def _find(self, group: int, digest: bytes, hash_input: bytes) -> tuple[int, int] | None:
        """(tier, slot) of a block: the first tier that has it, and from which this engine loads."""
        for index, tier in enumerate(self.tiers):
            if index == self._shared and self._questions is None:
                continue
            if (slot := tier.find(group, digest, hash_input)) is not None:
                return index, slot
        return None

    def _limit(self, blocks: RequestBlocks) -> int:
        """Blocks that a prefix may have: at least one token is left to compute."""
        return (len(blocks.tokens) - 1) // self._block_size

    @property
    def _block_size(self) -> int:
        return next(spec.block_size for spec in self._specs if not isinstance(spec, RecurrentStateSpec))

    def _first(self, spec: KVSpec, length: int) -> int:
        assert not isinstance(spec, RecurrentStateSpec)
        return first_visible_block(spec, length * spec.block_size)


def _is_salted(blocks: RequestBlocks) -> bool:
    return blocks.tokens.prompt.is_marked
