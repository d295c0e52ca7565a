"""The master's side of the links to the other nodes.

A thread owns the socket: it admits nodes, notices lost ones, and forwards what their processes report, even
while the supervisor's main thread waits for a process to end. A process on another node looks like a child:
its reports arrive at the socket of its life, and `RemoteProcess` has the interface of `subprocess.Popen`.
"""

import contextlib
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.messages.nodes import (
    Beat,
    Deliver,
    EndLife,
    Exited,
    FromNode,
    Join,
    JoinIdentity,
    Leaving,
    NodeInfo,
    RefuseConnections,
    Refused,
    Report,
    SetEngines,
    SetState,
    Signal,
    Start,
    Stop,
    ToNode,
    Welcome,
)
from atom.shared.messages.supervisor import Engines, RestartEngines, SetServerState, WantTrial
from atom.shared.utils.endpoint import LINK_SILENCE_MS, bind
from atom.shared.utils.logger import get_logger
from atom.supervisor.identity import difference
from atom.supervisor.node import Node
from atom.supervisor.process import ProcessSpec

__all__ = ["NodeLinks", "RemoteNode", "RemoteProcess", "link_name"]

_BEAT_S = 0.25
# A node that gets a signal waits this long for the master, which may be stopping, too; then it may leave.
_LEAVE_S = 1.5
_POLL_MS = 100
_STOP_LINGER_MS = 2000
_LOST_STATUS = -signal.SIGKILL


def link_name(port: int) -> str:
    """The name of the master's endpoint, from which its key is derived."""
    return f"supervisors at {port}"


@dataclass(frozen=True)
class NodeSettings:
    """Where nodes join, and what they are compared with."""

    endpoint: str
    """Where they join."""
    nnodes: int
    identity: dict[str, str]
    """Identity of this node, to compare with theirs."""
    run_dir: Path
    """Run directory of this node; it holds the sockets of every life."""


class RemoteProcess:
    """A process of another node, with the interface of subprocess.Popen."""

    def __init__(self, send: Callable[[int], None]):
        """`send` sends the process a signal."""
        self.pid = 0
        self.returncode: int | None = None
        self._send = send
        self._ended = threading.Event()

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a process of another node", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the signal, unless the process has ended."""
        if self.returncode is None:
            self._send(number)

    def ended(self, status: int) -> None:
        """Note the exit status of the process, which has ended."""
        self.returncode = status
        self._ended.set()


class RemoteNode(Node):
    """A node that has joined, until it is lost."""

    def __init__(self, info: NodeInfo, send: Callable[[ToNode], None]):
        """`send` may be called from any thread."""
        super().__init__(info)
        self.send = send
        self.leaving_since: float | None = None
        self._processes: dict[tuple[str, str], RemoteProcess] = {}
        self._lock = threading.Lock()

    def spawn(self, life: str, spec: ProcessSpec) -> RemoteProcess:
        process = RemoteProcess(lambda number: self.send(Signal(life, spec.name, number)))
        with self._lock:
            if self.lost:
                raise OSError(self.lost)
            self._processes[life, spec.name] = process
        launch = msgspec.json.encode(spec.launch)
        self.send(Start(life, spec.name, spec.role.value, launch, list(spec.pass_fds), spec.http))
        return process

    def deliver(self, endpoint: str, frame: bytes) -> None:
        self.send(Deliver(endpoint, frame))

    def end_life(self, life: str) -> None:
        self.send(EndLife(life))

    def process_ended(self, life: str, name: str, status: int) -> None:
        """Note that a process of the node has ended."""
        with self._lock:
            if (process := self._processes.pop((life, name), None)) is not None:
                process.ended(status)

    def lose(self, reason: str) -> None:
        """Count all processes of the node, which is gone, as ended."""
        with self._lock:
            self.lost = reason
            for process in self._processes.values():
                process.ended(_LOST_STATUS)
            self._processes.clear()


