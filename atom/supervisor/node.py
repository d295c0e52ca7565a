"""The nodes of a server, as the supervisor of node 0 starts processes on them."""

from abc import ABC, abstractmethod
from pathlib import Path

import zmq

from atom.shared.messages.nodes import NodeInfo
from atom.shared.utils.endpoint import connect
from atom.shared.utils.process import spawn
from atom.supervisor.process import Process, ProcessSpec

__all__ = ["LocalNode", "Node", "deliver"]

_DELIVERY_MS = 1000


class Node(ABC):
    """A machine, or the part of one that a launch has to itself."""

    def __init__(self, info: NodeInfo):
        self.info = info
        self.lost = ""
        """Why its processes are gone, in one line; empty while it takes part."""

    @abstractmethod
    def spawn(self, life: str, spec: ProcessSpec) -> Process:
        """Start a process in a life. Raises OSError."""

    @abstractmethod
    def deliver(self, endpoint: str, frame: bytes) -> None:
        """Send a frame to a local endpoint of the node."""

    @abstractmethod
    def end_life(self, life: str) -> None:
        """End all processes of a life, and remove its sockets."""

    def endpoint(self, life: str, name: str) -> str:
        """The local socket called `name` of a life."""
        return f"ipc://{Path(self.info.run_dir) / life / name}"


class LocalNode(Node):
    """The node of this process."""

    def __init__(self, info: NodeInfo, context: "zmq.Context[zmq.Socket[bytes]]"):
        super().__init__(info)
        self._context = context

    def spawn(self, life: str, spec: ProcessSpec) -> Process:
        return spawn(spec.role.value, spec.launch, spec.pass_fds, name=spec.name)

    def deliver(self, endpoint: str, frame: bytes) -> None:
        deliver(self._context, endpoint, frame)

    def end_life(self, life: str) -> None:
        pass  # `Life.close` has done it


def deliver(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, frame: bytes) -> None:
    """Send one frame to the ROUTER at `endpoint`, within a second or not at all."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, _DELIVERY_MS)
        connect(socket, endpoint)
        socket.send(frame, zmq.DONTWAIT)
