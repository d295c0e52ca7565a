"""What the prefix cache has gained and lost: the source of the published KV events.

The events name a block by its digest, as an unsigned integer. They are those of one KV group: that
of full attention, without which no prefix is found, or else of the widest window that there is.
Blocks of requests with a cache salt are left out: a subscriber would take them for everyone's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from atom.shared.messages.engine import ID_BYTES
from atom.shared.messages.kv_tiers import DEVICE
from atom.shared.messages.worker import FullAttentionSpec, KVSpec

_MAX_RUN = 64
"""Blocks of one event: one of a long prompt has several."""


@dataclass(slots=True)
class Stored:
    """Consecutive blocks of one sequence that were cached."""

    parent: bytes
    """Digest of the block before them; empty for the first of a sequence."""
    digests: list[bytes]
    token_ids: list[bytes]
    """Packed int32, of each block."""
    medium: str = DEVICE
    """Where they are now: the device's cache or a KV tier."""


@dataclass(slots=True)
class Removed:
    """Blocks that are cached no more."""

    digests: list[bytes]
    medium: str = DEVICE
    """Where they were."""


@dataclass(slots=True)
class Cleared:
    """No block is cached any more."""


KVEvent = Stored | Removed | Cleared


@dataclass(slots=True)
class KVEventLog:
    """The events since the last `take`, in order; every operation is O(1)."""

    block_size: int
    _events: list[KVEvent] = field(default_factory=list)
    _listed: set[tuple[bytes, str]] = field(default_factory=set)
    """Digests of the blocks that subscribers know as cached, and where."""

    def stored(self, digest: bytes, hash_input: bytes, medium: str = DEVICE) -> None:
        """List a block that is cached now; one that was listed already is not listed twice."""
        if (digest, medium) in self._listed:
            return
        self._listed.add((digest, medium))
        id_bytes = self.block_size * ID_BYTES
        parent = hash_input[:-id_bytes]
        ids = hash_input[-id_bytes:]
        last = self._events[-1] if self._events else None
        follows = isinstance(last, Stored) and last.digests[-1] == parent and last.medium == medium
        if isinstance(last, Stored) and follows and len(last.digests) < _MAX_RUN:
            last.digests.append(digest)
            last.token_ids.append(ids)
        else:
            self._events.append(Stored(parent, [digest], [ids], medium))

    def removed(self, digest: bytes, medium: str = DEVICE) -> None:
        """List a block that is cached no more; unlisted ones are left out."""
        if (digest, medium) not in self._listed:
            return
        self._listed.remove((digest, medium))
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and last.medium == medium and len(last.digests) < _MAX_RUN:
            last.digests.append(digest)
        else:
            self._events.append(Removed([digest], medium))

    def cleared(self) -> None:
        """All blocks were uncached at once, and nothing before that matters."""
        self._listed.clear()
        self._events = [Cleared()]

    def take(self) -> list[KVEvent]:
        """The events since the last call."""
        events = self._events
        self._events = []
        return events


def listed_group(specs: Sequence[KVSpec]) -> int:
    """Index of the KV group whose blocks are listed."""
    full = [group for group, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
    if full:
        return full[0]
    windows = {group: getattr(spec, "window", 0) for group, spec in enumerate(specs)}
    return max(windows, key=lambda group: windows[group])
