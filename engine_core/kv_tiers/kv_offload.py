"""Copies of blocks between the KV cache and slower tiers, such as host memory.

    stored   when a request frees its blocks: those that were hit, or that belong to a long enough prefix
    loaded   before a waiting request is admitted: it waits outside the queue, and no step waits

A load fills free blocks, which are then cached as if they had been computed: the request is admitted as any
other that finds its prefix in the cache. While a copy is under way its blocks and its slots are in use. A
request waits for tiers a few times at most, and computes what has not come.
"""

from collections import deque
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
from engine_core.kv_tiers.tier_copies import Copied, Freed, Load, Message, OffloadPolicy
from engine_core.requests.iteration_quota import LOOKUPS_PER_UNIT, IterationQuota

__all__ = ["KVOffload"]

LOAD_DEADLINE_S = 10.0
"""A request does not wait longer for a load. While one takes longer, no further one begins."""
_MAX_WAITS = 2
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
        self._loads: dict[Load, None] = {}
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

    def reach(self, blocks: RequestBlocks) -> bool:
        """Look up how many leading blocks the full-attention groups have in the cache or in a tier.

        False when the iteration's quota is spent; a call in the next iteration continues.
        """
        if not self._look_up(blocks):
            return False
        if self._questions is None or blocks.num_asked > blocks.num_reached:
            return True
        end = min(self._limit(blocks), blocks.num_reached + ASKED_AT_ONCE)
        return self._hash(blocks, end) >= end  # the question after this has digests

    def _look_up(self, blocks: RequestBlocks) -> bool:
        limit = self._limit(blocks)
        blocks.num_reached = max(blocks.num_reached, blocks.num_found)
        while blocks.num_reached < limit:
            start = blocks.num_reached
            end = self._hash(blocks, min(limit, start + _LOOKED_UP_AT_ONCE))
            if end <= start:
                return False
            end = min(end, start + _LOOKED_UP_AT_ONCE)
            digests, hash_inputs = blocks.hashes(start, end)
            self._quota.spend(_UNITS_PER_LOOKED_UP * len(digests))
            for digest, hash_input in zip(digests, hash_inputs, strict=True):
                if not all(self._has(group, digest, hash_input) for group in self._full):
                    return True
                blocks.num_reached += 1
            if self._quota.is_spent:
                return False
        return True

    def load(self, blocks: RequestBlocks, hits: int, now: float) -> Load | Question | None:
        """Begin to load blocks after the `hits` cached ones, or find the load that has them already.

        First the workers are asked what other engines have stored. None when the request need not wait: no
        tier has more of its prefix, it has waited before, or the free blocks do not hold its tokens.
        """
        is_slow = any(load.deadline < now for load in self._loads)
        if self._questions is not None and not is_slow and not self._questions.is_slow(now):
            start = blocks.num_reached
            digests, _ = blocks.hashes(start, min(self._limit(blocks), start + ASKED_AT_ONCE))
            if digests and blocks.num_asked <= start:
                blocks.num_asked = start + len(digests)
                blocks.num_reached = 0
                return self._questions.ask(digests, now + LOAD_DEADLINE_S)
        most_waits = _MAX_WAITS + len(self._specs) * blocks.num_reached // _LOADED_BLOCKS
        if is_slow or blocks.num_waits >= most_waits or blocks.num_reached <= hits:
            return None
        length = self._usable(blocks, hits)
        load = self._begin(blocks, length, now) if length > hits else None
        blocks.num_reached = 0  # all is looked up again when the load is done
        blocks.num_waits += load is not None
        return load

    def _usable(self, blocks: RequestBlocks, hits: int) -> int:
        """The longest prefix of which the cache and the tiers have what every group needs; `hits` or more."""
        prompt = blocks.tokens.prompt
        length = prompt.uncut(blocks.num_reached, self._block_size)
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

    def _begin(self, blocks: RequestBlocks, length: int, now: float) -> Load | None:
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
                    return None  # lost since it was looked up
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
        return self._send_load(Load([], copies, now + LOAD_DEADLINE_S, blocks, kept))

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

    def _send_load(self, load: Load) -> Load:
        self._loads[load] = None
        for copy in load.copies:
            self._loading[copy.group, copy.digest] = load
            self.tiers[copy.tier].hold(copy.group, copy.slot)
        for tier in range(len(self.tiers)):
            indices = [index for index, copy in enumerate(load.copies) if copy.tier == tier]
            if indices:
                part = [load.copies[index] for index in indices]
                load.numbers.append(self._send(Message(tier, part, load, indices)))
        return load

    def _end_load(self, load: Load) -> None:
        """Cache the blocks that have arrived."""
        del self._loads[load]
        arrived = []
        for index, copy in enumerate(load.copies):
            del self._loading[copy.group, copy.digest]
            tier = self.tiers[copy.tier]
            if index in load.failed:
                self.num_failed[copy.tier] += 1
                if not load.is_void:
                    tier.lose(copy.group, copy.slot)
            elif not load.is_void:
                self.num_loaded[copy.tier] += 1
                if self._pools[copy.group].cache(copy.block, copy.digest, copy.hash_input, step=0):
                    arrived.append(copy)
        fetched = load.blocks.num_fetched or [0] * len(self.tiers)
        for copy in reversed(load.copies):  # the first of a sequence is evicted last, here and there
            self.tiers[copy.tier].release(copy.group, copy.slot)
            self._pools[copy.group].free([copy.block])
        for pool, cached in load.kept:
            pool.free(reversed(cached))
        for copy in arrived:
            if copy.group == self._listed_group:
                fetched[copy.tier] += 1
                if self._events is not None and not _is_salted(load.blocks):
                    self._events.stored(copy.digest, copy.hash_input)
        load.blocks.num_fetched = fetched

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
        start, end = blocks.num_pushed, blocks.num_cached
        if self._shared is None or end <= start or blocks.collided:
            return
        # Only the last blocks of a window are used, and states are saved at the end.
        starts = [max(blocks.first_live[group] - start, 0) for group in range(len(self._specs))]
        starts = [first if group in self._full else end for group, first in enumerate(starts)]
        self._queue(self._shared, blocks, start, end, starts)
        blocks.num_pushed = end

    def _queue(self, tier: int, blocks: RequestBlocks, start: int, end: int, starts: list[int]) -> None:
        """Note blocks start .. end - 1 to be stored; `starts` by group, counted from `start`."""
        if tier == self._shared and self._policy.role == "kv_consumer":
            return
        queue = self._freed[tier]
        owner = blocks if tier == self._shared else None
        freed = Freed(*blocks.hashes(start, end), starts, end - start, _is_salted(blocks), owner)
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
            self._send(Message(tier, copies, None))

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
                copies.append(Copied(*where, digest, hash_input, replaced, listed, freed.owner))
        return copies

    def _end_store(self, message: Message) -> None:
        tier = self.tiers[message.tier]
        for index, copy in reversed(list(enumerate(message.copies))):  # parents come first
            self._storing[message.tier].discard((copy.group, copy.digest))
            if copy.owner is not None:
                copy.owner.num_storing -= 1
            if index in message.failed:
                self.num_failed[message.tier] += 1
            elif not message.is_void and tier.keep(copy.group, copy.slot, copy.digest, copy.hash_input):
                self.num_stored[message.tier] += 1
                if copy.is_listed and self._events is not None:
                    self._events.stored(copy.digest, copy.hash_input, tier.medium)
            tier.release(copy.group, copy.slot)
            self._pools[copy.group].free([copy.block])

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
        sent.failed.update(message.failed)
        if len(sent.confirmed) < self._policy.num_ranks:
            return None
        del self._messages[message.number]
        self.num_copies += 1
        load = sent.load
        if load is None:
            self._end_store(sent)
            return None
        load.failed.update(sent.indices[index] for index in sent.failed)
        load.numbers.remove(message.number)
        if load.numbers:
            return None
        self._end_load(load)
        return load

    def reset(self) -> None:
        """Forget all blocks of all tiers, those that are being copied included."""
        for tier in self.tiers:
            tier.clear()
        for message in self._messages.values():
            message.is_void = True
        for load in self._loads:
            load.is_void = True
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
        for message in self._messages.values():
            yield from (copy.block for copy in message.copies if message.load is None and copy.group == group)
        for load in self._loads:
            yield from (copy.block for copy in load.copies if copy.group == group)
            yield from load.kept[group][1]

    def check_integrity(self) -> Iterator[None]:
        """Raises AssertionError unless the tiers match the copies under way. Yields at intervals."""
        copies = [copy for message in self._messages.values() if not message.load for copy in message.copies]
        copies += [copy for load in self._loads for copy in load.copies]
        for index, tier in enumerate(self.tiers):
            held = [
                [copy.slot for copy in copies if copy.tier == index and copy.group == group]
                for group in range(len(self._specs))
            ]
            yield from tier.check_integrity(held)
            assert self._num_freed[index] == sum(freed.left for freed in self._freed[index])
        loading = {(copy.group, copy.digest) for load in self._loads for copy in load.copies}
        assert loading == self._loading.keys(), "a load is lost"

    def _send(self, message: Message) -> int:
        self._last_number += 1
        self.num_copies += 1
        self._messages[self._last_number] = message
        by_content = self.tiers[message.tier].by_content
        copies = [
            BlockCopy(copy.group, copy.block, copy.slot, copy.digest, copy.hash_input, copy.replaced)
            if by_content
            else BlockCopy(copy.group, copy.block, copy.slot)
            for copy in message.copies
        ]
        is_load = message.load is not None
        self._unsent.append(CopyBlocks(self._last_number, message.tier, is_load, copies))
        return self._last_number

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
