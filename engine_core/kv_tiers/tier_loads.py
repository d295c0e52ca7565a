"""Loads: blocks of a waiting request's prefix come back from tiers before it is admitted.

The request waits outside the queue, and no step waits. A load fills free blocks, which are then cached as if
they had been computed: the request is admitted as any other that finds its prefix in the cache. A request
waits for tiers a few times at most, and computes what has not come.
"""

from collections.abc import Sequence
from functools import partial

from atom.shared.messages.kv_peers import ReleaseLease
from atom.shared.messages.kv_tiers import BlocksFound
from atom.shared.messages.worker import KVSpec, RecurrentStateSpec, SlidingWindowSpec
from atom.shared.utils.logger import RareWarning
from engine_core.kv_cache.kv_plan import first_visible_block, peak_blocks
from engine_core.kv_cache.prefix_lookup import visible_prefix
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.kv_tiers.block_questions import ASKED_AT_ONCE, BlockQuestions, Question
from engine_core.kv_tiers.request_tiers import PeerPrefix
from engine_core.kv_tiers.tier_copies import Copied, Load
from engine_core.kv_tiers.tier_transfers import TierTransfers
from engine_core.kv_tiers.tiered_cache import UNITS_PER_LOOKED_UP, TieredCache
from engine_core.requests.iteration_quota import LOOKUPS_PER_UNIT

__all__ = ["LOAD_DEADLINE_S", "TierLoads"]

LOAD_DEADLINE_S = 10.0
"""A request does not wait longer for a load. While one takes longer, no further one begins."""
_MAX_LOADS = 2
_LOOKED_UP_AT_ONCE = 64
_LOADED_BLOCKS = 2048
"""Most blocks of one load: a request may wait for several, so that none takes an iteration long to plan."""
_UNITS_PER_LOADED = 4


_Missing = tuple[int, int, int, int]
"""Group, index in the sequence, tier and slot of a block that the cache lacks."""


