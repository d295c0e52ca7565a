"""Copies between the KV cache and tiers: those under way, and those to come."""

from dataclasses import dataclass, field

from atom.shared.config.kv_transfer import KVRole
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.request_blocks import RequestBlocks

__all__ = ["Copied", "Freed", "Load", "Message", "OffloadPolicy"]


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Which blocks are stored."""

    min_tokens: int = 0
    """Least tokens of a cached sequence whose blocks are stored though none of them was hit."""
    num_ranks: int = 1
    """Workers that confirm each copy."""
    max_chunk: int = 1
    """Most tokens of one request in one step."""
    is_shared: bool = False
    """Whether other engines store blocks in the last tier, or are to find those of this one there."""
    role: KVRole = "kv_both"
    """What this engine does with the tier that others share."""


@dataclass(frozen=True, slots=True)
class Copied:
    """One block of a copy that is under way."""

    group: int
    block: int
    tier: int
    slot: int
    digest: bytes
    hash_input: bytes
    replaced: bytes = b""
    """Digest of the block to be removed from the slot."""
    is_listed: bool = False
    """Whether KV events may tell of a block that is stored."""
    owner: RequestBlocks | None = None
    """The request whose `num_storing` counts it."""


@dataclass(eq=False, slots=True)
class Load:
    """Blocks that tiers give back for one request."""

    numbers: list[int]
    """Those of its messages: one for each tier that has some of the blocks."""
    copies: list[Copied]
    deadline: float
    """When requests stop to wait for it."""
    blocks: RequestBlocks
    kept: list[tuple[BlockPool, list[int]]]
    """Cached blocks of the same prefix, in use until the others are there."""
    failed: set[int] = field(default_factory=set)
    """Indices in `copies`."""
    is_void: bool = False
    """Whether the prefix cache was reset since."""


@dataclass(eq=False, slots=True)
class Message:
    """A message to the workers that not all have confirmed."""

    tier: int
    copies: list[Copied]
    load: Load | None
    """None: the blocks are stored."""
    indices: list[int] = field(default_factory=list)
    """Those of its copies in the load."""
    confirmed: set[int] = field(default_factory=set)
    """Ranks."""
    failed: set[int] = field(default_factory=set)
    is_void: bool = False


@dataclass(slots=True)
class Freed:
    """Blocks of a request that were freed, and are stored from the last one on.

    So the first ones, without which no other is found, are used last and lost last.
    """

    digests: list[bytes]
    hash_inputs: list[bytes]
    starts: list[int]
    """For each group, the first of its blocks that was in use."""
    left: int
    """How many of them, from the first one on, are still to be stored."""
    is_salted: bool
    """Whether only requests of the same salt may use them."""
    owner: RequestBlocks | None = None
    """The request, in a tier that other engines share."""

    def count(self, change: int) -> None:
        """More or fewer of its blocks are still to be stored."""
        if self.owner is not None:
            self.owner.num_storing += change
