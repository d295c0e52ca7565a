"""Messages of the KV tiers: copies of blocks between a device's cache and slower memory.

The core decides what is copied and knows where everything is; workers copy. Every rank copies its own part
of a block, and confirms it.
"""

import msgspec

from atom.shared.messages.kv_peers import Lease

__all__ = [
    "DEVICE",
    "DISK",
    "HOST_MEMORY",
    "PEER",
    "REMOTE",
    "BlockCopy",
    "BlocksCopied",
    "BlocksFound",
    "CopyBlocks",
    "FindBlocks",
    "StoredBlocks",
    "TierSlots",
]

# vLLM's words in KV events, but for the last two, for which it has none. The first is for the cache that the
# model reads, on a CPU as well.
DEVICE = "GPU"
HOST_MEMORY = "CPU"
DISK = "STORAGE"
REMOTE = "REMOTE"
PEER = "PEER"


class TierSlots(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Slots of one tier on each worker; a slot holds one block of one KV group."""

    medium: str
    """`HOST_MEMORY`, `DISK`, `REMOTE` or `PEER`: the caches of other engines, as far as leases allow."""
    num_slots: list[int]
    """By KV group; none for `PEER`."""

    @property
    def by_content(self) -> bool:
        """Whether blocks are stored under their digests and compared when they are read, and may be lost."""
        return self.medium in (DISK, REMOTE)


class StoredBlocks(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks that a tier of one rank has from an earlier start."""

    tier: int
    """Index in `AllocateKV.tiers`."""
    digests: list[bytes]
    """By KV group: 8 bytes of each block, least recently used first."""


class BlockCopy(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One block of one KV group, and its slot in a tier."""

    group: int
    block: int
    slot: int
    digest: bytes = b""
    """Digest of its content, for tiers by content; so are the fields below."""
    hash_input: bytes = b""
    """What the digest is computed from."""
    replaced: bytes = b""
    """Digest of the block that was in the slot, and is to be removed; empty if none was."""


class CopyBlocks(msgspec.Struct, tag=23, array_like=True, frozen=True, gc=False):
    """Copy blocks to a tier, or back, after the steps sent so far. No step waits for it.

    The core uses neither these blocks nor these slots until every rank has sent `BlocksCopied`.
    """

    number: int
    tier: int
    """Index in `AllocateKV.tiers`."""
    is_load: bool
    """Whether the tier is the source."""
    copies: list[BlockCopy]
    part: int = 0
    """How many messages of the same load come before this one."""
    lease: Lease | None = None
    """With the tier `PEER`: the slots are blocks of the engine that has granted it."""


class BlocksCopied(msgspec.Struct, tag=24, array_like=True, frozen=True, gc=False):
    """One rank has done `CopyBlocks`, except the copies `failed`, by index."""

    rank: int
    number: int
    failed: list[int] = []


class FindBlocks(msgspec.Struct, tag=25, array_like=True, frozen=True, gc=False):
    """Which of these blocks does a tier by content have, though its index may lack them?

    Other engines store blocks there, too. Every rank answers with `BlocksFound`.
    """

    number: int
    tier: int
    """Index in `AllocateKV.tiers`."""
    digests: bytes
    """8 bytes of each block."""


class BlocksFound(msgspec.Struct, tag=26, array_like=True, frozen=True, gc=False):
    """The answer of one rank to `FindBlocks`."""

    rank: int
    number: int
    present: list[bytes]
    """By KV group: for each digest 1 if the tier has its block, else 0."""
