"""Copies between the KV cache and tiers: those under way, and those to come."""

from dataclasses import dataclass, field

from atom.shared.config.kv_transfer import KVRole
from atom.shared.messages.kv_peers import Lease
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.kv_tiers.request_tiers import SharedStore

__all__ = ["Copied", "Freed", "Load", "Message", "OffloadPolicy", "Store", "Transfer"]


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


@dataclass(slots=True)
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
    store: SharedStore | None = None
    """That of its request, which counts it."""
    has_failed: bool = False
    """Whether a rank could not copy its part."""


@dataclass(eq=False, slots=True)
class Transfer:
    """Blocks that are copied together, by a message for each tier.

    under way    the blocks and their slots are in use
    void         so they are, but the prefix cache was reset: nothing is cached when it ends
    ended        all ranks have confirmed all messages: what did not fail is cached, here or in the tier
    """

    copies: list[Copied]
    num_messages: int = field(default=0, init=False)
    """Those that not all ranks have confirmed."""
    is_void: bool = field(default=False, init=False)
    """Whether the prefix cache was reset since."""


@dataclass(eq=False, slots=True)
class Store(Transfer):
    """Blocks that one tier gets."""


@dataclass(eq=False, slots=True)
class Load(Transfer):
    """Blocks that tiers give back for one request."""

    deadline: float
    """When requests stop to wait for it."""
    blocks: RequestBlocks
    kept: list[tuple[BlockPool, list[int]]]
    """Cached blocks of the same prefix, in use until the others are there."""
    lease: Lease | None = None
    """That of the blocks that come from another engine."""


@dataclass(eq=False, slots=True)
class Message:
    """A message to the workers that not all have confirmed."""

    transfer: Store | Load
    copies: list[Copied]
    confirmed: set[int] = field(default_factory=set)
    """Ranks."""


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
    store: SharedStore | None = None
    """That of the request, in a tier that other engines share."""

    def count(self, change: int) -> None:
        """More or fewer of its blocks are still to be stored."""
        if self.store is not None:
            self.store.num_left += change
