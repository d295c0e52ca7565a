"""What one request has to do with KV tiers: what it loads before it runs, and what it stores meanwhile."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from atom.shared.messages.kv_peers import LeasedBlocks
from atom.shared.utils.lease_seal import with_statement
from engine_core.requests.token_ids import TokenIds

__all__ = ["PeerPrefix", "PrefixLookup", "SharedStore"]


class PeerPrefix:
    """The beginning of a prompt that another engine keeps in its cache for this request."""

    def __init__(self, leased: LeasedBlocks, tokens: TokenIds, block_size: int):
        """`tokens` of the request: if the blocks are of others, none is found.

        Raises ValueError for tables that are not made of numbers.
        """
        self.lease = with_statement(leased)
        self.num_noted = 0
        """Leading blocks of the request whose digests are noted."""
        self._length = leased.length
        self._tables = [array("i", table) for table in leased.tables]
        self._index_of: dict[bytes, int] = {}
        self._is_lost = False
        end = leased.length * block_size
        if end > len(tokens) or tokens.content(end) != leased.content:
            self.drop()

    @property
    def is_lost(self) -> bool:
        """Whether none of its blocks can be used."""
        return self._is_lost

    def note(self, start: int, digests: Sequence[bytes]) -> None:
        """The request's blocks from `start` on have these digests."""
        for index, digest in enumerate(digests[: max(self._length - start, 0)], start):
            self._index_of[digest] = index
        self.num_noted = max(self.num_noted, start + len(digests))

    def find(self, group: int, digest: bytes) -> int | None:
        """The number, in the other engine, of the block with this digest."""
        index = self._index_of.get(digest)
        if index is None or self._is_lost or group >= len(self._tables):
            return None
        table = self._tables[group]
        place = index - self._length + len(table)
        return table[place] if 0 <= place < len(table) else None

    def drop(self) -> None:
        """Find nothing any more: the blocks could not be read."""
        self._is_lost = True
        self._tables = []  # the request may wait for long


@dataclass(slots=True)
class PrefixLookup:
    """How much of a waiting request's prefix is in the cache or in a tier. `TierLoads` moves it on.

        looking up ──▶ asking ────┐       the workers are asked what other engines have stored from there on
          ▲   │  └───▶ loading ──┐│       blocks that the cache lacks come back
          └───│──────────────────┴┘       all is looked up again
              ▼
            admitted                      nothing more is in a tier, or it has waited often enough

    While it asks or loads, the request is held, until the deadline of the question or load at most.
    """

    num_present: int = 0
    """Leading blocks that the cache or a tier had when they were looked up; before the first miss."""
    num_asked: int = 0
    """Leading blocks up to which the workers were asked: each is asked for once."""
    num_loads: int = 0
    """Loads that the request has waited for since it was queued."""
    num_loaded: list[int] = field(default_factory=list)
    """Blocks that each tier gave back, until its first admission."""
    peer: PeerPrefix | None = None
    """What another engine keeps for the request, until it is admitted."""

    def ask(self, count: int) -> None:
        """The request waits for what the workers say of the next `count` blocks."""
        self.num_asked = self.num_present + count
        self.num_present = 0

    def wait_for_load(self) -> None:
        """The request waits for a load."""
        self.num_loads += 1
        self.num_present = 0

    def admit(self) -> None:
        """The request runs. After a preemption all is looked up again: tiers may have lost blocks."""
        self.num_loads = 0
        self.num_present = 0


@dataclass(slots=True)
class SharedStore:
    """Blocks of a request for a tier in which other engines find them."""

    is_awaited: bool = False
    """Whether another engine goes on with the request as soon as they are stored."""
    num_pushed: int = 0
    """Leading blocks that were given to the tier while the request was running."""
    num_left: int = 0
    """Blocks that are still to be stored."""
