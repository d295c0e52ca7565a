"""The KV blocks of one group: which are free, how many requests use each, and which are cached.

    in use                       users > 0
    free, not cached             a stack; these are allocated first
    free, cached                 in order of their freeing; the oldest is evicted first

A cached block is found by its content until it is evicted. Every operation is O(1) for each block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

_CHECKED_AT_ONCE = 4096


class BlockPool:
    """`num_blocks` blocks with ids 0 .. num_blocks - 1; no id is reserved."""

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._users = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._hash_inputs = [b""] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._uncached = list(range(num_blocks))[::-1]  # the last one is allocated next
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._unconfirmed: dict[int, list[int]] = {}  # step in flight -> blocks cached that it writes
        self._confirmed_step = 0

    @property
    def num_free(self) -> int:
        """Blocks without a user."""
        return len(self._uncached) + len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks for one user, the least recently used ones; they leave the cache.

        Raises IndexError when fewer are free.
        """
        if count == 1 and self._uncached:
            block = self._uncached.pop()
            self._users[block] = 1
            return [block]
        if count > self.num_free:
            raise IndexError(f"{count} blocks wanted, {self.num_free} free")
        first = max(len(self._uncached) - count, 0)
        blocks = self._uncached[first:][::-1]
        del self._uncached[first:]
        for _ in range(count - len(blocks)):
            block, _ = self._evictable.popitem(last=False)
            self._drop_hash(block)
            blocks.append(block)
        for block in blocks:
            self._users[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more user for each of these cached blocks, free or not."""
        users, evictable = self._users, self._evictable
        for block in blocks:
            if not users[block]:
                del evictable[block]
            users[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One user less for each block; a block without users is free, and stays cached if it was."""
        users, digests, evictable, uncached = self._users, self._digests, self._evictable, self._uncached
        for block in blocks:
            users[block] -= 1
            if users[block]:
                continue
            if digests[block] is None:
                uncached.append(block)
            else:
                evictable[block] = None

    def is_free(self, block: int) -> bool:
        """Whether the block has no user."""
        return self._users[block] == 0

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have no user."""
        users = self._users
        return sum([not users[block] for block in blocks])

    # Prefix cache

    def cache(self, block: int, digest: bytes, hash_input: bytes, step: int) -> bool:
        """Let requests find this block by its content. `step` is the last one that writes it.

        Where an equal block is cached already, that one stays. False when the cached block of this
        digest has another content: nothing that follows in the sequence may be cached then, since
        a digest stands for all tokens up to its block.
        """
        known = self._block_of.get(digest)
        if known is not None:
            return self._hash_inputs[known] == hash_input
        self._block_of[digest] = block
        self._digests[block] = digest
        self._hash_inputs[block] = hash_input
        if step > self._confirmed_step:
            self._unconfirmed.setdefault(step, []).append(block)
        return True

    def cached_run(self, digests: Sequence[bytes], hash_inputs: Sequence[bytes]) -> int:
        """How many of these contents, from the first on, are cached without a gap."""
        block_of, known = self._block_of, self._hash_inputs
        for index, (digest, hash_input) in enumerate(zip(digests, hash_inputs, strict=True)):
            block = block_of.get(digest)
            if block is None or known[block] != hash_input:
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

    # Steps that may still fail

    def confirm(self, step: int) -> None:
        """Steps up to this one have succeeded."""
        self._confirmed_step = step
        for earlier in [one for one in self._unconfirmed if one <= step]:
            del self._unconfirmed[earlier]

    def last_unconfirmed(self, blocks: Sequence[int]) -> int:
        """The last step still to succeed that writes one of these cached blocks; 0 if there is none."""
        steps = [step for step, written in self._unconfirmed.items() if not set(written).isdisjoint(blocks)]
        return max(steps, default=0)

    def uncache_unconfirmed(self) -> None:
        """A step in flight has failed: no block that such a step writes can be trusted."""
        for block in {block for written in self._unconfirmed.values() for block in written}:
            if self._digests[block] is None:
                continue  # evicted since
            self._drop_hash(block)
            if not self._users[block]:
                del self._evictable[block]
                self._uncached.append(block)
        self._unconfirmed.clear()

    def check_integrity(self, users: dict[int, int]) -> Iterator[None]:
        """Raises AssertionError unless the lists agree with `users`, the users counted in tables.

        Yields now and then, so that the caller can do the rest later, if nothing has changed.
        """
        free = 0
        for block, count in enumerate(self._users):
            assert count == users.get(block, 0), f"block {block}: {count} users, not {users.get(block, 0)}"
            digest = self._digests[block]
            assert digest is None or self._block_of.get(digest) == block, f"block {block} cannot be found"
            assert (block in self._evictable) == (not count and digest is not None), (
                f"block {block} is evictable by mistake, or is not"
            )
            free += not count
            if block % _CHECKED_AT_ONCE == 0:
                yield
        uncached: set[int] = set()
        for start in range(0, len(self._uncached), _CHECKED_AT_ONCE):
            some = self._uncached[start : start + _CHECKED_AT_ONCE]
            assert all(not self._users[block] and self._digests[block] is None for block in some), (
                "a used or cached block is on the stack of uncached ones"
            )
            uncached.update(some)
            yield
        assert len(uncached) == len(self._uncached), "a block is free twice"
        assert self.num_free == free, f"{self.num_free} blocks are listed as free, {free} have no user"
        cached = self.num_blocks - self._digests.count(None)
        assert cached == len(self._block_of), "a digest is cached without a block"
        assert all(step > self._confirmed_step for step in self._unconfirmed), "a step is confirmed too late"

    def _drop_hash(self, block: int) -> None:
        digest = self._digests[block]
        assert digest is not None
        del self._block_of[digest]
        self._digests[block] = None
        self._hash_inputs[block] = b""
