"""Messages about KV blocks that one engine reads from the cache of another: NixlConnector.

Both engines are of one server, as drawn here, or of two: then requests carry what `LeasedBlocks` has, through
clients or a router, which are not trusted. So leases are sealed (`atom.shared.utils.lease_seal`).

    engine with the prompt                      engine that generates
    core      ── Finished(LeasedBlocks) ── frontend ── AddRequest(LeasedBlocks) ──▶  core
    worker r  ◀─ AskLayout, PeerLayout: once for each life ────────────────────────  worker r
              ◀─ the library reads blocks, then the lease's word ──────────────────  ◀─ CopyBlocks ── core
              ◀─ notification: the lease is not needed any more ───────────────────  ◀─ ReleaseLease  core
    core      ◀─ LeasesReleased ── worker r

A lease keeps blocks in use until all readers have released it, or until it has lasted too long. Each rank
has a word for every lease slot, and adds one to it when a lease ends (`EndLeases`), before any step that may
write to the blocks. A reader that finds the word of its lease unchanged after it has read them has them
whole.
"""

import msgspec

__all__ = [
    "LEASE_SLOTS",
    "AskLayout",
    "EndLeases",
    "Lease",
    "LeasedBlocks",
    "LeasesReleased",
    "PeerLayout",
    "ReleaseLease",
    "TensorPlace",
]

LEASE_SLOTS = 4096
"""Most leases of an engine at a time."""


class Lease(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Names the blocks that an engine keeps for a reader."""

    address: str
    """ZMQ endpoint of the engine's first worker, without the number of the rank; another for each life."""
    slot: int
    generation: int
    """Leases of that slot that have ended before."""
    engine: str = ""
    """`engine_name` of the life that has granted it."""
    statement: bytes = b""
    """A hash of the blocks that it is for, which their reader fills in."""
    seal: bytes = b""
    """`seal` of all this."""


class LeasedBlocks(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The blocks of the beginning of a prompt, in the cache of another engine."""

    lease: Lease
    length: int
    """Blocks of the prompt's beginning."""
    content: bytes
    """`TokenIds.content` of these blocks, which is the same in all servers."""
    tables: list[bytes]
    """By KV group: packed int32, the numbers of the last blocks up to `length` that the group needs."""


class ReleaseLease(msgspec.Struct, tag=34, array_like=True, frozen=True, gc=False):
    """Core to workers: tell the engine that has granted a lease that it is not needed any more."""

    tier: int
    """Index in `AllocateKV.tiers`."""
    lease: Lease


class EndLeases(msgspec.Struct, tag=35, array_like=True, frozen=True, gc=False):
    """Core to workers: the leases in these slots have ended; later steps may write to their blocks."""

    slots: list[int]


class LeasesReleased(msgspec.Struct, tag=36, array_like=True, frozen=True, gc=False):
    """One rank's readers need these leases, given as slot and generation, no more."""

    rank: int
    leases: list[tuple[int, int]]


class AskLayout(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """Worker to the worker of the same rank in another engine, which answers with `PeerLayout`."""


class TensorPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor of the KV cache in the memory of its worker."""

    address: int
    stride: int
    """Bytes from one block to the next."""
    size: int
    """Bytes of a block that are read."""


class PeerLayout(msgspec.Struct, tag=2, array_like=True, frozen=True, gc=False):
    """What a worker needs to read blocks of another one."""

    agent: bytes
    """The transfer library's description of the worker's agent."""
    memory: str
    """The library's name of the kind of memory that has the cache."""
    device: int
    words: int
    """Address of the words of the lease slots, eight bytes each, in host memory."""
    num_blocks: list[int]
    """By KV group."""
    tensors: list[list[TensorPlace]]
    """By KV group, in the order in which a row of a block has them."""
    properties: dict[str, str]
    """By name, what must be alike in both engines."""
    secret: bytes = b""
    """With which the engine seals its leases."""