class TierLoads:
    """Looks prefixes up in the cache and in tiers, and loads what the cache lacks."""

    def __init__(self, cache: TieredCache, transfers: TierTransfers):
        self.num_loaded = [0] * len(cache.tiers)
        """Blocks that each tier gave back."""
        self.num_answers = 0
        """Answers of workers to questions."""
        self.questions: BlockQuestions | None = None
        """To the workers, about the shared tier; None if this engine reads no such tier."""
        self._cache = cache
        self._transfers = transfers
        self._windows = [
            (i, spec) for i, spec in enumerate(cache.specs) if isinstance(spec, SlidingWindowSpec)
        ]
        self._states = [i for i, spec in enumerate(cache.specs) if isinstance(spec, RecurrentStateSpec)]
        self._loading: dict[tuple[int, bytes], Load] = {}
        """By group and digest."""
        self._warning = RareWarning()
        self._releases: list[ReleaseLease] = []
        if cache.shared_tier is not None and cache.policy.role != "kv_producer":
            shared = cache.tiers[cache.shared_tier]
            self.questions = BlockQuestions(
                shared, cache.shared_tier, len(cache.specs), cache.policy.num_ranks
            )

    def look_up(self, blocks: RequestBlocks) -> bool:
        """Look up how many leading blocks the full-attention groups have in the cache or in a tier.

        False when the iteration's quota is spent; a call in the next iteration continues.
        """
        lookup = blocks.lookup
        lookup.num_present = max(lookup.num_present, blocks.num_found)
        peer = lookup.peer
        if peer is not None and peer.num_noted < lookup.num_present:  # windows and states may lack them
            peer.note(peer.num_noted, blocks.hashes(peer.num_noted, lookup.num_present)[0])
        limit = self._limit(blocks)
        while (start := lookup.num_present) < limit:
            end = self._cache.hash_blocks(blocks, min(limit, start + _LOOKED_UP_AT_ONCE))
            if end <= start:
                return False
            end = min(end, start + _LOOKED_UP_AT_ONCE)
            digests, hash_inputs = blocks.hashes(start, end)
            if peer is not None:
                peer.note(start, digests)
            self._cache.quota.spend(UNITS_PER_LOOKED_UP * len(digests))
            has = partial(self._has, peer)
            for digest, hash_input in zip(digests, hash_inputs, strict=True):
                if not all(has(group, digest, hash_input) for group in self._cache.full_groups):
                    return self._may_ask(blocks, limit)
                lookup.num_present += 1
            if self._cache.quota.is_spent:
                return False
        return self._may_ask(blocks, limit)

    def _may_ask(self, blocks: RequestBlocks, limit: int) -> bool:
        """Whether the blocks have digests for which the workers are to be asked next, if any."""
        lookup = blocks.lookup
        if self.questions is None or lookup.num_asked > lookup.num_present:
            return True
        end = min(limit, lookup.num_present + ASKED_AT_ONCE)
        return self._cache.hash_blocks(blocks, end) >= end

    def wait_for(self, blocks: RequestBlocks, hits: int, now: float) -> Load | Question | None:
        """What a request waits for that is looked up, and has `hits` cached blocks: a question, then loads.

        None when it need not wait: no tier has more of its prefix, it has waited before, or the free blocks
        do not hold its tokens.
        """
        lookup = blocks.lookup
        if any(load.deadline <= now for load in self._transfers.loads()):
            self._warning.log(
                f"KV blocks were not loaded from a tier within {LOAD_DEADLINE_S:.0f} s: requests compute "
                "them, and none waits until the load has ended"
            )
            return None
        if self.questions is not None and not self.questions.is_slow(now):
            start = lookup.num_present
            digests, _ = blocks.hashes(start, min(self._limit(blocks), start + ASKED_AT_ONCE))
            if digests and lookup.num_asked <= start:
                lookup.ask(len(digests))
                return self.questions.ask(digests, now + LOAD_DEADLINE_S)
        most_loads = _MAX_LOADS + len(self._cache.specs) * lookup.num_present // _LOADED_BLOCKS
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
        has = partial(self._has, blocks.lookup.peer)
        length = prompt.uncut(blocks.lookup.num_present, self._cache.block_size)
        digests, hash_inputs = blocks.hashes(0, length)
        self._cache.quota.spend(
            max(length - hits, 0) * (len(self._windows) + len(self._states)) // LOOKUPS_PER_UNIT
        )
        while length > hits:
            visible = visible_prefix(self._windows, digests, hash_inputs, length, has)
            saved = visible = prompt.uncut(visible, self._cache.block_size)
            while saved > hits and not all(
                has(group, digests[saved - 1], hash_inputs[saved - 1]) for group in self._states
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
        peer = blocks.lookup.peer
        digests, hash_inputs = blocks.hashes(0, length)
        for group, (spec, pool) in enumerate(zip(self._cache.specs, self._cache.pools, strict=True)):
            first = length - 1 if isinstance(spec, RecurrentStateSpec) else _first(spec, length)
            needed.append(length - first)
            run = first + pool.cached_run(digests[first:], hash_inputs[first:])
            found.append(pool.blocks_of(digests[first:run]))
            self._cache.quota.spend((run - first) // LOOKUPS_PER_UNIT)
            for index in range(run, length):
                if len(missing) == _LOADED_BLOCKS:
                    break
                digest = digests[index]
                block = pool.find(digest, hash_inputs[index])
                if block is not None:
                    found[group].append(block)
                elif (load := self._loading.get((group, digest))) is not None:
                    return load
                elif (place := self._find(peer, group, digest, hash_inputs[index])) is not None:
                    missing.append((group, index, *place))
                else:
                    return index
        if not missing or not self._has_room(len(blocks.tokens), length, found, needed):
            return None
        kept = list(zip(self._cache.pools, found, strict=True))
        for pool, cached in kept:
            pool.share(cached)  # the allocation must not evict them
        copies = []
        for group, index, tier, slot in missing:
            (block,) = self._cache.pools[group].allocate(1)
            copies.append(Copied(group, block, tier, slot, digests[index], hash_inputs[index]))
        self._cache.quota.spend(_UNITS_PER_LOADED * len(copies))
        load = Load(copies, now + LOAD_DEADLINE_S, blocks, kept, None if peer is None else peer.lease)
        for copy in copies:
            self._loading[copy.group, copy.digest] = load
            self._cache.tiers[copy.tier].hold(copy.group, copy.slot)
        self._transfers.begin(load)
        return load

    def _has_room(
        self, num_tokens: int, length: int, found: Sequence[Sequence[int]], needed: Sequence[int]
    ) -> bool:
        """Whether the free blocks hold what is loaded, and the tokens that are computed after it.

        `needed`: blocks of the prefix by group, of which `found` are cached.
        """
        for group, (spec, pool) in enumerate(zip(self._cache.specs, self._cache.pools, strict=True)):
            loaded = needed[group] - len(found[group])
            if isinstance(spec, RecurrentStateSpec):
                new = 1
            else:
                rest = -(-num_tokens // spec.block_size) - length
                peak = peak_blocks(spec, num_tokens, self._cache.policy.max_chunk)
                new = min(rest, peak - len(found[group]) - loaded)
            if loaded + max(new, 0) > pool.num_free - pool.num_free_of(found[group]):
                return False
        return True

    def ended(self, load: Load) -> None:
        """Cache the blocks that have arrived."""
        lookup = load.blocks.lookup
        lookup.num_loaded = lookup.num_loaded or [0] * len(self._cache.tiers)
        events = None if load.blocks.tokens.prompt.is_marked else self._cache.events
        for copy in load.copies:
            del self._loading[copy.group, copy.digest]
            if copy.has_failed:
                self._cache.tiers[copy.tier].lose(copy.group, copy.slot)
                if copy.tier == self._cache.peer_tier and lookup.peer is not None:
                    lookup.peer.drop()
                continue
            if load.is_void:
                continue
            self.num_loaded[copy.tier] += 1
            is_cached = self._cache.pools[copy.group].cache(copy.block, copy.digest, copy.hash_input, step=0)
            if is_cached and copy.group == self._cache.listed_group:
                lookup.num_loaded[copy.tier] += 1
                if events is not None:
                    events.stored(copy.digest, copy.hash_input)
        self._transfers.release(load)
        for pool, cached in load.kept:
            pool.free(reversed(cached))

    def answered(self, message: BlocksFound) -> Question | None:
        """A rank has answered; returns the question once all have.

        Raises ValueError for an answer to none of the questions.
        """
        if self.questions is None:
            raise ValueError(f"worker {message.rank} found blocks without a question")
        self.num_answers += 1
        return self.questions.answered(message)

    def reset(self) -> None:
        """Forget the answers to questions asked so far."""
        if self.questions is not None:
            self.questions.reset()

    def check_integrity(self) -> None:
        """Raises AssertionError unless each block that is being loaded can be found."""
        loads = self._transfers.loads()
        loading = {(copy.group, copy.digest): load for load in loads for copy in load.copies}
        assert loading == self._loading, "a load is lost"

    def leave_peer(self, blocks: RequestBlocks) -> None:
        """Let another engine use the blocks again that it has kept for this request."""
        peer = blocks.lookup.peer
        if peer is not None and self._cache.peer_tier is not None:
            self._releases.append(ReleaseLease(self._cache.peer_tier, peer.lease))
        blocks.lookup.peer = None

    def take_releases(self) -> list[ReleaseLease]:
        """Messages to be sent to the workers, after those of loads."""
        releases = self._releases
        self._releases = []
        return releases

    def _has(self, peer: PeerPrefix | None, group: int, digest: bytes, hash_input: bytes) -> bool:
        return (
            self._cache.pools[group].find(digest, hash_input) is not None
            or self._find(peer, group, digest, hash_input) is not None
        )

    def _find(
        self, peer: PeerPrefix | None, group: int, digest: bytes, hash_input: bytes
    ) -> tuple[int, int] | None:
        """(tier, slot) of a block: the first tier that has it, and from which this engine loads.

        `peer`: what another engine keeps for the request.
        """
        for index, tier in enumerate(self._cache.tiers):
            if index == self._cache.shared_tier and self.questions is None:
                continue
            if (slot := tier.find(group, digest, hash_input)) is not None:
                return index, slot
            if index == self._cache.peer_tier and peer is not None:
                slot = peer.find(group, digest)
                if slot is not None:
                    return index, slot
        return None

    def _limit(self, blocks: RequestBlocks) -> int:
        """Blocks that a prefix may have: at least one token is left to compute."""
        return (len(blocks.tokens) - 1) // self._cache.block_size


def _first(spec: KVSpec, length: int) -> int:
    assert not isinstance(spec, RecurrentStateSpec)
    return first_visible_block(spec, length * spec.block_size)
