"""Which KV blocks a request owns, in every group, and which of them another one may share.

A request has one table for each group; entry i holds positions i * block_size and on:

    position      0 ........ 15 | 16 ....... 31 | 32 ....... 47 | 48 ...
    full          block 7       | block 2       | block 9       | block 4
    window        (given back)  | (given back)  | block 1       | block 3

    state         slot 5

Entries behind a window stay as placeholders, so that tables are indexed alike. Their value is
0 and means nothing: block 0 is a block like any other, and no token attends that far back.
A recurrent state is one slot from the first token to the last; it comes out of a pool like blocks.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh64_digest

from atom.messages.worker import FullAttentionSpec, KVSpec, RecurrentStateSpec, SlidingWindowSpec
from engine_core.block_pool import BlockPool
from engine_core.kv_plan import covering_blocks, first_visible_block, holds_states, peak_blocks

PLACEHOLDER = 0
_SALT_MARK = bytes(8)
"""Before every salt: a root so long is never mistaken for a digest, nor for no root."""


@dataclass(slots=True)
class RequestBlocks:
    """The tables of one request, and the digests of its full blocks."""

    tables: list[list[int]]
    first_live: list[int]
    """For each group: entries of the table before this one were given back."""
    root: bytes = b""
    """Stands in the first block's hash_input where others have the digest of the block before."""
    digests: list[bytes] = field(default_factory=list)
    hash_inputs: list[bytes] = field(default_factory=list)
    """What the digests are made from: the digest of the block before, and the token ids."""
    num_cached: int = 0
    """Leading blocks that the prefix cache has been told about."""
    collided: bool = False
    """Another hash_input has one of the digests: nothing further may enter the cache."""


