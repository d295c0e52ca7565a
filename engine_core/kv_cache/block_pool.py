"""The KV blocks of one group: which are free, how many requests use each, and which are cached.

    in use                       reference count > 0
    free, not cached             a stack; these are allocated first
    free, cached                 in order of their freeing; the oldest is evicted first

A cached block is found by its content until it is evicted. Every operation is O(1) for each block.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine_core.requests.recent import Recent

_MAX_EVICTED = 1 << 15
CHECKED_AT_ONCE = 4096
"""Blocks in one slice of an integrity check: about a millisecond."""


class BlockPool:
    """`num_blocks` blocks with ids 0 .. num_blocks - 1; no id is reserved."""

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._hash_inputs = [b""] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._uncached = list(range(num_blocks))[::-1]  # the last one is allocated next
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._evicted: Recent[bool] = Recent(min(num_blocks, _MAX_EVICTED))
        self.on_uncached: Callable[[bytes], None] | None = None
        """Called with the digest of each block that is cached no more, except by `reset`."""
        self._unconfirmed: dict[int, list[int]] = {}  # step in flight -> cached blocks that it writes
        self._confirmed_step = 0

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        return len(self._uncached) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Free blocks that are cached."""
        return len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Cached blocks, free or not."""
        return len(self._block_of)

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks for one request; of the cached ones, the least recently used are evicted.

        Raises IndexError when fewer are free.
        """
        if count == 1 and self._uncached:
            block = self._uncached.pop()
            self._ref_counts[block] = 1
            return [block]
        if count > self.num_free:
            raise IndexError(f"{count} blocks wanted, {self.num_free} free")
        # Blocks without cached content first: an eviction may cost a later request its prefix.
        first = max(len(self._uncached) - count, 0)
        blocks = self._uncached[first:][::-1]
        del self._uncached[first:]
        for _ in range(count - len(blocks)):
            block, _ = self._evictable.popitem(last=False)
            self._evicted.put(self._drop_hash(block), True)
            blocks.append(block)
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Increment the reference counts of these cached blocks, free or not."""
        ref_counts = self._ref_counts
        evictable = self._evictable
        for block in blocks:
            if not ref_counts[block]:
                del evictable[block]
            ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Decrement the reference counts; at 0 a block is free, and remains cached if it was."""
        ref_counts = self._ref_counts
        digests = self._digests
        evictable = self._evictable
        uncached = self._uncached
        for block in blocks:
            ref_counts[block] -= 1
            if ref_counts[block]:
                continue
            if digests[block] is None:
                uncached.append(block)
            else:
                evictable[block] = None

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free."""
        ref_counts = self._ref_counts
        return sum([not ref_counts[block] for block in blocks])

    # Prefix cache

    def cache(self, block: int, digest: bytes, hash_input: bytes, step: int) -> bool:
        """Add a block to the prefix cache; `step` is the last step that writes it.

        An equal block that is already cached remains instead. False on a hash collision: the later
        blocks of the sequence must not be cached then, since their digests include this one.
        """
        cached = self._block_of.get(digest)
        if cached is not None:
            return self._hash_inputs[cached] == hash_input
        self._block_of[digest] = block
        self._digests[block] = digest
        self._hash_inputs[block] = hash_input
        if step > self._confirmed_step:
            self._unconfirmed.setdefault(step, []).append(block)
        return True

    def cached_run(self, digests: Sequence[bytes], hash_inputs: Sequence[bytes]) -> int:
        """How many blocks of these contents are cached, from the first on and without a gap."""
        block_of = self._block_of
        cached_inputs = self._hash_inputs
        for index, (digest, hash_input) in enumerate(zip(digests, hash_inputs, strict=True)):
            block = block_of.get(digest)
            if block is None or cached_inputs[block] != hash_input:
                return index
        return len(digests)

    def find(self, digest: bytes, hash_input: bytes) -> int | None:
        """The cached block with exactly this content."""
        block = self._block_of.get(digest)
        if block is None or self._hash_inputs[block] != hash_input:
            return None
        return block

    def blocks_of(self, digests: Iterable[bytes]) -> list[int]:
        """The cached blocks of these digests; raises KeyError if one is not cached."""
        return list(map(self._block_of.__getitem__, digests))

    def was_evicted(self, digest: bytes) -> bool:
        """Whether a block of this digest was evicted lately."""
        return self._evicted.get(digest) is not None

    def reset(self) -> int:
        """Uncache all blocks; returns how many there were."""
        count = len(self._block_of)
        self._block_of = {}
        self._digests = [None] * self.num_blocks
        self._hash_inputs = [b""] * self.num_blocks
        self._uncached += self._evictable
        self._evictable.clear()
        self._unconfirmed.clear()
        return count

    # Cached blocks of steps in flight, which may still fail

    def confirm(self, step: int) -> None:
        """Count blocks written by steps up to this one as valid: these steps have succeeded."""
        self._confirmed_step = step
        for earlier in [number for number in self._unconfirmed if number <= step]:
            del self._unconfirmed[earlier]

    def last_unconfirmed(self, blocks: Sequence[int]) -> int:
        """The last unconfirmed step that writes one of these cached blocks; 0 if there is none."""
        steps = [step for step, written in self._unconfirmed.items() if not set(written).isdisjoint(blocks)]
        return max(steps, default=0)

    def is_confirmed(self, block: int) -> bool:
        """Whether no step in flight writes this cached block."""
        return not any(block in written for written in self._unconfirmed.values())

    def uncache_unconfirmed(self) -> None:
        """Uncache the blocks that steps in flight write, after one of these has failed."""
        for block in {block for written in self._unconfirmed.values() for block in written}:
            self.uncache(block)
        self._unconfirmed.clear()

    def uncache(self, block: int) -> None:
        """Remove a block from the prefix cache, if it is there."""
        if self._digests[block] is None:
            return
        self._drop_hash(block)
        if not self._ref_counts[block]:
            del self._evictable[block]
            self._uncached.append(block)

    def check_integrity(self, users: Sequence[int]) -> Iterator[None]:
        """Raises AssertionError unless the lists match `users`, the uses of each block in block tables.

        Yields at intervals; the caller may do the rest later, if nothing has changed.
        """
        free = 0
        for block, count in enumerate(self._ref_counts):
            assert count == users[block], f"block {block}: {count} uses, not {users[block]}"
            digest = self._digests[block]
            assert digest is None or self._block_of.get(digest) == block, f"block {block} cannot be found"
            assert (block in self._evictable) == (not count and digest is not None), (
                f"block {block} is evictable by mistake, or is not"
            )
            free += not count
            if block % CHECKED_AT_ONCE == 0:
                yield
        is_uncached = bytearray(self.num_blocks)
        for start in range(0, len(self._uncached), CHECKED_AT_ONCE):
            for block in self._uncached[start : start + CHECKED_AT_ONCE]:
                assert not self._ref_counts[block] and self._digests[block] is None, (
                    "a used or cached block is on the stack of uncached ones"
                )
                assert not is_uncached[block], "a block is free twice"
                is_uncached[block] = True
            yield
        assert self.num_free == free, f"{self.num_free} blocks are listed as free, {free} are in no table"
        cached = self.num_blocks - self._digests.count(None)
        assert cached == len(self._block_of), "a digest is cached without a block"
        assert all(step > self._confirmed_step for step in self._unconfirmed), "a step is confirmed too late"

    def _drop_hash(self, block: int) -> bytes:
        """Uncache a block; returns its digest."""
        digest = self._digests[block]
        assert digest is not None
        del self._block_of[digest]
        self._digests[block] = None
        self._hash_inputs[block] = b""
        if self.on_uncached is not None:
            self.on_uncached(digest)
        return digest
