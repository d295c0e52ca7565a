"""NIXL: memory of this process that others may read, and reads of theirs.

Below it are UCX's transports: RDMA, NVLink, shared memory, TCP (UCX_TLS). As it is opened here the library is
not thread-safe, so each call holds a lock; its calls release the GIL. It has no thread of its own, which
would spin on a core: `poll`, and the reads that wait, make progress.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from atom.shared.utils.errors import one_line

__all__ = ["DEVICE_MEMORY", "HOST_MEMORY", "NixlAgent", "PendingRead", "TransferError"]

HOST_MEMORY = "DRAM"
DEVICE_MEMORY = "VRAM"
_POLL_S = 0.0002
_PENDING = "PROC"
_DONE = "DONE"
Result = TypeVar("Result")


class TransferError(Exception):
    """A read or a connection has failed; the text is one line."""


class PendingRead:
    """A read that was not done in time. The library may write to its target until `is_over`."""

    def __init__(self, agent: "NixlAgent", handle: Any):
        self._agent = agent
        self._handle = handle

    def is_over(self) -> bool:
        """Whether the read has ended, however it has; it is freed then."""
        return self._agent.is_over(self._handle)


class NixlAgent:
    """An agent of the library. Raises TransferError where it cannot be opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.name = f"atom-{secrets.token_hex(8)}"
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            logging.getLogger("nixl").setLevel(logging.WARNING)
            settings = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = nixl_agent(self.name, settings)
        except Exception as error:  # of any kind: bindings raise their own
            raise TransferError(f"NIXL cannot be opened: {one_line(error)}") from None

    def register(self, regions: Sequence[tuple[int, int]], memory: str, device: int = 0) -> None:
        """Let addresses and bytes of this process be read, and be targets of reads. Raises TransferError."""
        places = [(address, num_bytes, device, "") for address, num_bytes in regions]
        self._call("register memory", lambda: self._agent.register_memory(places, memory))

    def description(self) -> bytes:
        """What another process needs to read from this one: addresses that were registered before."""
        found: bytes = self._call("describe this agent", self._agent.get_agent_metadata)
        return found

    def connect(self, description: bytes) -> str:
        """The name of the agent of a description. Raises TransferError for a damaged one."""
        name = self._call("connect", lambda: self._agent.add_remote_agent(description))
        return name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, peer: str) -> None:
        """Forget an agent, which may have ended. What fails then leaves nothing to do."""
        try:
            self._call("disconnect", lambda: self._agent.remove_remote_agent(peer))
        except TransferError as error:
            logging.getLogger("nixl").debug("%s", error)

    def read(
        self,
        peer: str,
        targets: tuple[NDArray[np.uint64], str],
        sources: tuple[NDArray[np.uint64], str],
        deadline: float,
    ) -> PendingRead | None:
        """Read what `sources` have to `targets`: [N, 3] addresses, bytes and devices, and the kind of memory.

        A read that is not done by the deadline (of the monotonic clock) is returned, and may still write to
        its targets. Raises TransferError for one that has failed.
        """
        handle = self._call("begin a read", lambda: self._begin(peer, targets, sources))
        try:
            state = self._call("read", lambda: self._agent.transfer(handle))
            while state == _PENDING:
                if time.monotonic() >= deadline:
                    return PendingRead(self, handle)
                time.sleep(_POLL_S)
                state = self._call("read", lambda: self._agent.check_xfer_state(handle))
        except TransferError:
            self._free(handle)
            raise
        self._free(handle)
        if state != _DONE:
            raise TransferError(f"a read has failed: {state}")
        return None

    def is_over(self, handle: Any) -> bool:
        """Whether a read has ended; it is freed then."""
        try:
            if self._call("read", lambda: self._agent.check_xfer_state(handle)) == _PENDING:
                return False
        except TransferError as error:
            logging.getLogger("nixl").debug("%s", error)
        self._free(handle)
        return True

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message, which `poll` of the peer returns. Raises TransferError."""
        self._call("notify", lambda: self._agent.send_notif(peer, message))

    def poll(self) -> list[bytes]:
        """Make progress, and return the messages that have come. Raises TransferError."""
        found: dict[str, list[bytes]] = self._call("poll", self._agent.get_new_notifs)
        return [message for messages in found.values() for message in messages]

    def _begin(
        self, peer: str, targets: tuple[NDArray[np.uint64], str], sources: tuple[NDArray[np.uint64], str]
    ) -> Any:
        agent = self._agent
        return agent.initialize_xfer(
            "READ", agent.get_xfer_descs(*targets), agent.get_xfer_descs(*sources), peer
        )

    def _free(self, handle: Any) -> None:
        try:
            self._call("free a read", lambda: self._agent.release_xfer_handle(handle))
        except TransferError as error:
            logging.getLogger("nixl").debug("%s", error)

    def _call(self, doing: str, call: Callable[[], Result]) -> Result:
        with self._lock:
            try:
                return call()
            except Exception as error:  # of any kind: bindings raise their own
                raise TransferError(f"NIXL could not {doing}: {one_line(error)}") from None
