"""Blocks that another engine holds, read from the memory of its worker of the same rank.

    core   ──CopyBlocks with a lease──▶  library: blocks of the peer ─▶ a buffer ─▶ rows of bytes ─▶ cache
           ──ReleaseLease─────────────▶  notification to the peer

A lease that clients have carried may be forged, and is used only with the peer's seal. The peer does nothing
for a read. So the word of the lease is read after the blocks: as long as it is the lease's generation, the
peer has not let the blocks be overwritten. What fails, or is late, is missing.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from atom.shared.messages.codec import MAX_FRAME_BYTES, Decoder, WireError, encode
from atom.shared.messages.kv_peers import LEASE_SLOTS, AskLayout, Lease, PeerLayout, TensorPlace
from atom.shared.messages.kv_tiers import BlockCopy
from atom.shared.utils.errors import one_line
from atom.shared.utils.lease_seal import engine_name, is_sealed
from atom.shared.utils.logger import RareWarning
from parallel.transfer.nixl_agent import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    NixlAgent,
    PendingRead,
    TransferError,
)

__all__ = ["LeaseEndedError", "PeerTier", "decode_release", "encode_release", "rank_address"]

_BUFFER_BYTES = 32 << 20
_BUFFERS = 2
"""One more than is needed, for a read that does not end."""
_ASK_S = 2.0
_READ_S = 5.0
_PAUSE_S = 10.0
_MOST_PEERS = 64
_MOST_MET = 4096
_MOST_ASKED = 64
_RECONNECT_MS = 5000
_WORD_BYTES = 8
_TCP = "tcp://"


def rank_address(address: str, rank: int) -> str:
    """Where the worker of a rank responds, of the engine whose leases have this address."""
    if not address.startswith(_TCP):
        return f"{address}-{rank}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    layout: PeerLayout
    engine: str
    """`Lease.engine`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Memory to which one read at a time writes: rows of blocks, and then the word of their lease."""

    buffer: torch.Tensor
    word: NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class _Late:
    """A read that has not ended: the library may still write to its target."""

    address: str
    """That of the engine that is read."""
    read: PendingRead
    target: _Target


class PeerTier:
    """Reads for one rank. Only the thread of the tier uses it."""

    part_bytes = _BUFFER_BYTES
    is_two_way = False

    def __init__(
        self, agent: NixlAgent, rank: int, sizes: Sequence[int], device: torch.device, own: dict[str, str]
    ):
        """`sizes`: bytes of a block by KV group; `own`: `PeerLayout.properties` of this worker.

        Raises TransferError.
        """
        self._agent = agent
        self._rank = rank
        self._own = own
        self._memory = HOST_MEMORY if device.type == "cpu" else DEVICE_MEMORY
        self._device = device.index or 0
        size = max(_BUFFER_BYTES, *sizes)
        self._free = [
            _Target(torch.empty(size, dtype=torch.uint8, device=device), np.zeros(1, np.uint64))
            for _ in range(_BUFFERS)
        ]
        self._late: list[_Late] = []
        buffers = [(target.buffer.data_ptr(), size) for target in self._free]
        agent.register(buffers, self._memory, self._device)
        agent.register([(target.word.ctypes.data, _WORD_BYTES) for target in self._free], HOST_MEMORY)
        self._peers: dict[str, _Peer] = {}
        self._paused: dict[str, float] = {}
        """By address, until when an engine is left alone that could not be read."""
        self._met: dict[str, None] = {}
        """Addresses of engines that have responded."""
        self._no_first_until = 0.0
        """Until when no other engine is waited for that has never responded."""
        self._asked: dict[str, zmq.Socket[bytes]] = {}
        """By address, questions to such engines, the oldest first."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._decoder: Decoder[PeerLayout] = Decoder(PeerLayout)
        self._warning = RareWarning()

    def read_from(
        self, lease: Lease, group: int, copies: Sequence[BlockCopy], rows_NS: torch.Tensor
    ) -> list[int]:
        """Read the leased blocks `copy.slot` to rows of bytes; returns the indices of failed ones."""
        deadline = time.monotonic() + _READ_S
        count = 0
        try:
            peer = self._peer(lease)
            self._check_late(lease.address)
            most = self._rows_at_once(rows_NS.shape[1])
            for start in range(0, len(copies), most):
                part = copies[start : start + most]
                self._read(peer, lease, group, part, rows_NS[start : start + most], deadline)
                count += len(part)
        except TransferError as error:
            self._warning.log(f"KV blocks of another engine are computed again: {lease.address}: {error}")
            self._failed(lease, error)
        return list(range(count, len(copies)))

    def release(self, lease: Lease) -> None:
        """Tell the engine of a lease that it is not needed any more; if that fails, its deadline ends it."""
        try:
            self._agent.notify(self._peer(lease).name, encode_release(lease))
        except TransferError as error:
            self._failed(lease, error)

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    # Reading

    def _rows_at_once(self, size: int) -> int:
        return max(1, len(self._free[0].buffer) // size)

    def _check_late(self, address: str) -> None:
        """Raises _NotNowError where nothing can be read now.

        An engine that does not respond keeps the target of one read, so that others can be read meanwhile.
        """
        if self._is_late(address) or not self._free:
            raise _NotNowError("reads that began earlier have not ended")

    def _is_late(self, address: str) -> bool:
        return any(late.address == address for late in self._late)

    def _take_back(self) -> None:
        """Use the targets again of late reads that have ended."""
        ended = [late for late in self._late if late.read.is_over()]
        self._late = [late for late in self._late if late not in ended]
        self._free += [late.target for late in ended]

    def _read(
        self,
        peer: _Peer,
        lease: Lease,
        group: int,
        copies: Sequence[BlockCopy],
        rows_NS: torch.Tensor,
        deadline: float,
    ) -> None:
        target = self._free[-1]
        buffer = target.buffer
        sources = _sources(peer.layout, group, [copy.slot for copy in copies])
        targets = _targets(sources, buffer.data_ptr(), self._device)
        if int(sources[:, 1].sum()) != rows_NS.numel():
            raise TransferError("the engine has blocks of another size")
        pair = (targets, self._memory), (sources, peer.layout.memory)
        self._finish(lease.address, self._agent.read(peer.name, *pair, deadline))
        word = np.array([[peer.layout.words + lease.slot * _WORD_BYTES, _WORD_BYTES, 0]], np.uint64)
        own = np.array([[target.word.ctypes.data, _WORD_BYTES, 0]], np.uint64)
        pair = (own, HOST_MEMORY), (word, HOST_MEMORY)
        self._finish(lease.address, self._agent.read(peer.name, *pair, deadline))
        if int(target.word[0]) != lease.generation:
            raise LeaseEndedError("its engine did not hold the blocks until they were read")
        rows_NS.copy_(buffer[: rows_NS.numel()].view(rows_NS.shape))
        if rows_NS.is_cuda:
            torch.cuda.current_stream().synchronize()  # the next read writes to the buffer

    def _finish(self, address: str, late: PendingRead | None) -> None:
        """Keep the target of a late read from being used. Raises TransferError for one."""
        if late is not None:
            self._late.append(_Late(address, late, self._free.pop()))
            raise TransferError(f"a read took longer than {_READ_S:.0f} s")

    # Peers

    def _peer(self, lease: Lease) -> _Peer:
        """The worker of this rank in the engine that has granted the lease. Raises TransferError."""
        address = lease.address
        self._take_back()
        if time.monotonic() < self._paused.get(address, 0.0):
            raise TransferError("it could not be read a moment ago")
        peer = self._peers.get(address)
        if peer is None or peer.engine != lease.engine:
            peer = self._connect(address)
        if peer.engine != lease.engine:
            raise LeaseEndedError("its engine has been started again, or replaced, since it kept them")
        if not is_sealed(lease, peer.layout.secret):
            raise LeaseEndedError("its engine has not granted the lease that the request names")
        return peer

    def _connect(self, address: str) -> _Peer:
        """Ask the worker of this rank for its layout. Raises TransferError."""
        if self._is_late(address):
            raise _NotNowError("reads that began earlier have not ended")
        layout = self._first_layout(address) if address not in self._met else self._layout(address)
        known = self._peers.get(address)
        if known is not None and known.layout.secret == layout.secret:
            return known
        self._forget(address)
        self._met[address] = None
        if len(self._met) > _MOST_MET:
            del self._met[next(iter(self._met))]
        for name in sorted(self._own.keys() | layout.properties.keys()):
            own, other = self._own.get(name, "none"), layout.properties.get(name, "none")
            if own != other:
                raise TransferError(f"its KV cache has another layout: {name} is {other:.80}, here {own:.80}")
        if len(self._peers) >= _MOST_PEERS:
            self._forget(next((each for each in self._peers if not self._is_late(each)), ""))
        peer = _Peer(self._agent.connect(layout.agent), layout, engine_name(layout.secret))
        self._peers[address] = peer
        return peer

    def _layout(self, address: str) -> PeerLayout:
        return self._ask(rank_address(address, self._rank))

    def _first_layout(self, address: str) -> PeerLayout:
        """That of an engine that has never responded: clients may name many that are not there.

        A wait takes the time of others' reads. So after one that does not respond others are asked without a
        wait for some time, and a later lease finds their answers.
        """
        asked = self._asked.pop(address, None)
        if asked is not None and asked.poll(0):
            return self._answer(asked)
        if time.monotonic() >= self._no_first_until:
            if asked is not None:
                asked.close()
            try:
                return self._layout(address)
            except TransferError:
                self._no_first_until = time.monotonic() + _PAUSE_S
                raise
        if len(self._asked) >= _MOST_ASKED:
            unanswered = (each for each, socket in self._asked.items() if not socket.poll(0))
            self._asked.pop(next(unanswered, next(iter(self._asked)))).close()
        self._asked[address] = asked or self._question(rank_address(address, self._rank))
        raise _NotNowError("it was asked for the first time, without a wait, as another one did not respond")

    def _ask(self, endpoint: str) -> PeerLayout:
        socket = self._question(endpoint)
        if not socket.poll(int(_ASK_S * 1000)):
            socket.close()
            raise TransferError(f"it did not respond within {_ASK_S:.0f} s")
        return self._answer(socket)

    def _question(self, endpoint: str) -> "zmq.Socket[bytes]":
        """A socket with a question to a worker. Raises TransferError."""
        socket = None
        try:
            socket = self._context.socket(zmq.REQ)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
            socket.connect(endpoint)
            socket.send(encode(AskLayout()))
        except zmq.ZMQError as error:
            if socket is not None:
                socket.close()
            raise TransferError(one_line(error)) from None
        return socket

    def _answer(self, socket: "zmq.Socket[bytes]") -> PeerLayout:
        """The answer that has come, after which the socket is closed. Raises TransferError."""
        try:
            return self._decoder.decode(socket.recv())
        except (zmq.ZMQError, WireError) as error:
            raise TransferError(one_line(error, WireError)) from None
        finally:
            socket.close()

    def _forget(self, address: str) -> None:
        if (peer := self._peers.pop(address, None)) is not None:
            self._agent.disconnect(peer.name)

    def _failed(self, lease: Lease, error: TransferError) -> None:
        """Forget an engine, and ask it again only after a while, unless only the lease is at fault."""
        address = lease.address
        now = time.monotonic()
        if isinstance(error, LeaseEndedError | _NotNowError) or now < self._paused.get(address, 0.0):
            return  # a pause must end, however many requests come meanwhile
        # The library may still write to the target of a late read, and must tell when it does not.
        if not self._is_late(address):
            self._forget(address)
        self._paused = {each: until for each, until in self._paused.items() if until > now}
        self._paused[address] = now + _PAUSE_S


class LeaseEndedError(TransferError):
    """The engine does not hold the blocks: they may have been overwritten while they were read."""


class _NotNowError(TransferError):
    """Something else has to end first: no fault of the lease, and not always of the engine."""


def encode_release(lease: Lease) -> bytes:
    """The notification that a lease is not needed any more."""
    return b"%d %d" % (lease.slot, lease.generation)


def decode_release(message: bytes) -> tuple[int, int] | None:
    """Slot and generation; None for another message."""
    with contextlib.suppress(ValueError):
        slot, generation = map(int, message.split())
        if 0 <= slot < LEASE_SLOTS and 0 <= generation < 1 << 63:
            return slot, generation
    return None


def _sources(layout: PeerLayout, group: int, blocks: Sequence[int]) -> NDArray[np.uint64]:
    """Address, bytes and device of each tensor's part of each block, one block after another."""
    if group >= len(layout.tensors) or not all(0 <= each < layout.num_blocks[group] for each in blocks):
        raise TransferError("the engine has no such blocks")
    tensors: list[TensorPlace] = layout.tensors[group]
    found = np.empty((len(blocks), len(tensors), 3), np.uint64)
    numbers = np.array(blocks, np.uint64)
    for index, tensor in enumerate(tensors):
        found[:, index, 0] = numbers * np.uint64(tensor.stride) + np.uint64(tensor.address)
        found[:, index, 1] = tensor.size
    found[:, :, 2] = layout.device
    return found.reshape(-1, 3)


def _targets(sources: NDArray[np.uint64], address: int, device: int) -> NDArray[np.uint64]:
    """The same parts one after another from an address on."""
    ends = np.cumsum(sources[:, 1], dtype=np.uint64)
    found = sources.copy()
    found[:, 0] = ends - sources[:, 1] + np.uint64(address)
    found[:, 2] = device
    return found
