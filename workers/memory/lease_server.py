"""The cache of one rank for readers in other engines: where everything is, and which leases have ended.

A thread answers `AskLayout`, and collects the notifications of readers. It also makes the library's progress,
which reads over TCP need on both sides.
"""

import errno
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

import numpy as np
import zmq

from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.messages.kv_peers import LEASE_SLOTS, AskLayout, LeasesReleased, PeerLayout, TensorPlace
from atom.shared.utils.logger import RareWarning
from parallel.transfer.nixl_agent import DEVICE_MEMORY, HOST_MEMORY, NixlAgent, TransferError
from workers.memory.block_rows import BlockRows
from workers.memory.peer_tier import decode_release

__all__ = ["LeaseServer", "cache_properties"]

_POLL_MS = 2
_STOP_S = 5.0
_QUESTION_BYTES = 64
_UNREAD_ANSWERS = 8
"""Most answers of one connection that it does not read."""
_BIND_AGAIN_S = 1.0
_MOST_RELEASED = 4096


class LeaseServer:
    """Methods are called by one thread, and do not wait."""

    def __init__(
        self,
        agent: NixlAgent,
        endpoint: str,
        rank: int,
        groups: Sequence[BlockRows],
        properties: dict[str, str],
        secret: bytes,
    ):
        """`groups` by KV group; the `secret` is that of its leases. Raises TransferError.

        A port that is in use is waited for: while servers replace one another, the earlier one still has it.
        """
        self._agent = agent
        self._rank = rank
        self._released: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._words = np.zeros(LEASE_SLOTS, np.uint64)
        on_cpu = groups[0].device.type == "cpu"
        memory = HOST_MEMORY if on_cpu else DEVICE_MEMORY
        device = groups[0].device.index or 0
        regions = [region for group in groups for region in group.regions]
        agent.register(regions, memory, device)
        agent.register([(self._words.ctypes.data, self._words.nbytes)], HOST_MEMORY)
        self._layout = encode(
            PeerLayout(
                agent.description(),
                memory,
                device,
                self._words.ctypes.data,
                [group.num_blocks for group in groups],
                [[TensorPlace(*place) for place in group.places] for group in groups],
                properties,
                secret,
            )
        )
        self._decoder: Decoder[AskLayout] = Decoder(AskLayout, _QUESTION_BYTES)
        self._warning = RareWarning()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _QUESTION_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _UNREAD_ANSWERS)
        self._endpoint = endpoint
        self._bind_at = 0.0
        """When to try to bind the socket again."""
        self._is_bound = self._bind_at_start()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-leases", daemon=True)
        self._thread.start()

    def end(self, slots: Sequence[int]) -> None:
        """The leases of these slots have ended: no step has written to their blocks yet."""
        for slot in slots:
            self._words[slot] += np.uint64(1)

    def next_released(self) -> LeasesReleased | None:
        """Leases that readers need no more."""
        found: list[tuple[int, int]] = []
        try:
            while len(found) < _MOST_RELEASED:
                found.append(self._released.get_nowait())
        except Empty:
            pass
        return LeasesReleased(self._rank, found) if found else None

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join(_STOP_S)
        self._context.destroy(linger=0)

    # The thread

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(_POLL_MS):
                self._answer()
            try:
                if not self._is_bound and time.monotonic() >= self._bind_at:
                    self._is_bound = self._bind()
                messages = self._agent.poll()
            except TransferError as error:
                self._warning.log(f"the readers of KV blocks: {error}")
                self._closing.wait(1.0)
                continue
            for message in messages:
                if (lease := decode_release(message)) is not None:
                    self._released.put(lease)

    def _bind_at_start(self) -> bool:
        try:
            return self._bind()
        except TransferError:
            self._context.destroy(linger=0)
            raise

    def _bind(self) -> bool:
        """Whether the socket is bound; not while its port is in use. Raises TransferError."""
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise TransferError(
                    f"KV blocks cannot be offered at {self._endpoint}: {error.strerror}: give an address of "
                    "this host in --kv-transfer-host"
                ) from None
            self._warning.log(
                f"{self._endpoint} is in use, so that other servers cannot read this one's KV blocks yet: "
                "unless this server replaces the one that has it, stop that, or give another "
                "--kv-transfer-port"
            )
            self._bind_at = time.monotonic() + _BIND_AGAIN_S
            return False
        return True

    def _answer(self) -> None:
        frames = self._socket.recv_multipart()
        try:
            self._decoder.decode(frames[-1])
        except WireError as error:
            self._warning.log(f"a reader of KV blocks sent an {error}")
            return
        self._socket.send_multipart([*frames[:-1], self._layout])


def cache_properties(
    block_size: int, ranks: int, dtype: str, groups: Sequence[BlockRows], fingerprint: str
) -> dict[str, str]:
    """By name, what must be alike in two engines of which one reads the other's blocks.

    The `fingerprint`, if any, is that of all on which blocks depend.
    """
    layers = [layout for group in groups for layout in group.layouts]
    found = {"block size": str(block_size), "ranks": str(ranks), "dtype": dtype}
    if fingerprint:
        found["fingerprint of version, model and settings"] = fingerprint
    found["tensors"] = str(len(layers))
    return found | {f"tensor {index}": layout for index, layout in enumerate(layers)}