class NodeLinks:
    """The other nodes. `nodes` has the latest session of each rank that has joined, and this node's own."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", settings: NodeSettings, nodes: dict[int, Node]
    ):
        """Binds at once. Raises ZMQError."""
        self.nodes = nodes
        self.wanted: deque[SetServerState | WantTrial | RestartEngines] = deque()
        """What frontends of other nodes want to change."""
        self._context = context
        self._settings = settings
        self._sessions: dict[bytes, RemoteNode] = {}
        self._reports: dict[str, zmq.Socket[bytes]] = {}  # to the lives' sockets
        self._decoder: Decoder[FromNode] = Decoder(FromNode)
        self._identity_decoder: Decoder[JoinIdentity] = Decoder(JoinIdentity)
        self._engines = Engines([])
        self._to_send: queue.SimpleQueue[tuple[bytes, ToNode]] = queue.SimpleQueue()
        self._refused: set[str] = set()
        self._is_stopping = False
        self._closing = threading.Event()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # what waits is bounded by the time until a node is lost
        bind(self._socket, settings.endpoint, LINK_SILENCE_MS)
        self._wake_out = context.socket(zmq.PAIR)
        self._wake_in = context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://to-nodes")
        self._wake_out.connect("inproc://to-nodes")
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    @property
    def missing(self) -> list[int]:
        """Ranks of the nodes that do not take part."""
        ranks = range(1, self._settings.nnodes)
        return [rank for rank in ranks if rank not in self.nodes or self.nodes[rank].lost]

    def publish(self, engines: Engines) -> None:
        """Tell all nodes which engines there are."""
        self._engines = engines
        for identity in list(self._sessions):
            self._send(identity, SetEngines(engines))

    def stop_waiting_for_leavers(self) -> None:
        """Keep nodes that were told to end until `close`, since the server is stopping."""
        self._is_stopping = True

    def close(self, reason: str = "", status: int = 0) -> None:
        """End all nodes with this status. May be called twice."""
        if self._closing.is_set():
            return
        for identity in list(self._sessions):
            self._send(identity, Stop(reason, status))
        self._closing.set()
        self._wake()
        self._thread.join()
        self._wake_out.close(0)

    def _send(self, identity: bytes, message: ToNode) -> None:
        if self._closing.is_set():
            return
        self._to_send.put((identity, message))
        self._wake()

    def _wake(self) -> None:
        # A full queue wakes the thread as well; after the end of the thread there is nothing to wake.
        with self._wake_lock, contextlib.suppress(zmq.Again):
            self._wake_out.send(b"", zmq.DONTWAIT)

    # In the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        beat_at = time.monotonic()
        while not self._closing.is_set():
            poller.poll(_POLL_MS)
            self._receive()
            self._send_waiting()
            self._let_leave()
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + _BEAT_S
                for identity in list(self._sessions):
                    self._transmit(identity, Beat())
        self._send_waiting()
        for sender in self._reports.values():
            sender.close(0)
        self._wake_in.close(0)
        self._socket.close(_STOP_LINGER_MS)

    def _receive(self) -> None:
        while self._wake_in.poll(0):
            self._wake_in.recv()
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart()
            frame = frames[0] if len(frames) == 1 else b""
            try:
                message = self._decoder.decode(frame)
            except WireError as error:
                self._refuse_frame(identity, frame, error)
                continue
            if isinstance(message, Join):
                self._admit(identity, message)
            elif (node := self._sessions.get(identity)) is not None:
                self._process(node, message)

    def _process(self, node: RemoteNode, message: FromNode) -> None:
        match message:
            case Report(life, frame):
                self._forward(life, frame)
            case Exited(life, name, status):
                node.process_ended(life, name, status)
            case SetState(state):
                self.wanted.append(SetServerState(state))
            case WantTrial() | RestartEngines():
                self.wanted.append(message)
            case Leaving():
                node.leaving_since = time.monotonic()

    def _forward(self, life: str, frame: bytes) -> None:
        """Send a report to the socket of its life, unless the life has ended."""
        if "/" in life or not (self._settings.run_dir / life).is_dir():
            return
        if (sender := self._reports.get(life)) is None:
            for ended in [each for each in self._reports if not (self._settings.run_dir / each).is_dir()]:
                self._reports.pop(ended).close(0)
            sender = self._reports[life] = self._context.socket(zmq.PUSH)
            sender.setsockopt(zmq.SNDHWM, 0)  # the main thread may not read for seconds; no report is dropped
            sender.connect(f"ipc://{self._settings.run_dir / life}/supervisor")
        sender.send(frame, zmq.DONTWAIT)

    def _admit(self, identity: bytes, join: Join) -> None:
        info = join.node
        known = self.nodes.get(info.rank)
        if not 0 < info.rank < self._settings.nnodes:
            ranks = f"--nnodes is {self._settings.nnodes} at the master, whose rank is 0"
            self._refuse(identity, f"--node-rank {info.rank}: {ranks}", is_final=True)
        elif text := difference(f"node {info.rank}", join.identity, "the master", self._settings.identity):
            self._refuse(identity, f"node {info.rank} ({info.address}) cannot join: {text}", is_final=True)
        elif known is not None and not known.lost:
            text = f"node {info.rank} has joined already, from {known.info.address}"
            self._refuse(identity, text, is_final=False)
        else:
            node = RemoteNode(info, lambda message: self._send(identity, message))
            self._sessions[identity] = node
            self._transmit(identity, Welcome())
            self._transmit(identity, SetEngines(self._engines))
            self.nodes[info.rank] = node
            get_logger().info("node %d (%s) has joined", info.rank, info.address)

    def _refuse(self, identity: bytes, reason: str, is_final: bool) -> None:
        if reason not in self._refused:
            self._refused.add(reason)
            get_logger().error("%s", reason)
        self._transmit(identity, Refused(reason, is_final))

    def _refuse_frame(self, identity: bytes, frame: bytes, error: WireError) -> None:
        """Refuse the node that sent this frame: most often its version is another, as its identity tells."""
        if (node := self._sessions.get(identity)) is not None:
            self._transmit(identity, Refused(f"node {node.info.rank} sent an {error}", is_final=True))
            self._lose(identity, f"sent an {error}")
            return
        text = ""
        with contextlib.suppress(WireError):
            theirs = self._identity_decoder.decode(frame).identity
            text = difference("it", theirs, "the master", self._settings.identity)
        self._refuse(identity, f"a node cannot join: {text or f'it sent an {error}'}", is_final=True)

    def _let_leave(self) -> None:
        for identity, node in list(self._sessions.items()):
            since = node.leaving_since
            if since is not None and not self._is_stopping and time.monotonic() - since > _LEAVE_S:
                self._transmit(identity, Stop(""))
                self._lose(identity, "was stopped")

    def _send_waiting(self) -> None:
        while True:
            try:
                identity, message = self._to_send.get_nowait()
            except queue.Empty:
                return
            if identity in self._sessions:
                self._transmit(identity, message)

    def _transmit(self, identity: bytes, message: ToNode) -> None:
        """Send; a node that cannot be reached is lost."""
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._lose(identity, "has ended, or cannot be reached any more")

    def _lose(self, identity: bytes, how: str) -> None:
        if (node := self._sessions.pop(identity, None)) is not None:
            text = f"node {node.info.rank} ({node.info.address}) {how}"
            get_logger().error("%s", text)
            node.lose(text)


class RemotePort:
    """The HTTP sockets of another node, which its supervisor opens when a frontend starts."""

    def __init__(self, nodes: Mapping[int, Node], rank: int):
        self._nodes = nodes
        self._rank = rank

    def close(self, index: int) -> None:
        """Close socket `index`."""
        node = self._nodes[self._rank]
        if isinstance(node, RemoteNode):
            node.send(RefuseConnections(index))
