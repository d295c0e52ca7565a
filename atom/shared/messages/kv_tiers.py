"""Messages of the KV tiers: copies of blocks between a device's cache and slower memory.

The core decides what is copied and knows where everything is; workers copy. Every rank copies its own part
of a block, and confirms it.
"""

import msgspec

__all__ = ["HOST_MEMORY", "BlockCopy", "BlocksCopied", "CopyBlocks", "TierSlots"]

HOST_MEMORY = "CPU"
"""vLLM's word, in KV events, for memory of the host."""


class TierSlots(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Slots of one tier on each worker; a slot holds one block of one KV group."""

    medium: str
    """As KV events name it: CPU for host memory."""
    num_slots: list[int]
    """By KV group."""


class BlockCopy(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One block of one KV group, and its slot in a tier."""

    group: int
    block: int
    slot: int


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


class BlocksCopied(msgspec.Struct, tag=24, array_like=True, frozen=True, gc=False):
    """One rank has done `CopyBlocks`, except the copies `failed`, by index."""

    rank: int
    number: int
    failed: list[int] = []
