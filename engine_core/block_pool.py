"""The KV blocks of one group: which are free, who uses them, and what the full ones hold.

The free list is doubly linked through two flat lists, so that taking the oldest block,
giving one back and pulling a cached one out of the middle are all O(1):

    sentinel <-> unknown hash_input ... <-> cached, oldest ... <-> cached, newest <-> sentinel
                 ^ take() starts here

A free block keeps its hash_input until it is taken: that is the prefix cache.
"""


class BlockPool:
    """`num_blocks` blocks with ids 0 .. num_blocks - 1; no id is reserved."""

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._users = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._hash_inputs = [b""] * num_blocks
        self._block_of: dict[bytes, int] = {}
        ring = num_blocks + 1  # the last entry is the sentinel
        self._next = [(block + 1) % ring for block in range(ring)]
        self._previous = [(block - 1) % ring for block in range(ring)]

    def allocate(self, count: int) -> list[int]:
        """The `count` free blocks that were used longest ago, for one user; their hash_input is forgotten.

        Raises IndexError when fewer are free.
        """
        if count > self.num_free:
            raise IndexError(f"{count} blocks wanted, {self.num_free} free")
        sentinel, following = self.num_blocks, self._next
        block, taken = following[sentinel], []
        for _ in range(count):
            taken.append(block)
            self._users[block] = 1
            if self._digests[block] is not None:
                self._uncache(block)
            block = following[block]
        following[sentinel], self._previous[block] = block, sentinel
        self.num_free -= count
        return taken

    def share(self, block: int) -> None:
        """One more user for a block that `find` returned, free or not."""
        if self._users[block] == 0:
            self._unlink(block)
        self._users[block] += 1

    def free(self, block: int) -> None:
        """One user fewer; the last one frees it.

        A block of unknown hash_input is reused next, one that may be hit again as late as possible.
        """
        self._users[block] -= 1
        if self._users[block] == 0:
            cached = self._digests[block] is not None
            self._link(block, self._previous[self.num_blocks] if cached else self.num_blocks)

    def is_free(self, block: int) -> bool:
        """Whether nobody uses the block."""
        return self._users[block] == 0

    def cache(self, block: int, digest: bytes, hash_input: bytes) -> bool:
        """Let `find` return this block for `hash_input`.

        An equal block that is known already stays the known one. False when another hash_input
        has the same digest: then nothing that follows in this sequence may be remembered
        either, since a digest stands for all that precedes it.
        """
        known = self._block_of.get(digest)
        if known is not None:
            return self._hash_inputs[known] == hash_input
        self._block_of[digest] = block
        self._digests[block] = digest
        self._hash_inputs[block] = hash_input
        return True

    def find(self, digest: bytes, hash_input: bytes) -> int | None:
        """A block that holds exactly `hash_input`."""
        block = self._block_of.get(digest)
        if block is None or self._hash_inputs[block] != hash_input:
            return None
        return block

    def check_integrity(self, users: dict[int, int]) -> None:
        """Raises AssertionError unless the books agree with `users`, the real users of each block."""
        for block, count in enumerate(self._users):
            assert count == users.get(block, 0), f"block {block}: {count} users, not {users.get(block, 0)}"
        free = self._free_list()
        assert len(free) == self.num_free, f"{len(free)} blocks linked as free, {self.num_free} counted"
        assert len(set(free)) == len(free), "a block is free twice"
        assert all(self._users[block] == 0 for block in free), "a used block is free"
        assert self.num_free == self._users.count(0), "an unused block is not free"
        for digest, block in self._block_of.items():
            assert self._digests[block] == digest, f"block {block} is known by a digest it does not have"
        remembered = sum(digest is not None for digest in self._digests)
        assert remembered == len(self._block_of), "a block has a digest that nobody finds"

    def _free_list(self) -> list[int]:
        free: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks and len(free) <= self.num_blocks:
            assert self._previous[self._next[block]] == block, f"the free list is torn at block {block}"
            free.append(block)
            block = self._next[block]
        return free

    def _link(self, block: int, after: int) -> None:
        following = self._next[after]
        self._next[after] = self._previous[following] = block
        self._previous[block], self._next[block] = after, following
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1

    def _uncache(self, block: int) -> None:
        digest = self._digests[block]
        assert digest is not None
        del self._block_of[digest]
        self._digests[block] = None
        self._hash_inputs[block] = b""