class KVCacheManager:
    """Block pools of all groups. Every operation covers all groups or changes nothing."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: Sequence[int],
        max_chunk: int,
        seed: int,
        enable_prefix_caching: bool = True,
    ):
        """`max_chunk` is the most tokens of one request in one step; `seed` enters every digest.

        Raises ValueError for groups of different block sizes, and for prefix caching of states.
        """
        sizes = {spec.block_size for spec in specs if not isinstance(spec, RecurrentStateSpec)}
        if len(sizes) != 1:
            raise ValueError(f"KV groups must have one common block size, not {sorted(sizes)}")
        if enable_prefix_caching and holds_states(specs):
            raise ValueError("recurrent states cannot be shared: prefix caching must be off")
        self.block_size = sizes.pop()
        self.specs = list(specs)
        self.pools = [BlockPool(blocks) for blocks in num_blocks]
        self.num_frees = 0
        """Grows whenever blocks come back; room that was missing is still missing while it stands."""
        self._max_chunk = max_chunk
        self._seed = seed & ((1 << 64) - 1)
        self._caching = enable_prefix_caching
        self._has_windows = any(isinstance(spec, SlidingWindowSpec) for spec in specs)

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used(self) -> int:
        """Blocks of all groups that some request owns."""
        return sum(pool.num_blocks - pool.num_free for pool in self.pools)

    def new_blocks(self, salt: str = "") -> RequestBlocks:
        """Empty tables for a new request; it shares blocks only under its own salt."""
        root = _SALT_MARK + salt.encode("utf-8", "surrogatepass") if salt else b""
        return RequestBlocks([[] for _ in self.specs], [0 for _ in self.specs], root)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of that length fits when it is alone."""
        return all(
            peak_blocks(spec, num_tokens, self._max_chunk) <= pool.num_blocks
            for spec, pool in zip(self.specs, self.pools, strict=True)
        )

    def admit(self, blocks: RequestBlocks, token_ids: "array[int]", may_hit: bool = True) -> int | None:
        """Give empty tables the cached beginning of `token_ids`; returns its length in tokens.

        At least one token is left to compute, and all of them unless it `may_hit` the cache.
        None, and nothing changes, when the free blocks would not hold the rest.
        """
        hits = self._longest_prefix(blocks, token_ids) if may_hit and self._caching else 0
        starts = [self._first_visible(spec, hits * self.block_size) for spec in self.specs]
        found = [
            [self._find(pool, blocks, index) for index in range(start, hits)]
            for pool, start in zip(self.pools, starts, strict=True)
        ]
        if not self._has_room(len(token_ids), hits, found):
            return None
        for pool, start, group, table in zip(self.pools, starts, found, blocks.tables, strict=True):
            for block in group:
                pool.share(block)
            table[:] = [PLACEHOLDER] * start + group
        blocks.first_live[:] = starts
        blocks.num_cached = hits
        return hits * self.block_size

    def extend(self, blocks: RequestBlocks, start: int, end: int) -> list[list[int]] | None:
        """Blocks for computing positions start .. end - 1; returns the new ones of each group, if any.

        Gives back what a window no longer sees from `start` on. None when a group lacks room.
        """
        if self._has_windows:
            self._drop_invisible(blocks, start)
        missing = [
            covering_blocks(spec, end) - len(table)
            for spec, table in zip(self.specs, blocks.tables, strict=True)
        ]
        if not any(missing):
            return []
        for pool, count in zip(self.pools, missing, strict=True):
            if count > pool.num_free:
                return None
        added = [pool.allocate(count) for pool, count in zip(self.pools, missing, strict=True)]
        for group, new in enumerate(added):
            blocks.tables[group] += new
        return added

    def cache(self, blocks: RequestBlocks, token_ids: "array[int]", num_computed: int) -> None:
        """Let others share the full blocks among the first `num_computed` tokens.

        Their computation must be certain: done, under way, or part of the batch being planned.
        """
        num_full = num_computed // self.block_size
        if not self._caching or num_full <= blocks.num_cached or blocks.collided:
            return
        self._digest(blocks, token_ids, num_full)
        for index in range(blocks.num_cached, num_full):
            digest, hash_input = blocks.digests[index], blocks.hash_inputs[index]
            for group, pool in enumerate(self.pools):
                if index < blocks.first_live[group]:
                    continue
                if not pool.cache(blocks.tables[group][index], digest, hash_input):
                    blocks.collided = True
                    return
        blocks.num_cached = num_full

    def free(self, blocks: RequestBlocks) -> None:
        """Give everything back, last blocks first: a sequence loses its cached end before its beginning."""
        for pool, table, live in zip(self.pools, blocks.tables, blocks.first_live, strict=True):
            for block in reversed(table[live:]):
                pool.free(block)
            table.clear()
        blocks.first_live[:] = [0] * len(self.specs)
        blocks.num_cached = 0
        self.num_frees += 1

    def check_integrity(self, owners: Sequence[RequestBlocks]) -> None:
        """Raises AssertionError unless the pools agree with the tables of all owners."""
        for group, pool in enumerate(self.pools):
            users: dict[int, int] = {}
            for blocks in owners:
                live = blocks.tables[group][blocks.first_live[group] :]
                assert len(set(live)) == len(live), "a table names a block twice"
                for block in live:
                    users[block] = users.get(block, 0) + 1
            pool.check_integrity(users)

    def check_covers(self, blocks: RequestBlocks, num_tokens: int) -> None:
        """Raises AssertionError unless the tables are as long as so many tokens make them."""
        for spec, table in zip(self.specs, blocks.tables, strict=True):
            assert len(table) == covering_blocks(spec, num_tokens), "a table does not fit its tokens"

    def _first_visible(self, spec: KVSpec, position: int) -> int:
        return 0 if isinstance(spec, RecurrentStateSpec) else first_visible_block(spec, position)

    def _longest_prefix(self, blocks: RequestBlocks, token_ids: "array[int]") -> int:
        """Length in blocks of the longest beginning that every group can continue from."""
        length = (len(token_ids) - 1) // self.block_size
        self._digest(blocks, token_ids, length)
        windows = []
        for spec, pool in zip(self.specs, self.pools, strict=True):
            if isinstance(spec, FullAttentionSpec):
                length = self._cached_run(pool, blocks, length)
            elif isinstance(spec, SlidingWindowSpec):
                windows.append((spec, pool))
        runs = [(spec, self._runs(pool, blocks, length)) for spec, pool in windows]
        while length and not all(
            run[length] >= length - first_visible_block(spec, length * self.block_size) for spec, run in runs
        ):
            length -= 1
        return length

    def _cached_run(self, pool: BlockPool, blocks: RequestBlocks, limit: int) -> int:
        """Leading blocks, up to `limit`, that the pool holds."""
        for index in range(limit):
            if pool.find(blocks.digests[index], blocks.hash_inputs[index]) is None:
                return index
        return limit

    def _runs(self, pool: BlockPool, blocks: RequestBlocks, length: int) -> list[int]:
        """Entry n: how many blocks right before block n the pool holds without a gap."""
        runs = [0]
        for index in range(length):
            held = pool.find(blocks.digests[index], blocks.hash_inputs[index]) is not None
            runs.append(runs[-1] + 1 if held else 0)
        return runs

    def _find(self, pool: BlockPool, blocks: RequestBlocks, index: int) -> int:
        block = pool.find(blocks.digests[index], blocks.hash_inputs[index])
        assert block is not None, "the prefix was found a moment ago"
        return block

    def _has_room(self, num_tokens: int, hits: int, found: list[list[int]]) -> bool:
        """Whether the free blocks, less the shared ones among them, hold what is to be computed."""
        rest = -(-num_tokens // self.block_size) - hits
        for spec, pool, group in zip(self.specs, self.pools, found, strict=True):
            new = min(rest, peak_blocks(spec, num_tokens, self._max_chunk) - len(group))
            if new > pool.num_free - sum(map(pool.is_free, group)):
                return False
        return True

    def _drop_invisible(self, blocks: RequestBlocks, start: int) -> None:
        for group, spec in enumerate(self.specs):
            live, visible = blocks.first_live[group], self._first_visible(spec, start)
            if visible <= live:
                continue
            table = blocks.tables[group]
            for index in range(live, visible):
                self.pools[group].free(table[index])
                table[index] = PLACEHOLDER
            blocks.first_live[group] = visible
            self.num_frees += 1

    def _digest(self, blocks: RequestBlocks, token_ids: "array[int]", num_full: int) -> None:
        """Make sure that the first `num_full` blocks have a digest."""
        size, digests = self.block_size, blocks.digests
        for index in range(len(digests), num_full):
            parent = digests[-1] if digests else blocks.root
            hash_input = parent + token_ids[index * size : (index + 1) * size].tobytes()
            blocks.hash_inputs.append(hash_input)
            digests.append(xxh64_digest(hash_input, self._seed))
