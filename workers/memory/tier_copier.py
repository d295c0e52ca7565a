"""Copies blocks between the KV cache of one rank and its tiers, in one thread or two for each tier.

    step loop   ──CopyBlocks──▶   thread of the tier:  blocks ─▶ rows of bytes on the device ─▶ tier
                ◀──BlocksCopied──                      blocks ◀─ rows of bytes on the device ◀─ tier
                ──FindBlocks──▶ ◀──BlocksFound──       what other engines have stored in a shared tier

Loads take turns by message: one that begins while a long one is under way comes after its current message.

On a GPU the copies run on a stream of their own. Blocks come back after the steps launched before the message
came, which may still use their places; what is stored has been computed. No step waits for copies: the core
uses a block again only when its copy is confirmed.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from queue import Empty, PriorityQueue, SimpleQueue
from typing import Protocol, runtime_checkable

import torch

from atom.shared.messages.kv_peers import Lease, ReleaseLease
from atom.shared.messages.kv_tiers import BlockCopy, BlocksCopied, BlocksFound, CopyBlocks, FindBlocks
from atom.shared.messages.worker import KVSpec, stored_bytes
from workers.memory.block_rows import BlockRows

__all__ = ["KVTier", "LeasedKVTier", "SharedKVTier", "TierCopier", "staged_bytes"]

_STAGED_BYTES = 128 << 20
"""Most bytes that are copied at a time on a GPU."""
_STAGED_BYTES_CPU = 32 << 20
_STOP_S = 5.0
_LOAD, _STORE, _END = range(3)
_Job = tuple[int, int, int, CopyBlocks | FindBlocks | ReleaseLease | None, "torch.cuda.Event | None"]
"""(the kind, the turn, its place among the jobs, the message or None to end, an event before it)."""


class KVTier(Protocol):
    """Memory for blocks, in slots of each KV group. S bytes of a block; rows are on the cache's device."""

    part_bytes: int
    """Bytes that are copied at a time on a GPU, one block at least."""
    is_two_way: bool
    """Whether one thread may read while another one writes. Else all loads come before stores that wait."""

    def write(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        """Copy rows to the slots of `copies`; returns the indices of those that failed.

        May return before it is done on a GPU's current stream.
        """

    def read(self, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor) -> list[int]:
        """Copy the slots of `copies` to rows; returns the indices of those that failed.

        May return before it is done on a GPU's current stream.
        """


@runtime_checkable
class SharedKVTier(KVTier, Protocol):
    """A tier in which other engines store blocks as well."""

    def present(self, digests: bytes) -> list[bytes]:
        """For each KV group and each digest of 8 bytes: 1 if the tier has the block, else 0."""


@runtime_checkable
class LeasedKVTier(Protocol):
    """The caches of other engines: what they hold for this one can be read."""

    part_bytes: int
    is_two_way: bool

    def read_from(
        self, lease: Lease, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor
    ) -> list[int]:
        """Copy leased blocks, the slots of `copies`, to rows; returns the indices of failed ones."""

    def release(self, lease: Lease) -> None:
        """Let the other engine use the blocks again."""

    def close(self) -> None:
        """End the connections."""


Tier = KVTier | LeasedKVTier


def staged_bytes(specs: Sequence[KVSpec]) -> int:
    """Bytes on the device for the rows of one tier's copies: those both ways, and one layer's part."""
    return max(2 * _STAGED_BYTES, *(3 * stored_bytes(spec) for spec in specs))


class _Lane:
    """Jobs of one thread."""

    def __init__(self) -> None:
        self.queue: PriorityQueue[_Job] = PriorityQueue()
        self.turn = 0
        """That of the load that has begun last. The first part of a load gets the current one."""


class TierCopier:
    """The tiers of one rank. Methods are called by one thread, and do not wait."""

    def __init__(self, groups: Sequence[BlockRows], tiers: Sequence[Tier], rank: int):
        """`groups` by KV group."""
        self._rank = rank
        self._groups = groups
        self._device = groups[0].device
        self._copied: SimpleQueue[BlocksCopied | BlocksFound | Exception] = SimpleQueue()
        self._num_pending = 0
        self._places = count()
        self._loads = [_Lane() for _ in tiers]
        self._stores = [
            _Lane() if tier.is_two_way else lane for tier, lane in zip(tiers, self._loads, strict=True)
        ]
        lanes = {
            id(lane): (tier, lane)
            for each in (self._loads, self._stores)
            for tier, lane in zip(tiers, each, strict=True)
        }
        self._lanes = [lane for _, lane in lanes.values()]
        self._threads = [
            threading.Thread(target=self._run, args=each, name="kv-tier", daemon=True)
            for each in lanes.values()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether copies are under way, or done and not taken."""
        return self._num_pending > 0

    def submit(self, message: CopyBlocks | FindBlocks | ReleaseLease) -> None:
        """Begin a search, or copies, loads after the steps launched so far."""
        event = None
        if isinstance(message, ReleaseLease):  # nothing answers it
            lane = self._loads[message.tier]  # later loads do not overtake it: the peer may need the room
            lane.queue.put((_LOAD, lane.turn, next(self._places), message, None))
            return
        self._num_pending += 1
        if isinstance(message, CopyBlocks) and not message.is_load:
            self._stores[message.tier].queue.put((_STORE, 0, next(self._places), message, None))
            return
        lane = self._loads[message.tier]
        part = 0
        if isinstance(message, CopyBlocks):
            part = message.part
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
        lane.queue.put((_LOAD, lane.turn + part, next(self._places), message, event))

    def next_copied(self) -> BlocksCopied | BlocksFound | None:
        """Copies or a search that are done. Raises what a tier's thread raised."""
        try:
            done = self._copied.get_nowait()
        except Empty:
            return None
        self._num_pending -= 1
        if isinstance(done, Exception):
            raise done
        return done

    def close(self) -> None:
        """End the threads once the copies under way are done, but wait a moment only."""
        for lane in self._lanes:
            lane.queue.put((_END, 0, next(self._places), None, None))
        deadline = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    # The threads

    def _run(self, tier: Tier, lane: "_Lane") -> None:
        try:
            with torch.inference_mode(), self._on_own_stream():
                on_gpu = self._device.type == "cuda"
                staged_bytes = min(tier.part_bytes, _STAGED_BYTES) if on_gpu else _STAGED_BYTES_CPU
                num_bytes = max(staged_bytes, *(group.num_bytes for group in self._groups))
                staged = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                while True:
                    kind, turn, _, message, event = lane.queue.get()
                    if kind == _LOAD:
                        lane.turn = max(lane.turn, turn)
                    if message is None:
                        break
                    if isinstance(message, ReleaseLease):
                        assert isinstance(tier, LeasedKVTier), "a lease is of another engine"
                        tier.release(message.lease)
                        continue
                    if isinstance(message, FindBlocks):
                        assert isinstance(tier, SharedKVTier), "the core asks about tiers by content"
                        found = tier.present(message.digests)
                        self._copied.put(BlocksFound(self._rank, message.number, found))
                        continue
                    self._copied.put(self._copy(tier, message, event, staged))
        except Exception as error:  # of any kind: the step loop raises it
            self._copied.put(error)
        finally:
            if isinstance(tier, LeasedKVTier):
                tier.close()

    def _copy(
        self, tier: Tier, message: CopyBlocks, event: "torch.cuda.Event | None", staged: torch.Tensor
    ) -> BlocksCopied:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        failed: list[int] = []
        for group in range(len(self._groups)):
            indices = [index for index, copy in enumerate(message.copies) if copy.group == group]
            indices.sort(key=lambda index: message.copies[index].slot)  # neighbours are copied together
            size = self._groups[group].num_bytes
            most = len(staged) // size
            for start in range(0, len(indices), most):
                part = indices[start : start + most]
                rows_NS = staged[: len(part) * size].view(len(part), size)
                copies = [message.copies[index] for index in part]
                failed += [part[place] for place in self._copy_rows(tier, group, message, copies, rows_NS)]
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return BlocksCopied(self._rank, message.number, failed)

    def _copy_rows(
        self,
        tier: Tier,
        group: int,
        message: CopyBlocks,
        copies: Sequence[BlockCopy],
        rows_NS: torch.Tensor,
    ) -> list[int]:
        blocks = [copy.block for copy in copies]
        if isinstance(tier, LeasedKVTier):
            assert message.lease is not None, "nothing is stored in other engines"
            failed = tier.read_from(message.lease, group, copies, rows_NS)
            self._groups[group].write(blocks, rows_NS)
            return failed
        if message.is_load:
            failed = tier.read(group, copies, rows_NS)
            self._groups[group].write(blocks, rows_NS)
            return failed
        self._groups[group].read(blocks, rows_NS)
        return tier.write(group, copies, rows_NS)

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self._device)  # of this thread
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            yield
