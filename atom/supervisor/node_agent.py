"""The supervisor of a node other than 0: it joins the master, and runs the processes that the master starts.

The agent makes no decisions: it forwards the reports of its processes to the master, and carries out the
master's messages. When the link ends, the agent ends all processes and joins again.
"""

import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from msgspec.structs import replace
from zmq.utils.monitor import recv_monitor_message

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.launch import CoreLaunch, FrontendLaunch, WorkerLaunch
from atom.shared.messages.nodes import (
    Beat,
    Deliver,
    EndLife,
    Exited,
    FromNode,
    Join,
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
from atom.shared.messages.supervisor import Engines, SetServerState
from atom.shared.utils.endpoint import LINK_SILENCE_MS, connect
from atom.shared.utils.logger import get_logger, set_log_level
from atom.shared.utils.net import ListenPort
from atom.shared.utils.process import spawn
from atom.supervisor.child import Child, kill
from atom.supervisor.control import Control
from atom.supervisor.failure import StartError
from atom.supervisor.hangs import save_stacks
from atom.supervisor.node import deliver
from atom.supervisor.node_placement import NodePlacement
from atom.supervisor.process import Process, Role

__all__ = ["NodeAgent"]

_LAUNCHES: dict[Role, type[msgspec.Struct]] = {
    Role.CORE: CoreLaunch,
    Role.WORKER: WorkerLaunch,
    Role.FRONTEND: FrontendLaunch,
}
_POLL_MS = 50
_NOTICE_S = 10.0
_RETRY_S = 1.0
_ANSWER_S = 5.0
# How long the last messages of a process may arrive after its end.
_FINAL_MESSAGE_S = 0.1


@dataclass
class _Life:
    """The processes of a life on this node, and the socket that they report to."""

    directory: Path
    socket: "zmq.Socket[bytes]"
    children: dict[str, Child] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    """By name: when a process ended whose end is not reported yet."""


class NodeAgent:
    """The agent of one node, from its first join to Stop."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        info: NodeInfo,
        node: NodePlacement,
        identity: dict[str, str],
        http: ListenPort | None = None,
        admin: socket.socket | None = None,
    ):
        """`http` are the sockets of this node's frontends, None if it has none; `admin` is for the first."""
        self._context = context
        self._node = node
        self._join = Join(identity, info)
        self._run_dir = Path(info.run_dir)
        self._fds = {port.fd for port in info.ports.values()}
        self._http = http
        self._admin = admin
        self._started_at = time.monotonic()
        self._engines = Engines([])
        self._lives: dict[str, _Life] = {}
        self._decoder: Decoder[ToNode] = Decoder(ToNode)
        self._stop: Stop | None = None
        self._leave_by: float | None = None
        self._control = None if http is None else Control(context, f"ipc://{self._run_dir}/control")

    def run(self, stops: Callable[[], int], drain_s: float, on_turn: Callable[[bool], None]) -> None:
        """Serve until Stop, or until `stops()`, the number of signals, asks for the end.

        After a first signal the master may take `drain_s` to let its requests finish. `on_turn` is called
        several times a second with whether the node has joined. Raises StartError when it cannot join within
        the join timeout, or the master has failed.
        """
        self._on_turn = on_turn
        try:
            while self._stop is None and not stops():
                self._join_master(stops)
                if not stops():
                    self._serve(stops, drain_s)
                self._end_all()
        finally:
            self._end_all()
            if self._control is not None:
                self._control.close()
        if self._stop is not None and self._stop.reason:
            raise StartError(f"the master has ended: {self._stop.reason}", self._stop.status)

    # Join

    def _join_master(self, stops: Callable[[], int]) -> None:
        """Return once the master has sent Welcome, or after a signal."""
        node = self._node
        begun = time.monotonic()
        notice_at = 0.0
        problem = ""
        while not stops():
            passed = time.monotonic() - begun
            if passed > node.join_timeout:
                waited = f"node {node.rank} waited {passed:.0f} s for the master at {node.master}"
                raise StartError(f"{waited}: {problem or 'no response'}")
            if passed >= notice_at:
                left = node.join_timeout - passed
                get_logger().info(
                    "node %d (%s) joins the master at %s (%.0f s)%s",
                    node.rank,
                    node.address,
                    node.master,
                    left,
                    f": {problem}" if problem else "",
                )
                notice_at = passed + _NOTICE_S
            if not (problem := self._try_join(stops)):
                get_logger().info("node %d has joined the master at %s", node.rank, node.master)
                return
            self._on_turn(False)
            time.sleep(_RETRY_S)

    def _try_join(self, stops: Callable[[], int]) -> str:
        """Open a connection and send Join; returns why the master has not accepted it, or an empty text."""
        self._node = self._node.located()
        self._link = self._context.socket(zmq.DEALER)
        self._link.setsockopt(zmq.LINGER, 1000)
        self._link.setsockopt(zmq.SNDHWM, 0)  # what waits is bounded by the time until the link has ended
        self._monitor = self._link.get_monitor_socket()
        connect(self._link, self._node.endpoint(), LINK_SILENCE_MS)
        self._link.send(encode(self._join), zmq.DONTWAIT)
        deadline = time.monotonic() + _ANSWER_S
        problem = "nothing listens there, or a firewall is between"
        while time.monotonic() < deadline and not stops():
            if self._link.poll(_POLL_MS):
                match message := self._decoder.decode(self._link.recv()):
                    case Welcome():
                        return ""
                    case Refused(reason, is_final):
                        self._close_link()
                        if is_final:
                            raise StartError(reason)
                        return reason
                    case _:
                        problem = f"it sent {type(message).__name__} first"
                        break
            for event in self._events():
                if event == zmq.EVENT_CONNECTED:
                    problem = "it does not respond"
                elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                    problem = "it refuses the connection: is the cluster secret the same on all nodes?"
                    deadline = time.monotonic()
        self._close_link()
        return problem

    def _events(self) -> list[int]:
        """What has happened to the connection since the last call."""
        found = []
        while self._monitor.poll(0):
            found.append(int(recv_monitor_message(self._monitor)["event"]))
        return found

    def _close_link(self) -> None:
        self._link.disable_monitor()
        self._monitor.close(0)
        self._link.close()

    # Work

    def _serve(self, stops: Callable[[], int], drain_s: float) -> None:
        """Run until Stop, the end of the link, or a while after a signal."""
        poller = zmq.Poller()
        try:
            while self._stop is None:
                for each in (self._link, self._monitor):
                    poller.register(each, zmq.POLLIN)
                for life in self._lives.values():
                    poller.register(life.socket, zmq.POLLIN)
                poller.poll(_POLL_MS)
                for life in self._lives.values():
                    poller.unregister(life.socket)
                self._on_turn(True)
                is_lost = zmq.EVENT_DISCONNECTED in self._events()
                while self._stop is None and self._link.poll(0):  # also what came before the end of the link
                    self._process(self._decoder.decode(self._link.recv()))
                if is_lost and self._stop is None:
                    get_logger().error("the link to the master at %s has ended", self._node.master)
                    return
                self._report()
                if stops() and self._has_left(stops(), drain_s):
                    return
        finally:
            self._close_link()

    def _has_left(self, stops: int, drain_s: float) -> bool:
        """Ask the master to let this node leave; returns whether the master has had its time."""
        if self._leave_by is None:
            self._leave_by = time.monotonic() + drain_s
            get_logger().info("stopping: the master is told")
            self._send(Leaving())
        return stops > 1 or time.monotonic() > self._leave_by

    def _send(self, message: FromNode) -> None:
        self._link.send(encode(message), zmq.DONTWAIT)

    def _process(self, message: ToNode) -> None:
        match message:
            case Start():
                self._start(message)
            case Signal(life, process, number):
                self._signal(life, process, number)
            case EndLife(name):
                self._end(name)
            case Deliver(endpoint, frame) if endpoint.startswith(f"ipc://{self._run_dir}/"):
                deliver(self._context, endpoint, frame)
            case RefuseConnections(index) if self._http is not None:
                self._http.close(index)
            case SetEngines(engines):
                self._engines = engines
                set_log_level(engines.state.log_level)
                if self._control is not None:
                    self._control.publish(engines)
            case Stop():
                self._stop = message
            case Beat():
                pass
            case Refused(reason):
                raise StartError(reason)
            case _:
                raise StartError(f"the master sent an unexpected {type(message).__name__}")

    def _start(self, message: Start) -> None:
        """Start a process; for one that cannot be started, report its end."""
        try:
            life = self._lives.get(message.life) or self._open(message.life)
            role = Role(message.module)
            life.children[message.process] = Child(message.process, role, self._spawn(message, role))
        except (OSError, ValueError, zmq.ZMQError) as error:
            get_logger().error("%s cannot be started: %s", message.process, error)
            self._send(Exited(message.life, message.process, 1))

    def _open(self, name: str) -> _Life:
        if "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} is no name of a life")
        directory = self._run_dir / name
        directory.mkdir(mode=0o700)
        reports = self._context.socket(zmq.PULL)
        reports.setsockopt(zmq.LINGER, 0)
        reports.bind(f"ipc://{directory}/supervisor")
        self._lives[name] = _Life(directory, reports)
        return self._lives[name]

    def _spawn(self, message: Start, role: Role) -> Process:
        kind = _LAUNCHES.get(role)
        if kind is None or not self._fds.issuperset(message.pass_fds):
            raise ValueError(f"the master asks for {message.module} with descriptors {message.pass_fds}")
        launch = msgspec.json.decode(message.launch, type=kind)
        passed = list(message.pass_fds)
        if isinstance(launch, FrontendLaunch):
            launch, passed = self._frontend(launch, message.http)
        return spawn(message.module, launch, passed, name=message.process)

    def _frontend(self, launch: FrontendLaunch, http: int | None) -> tuple[FrontendLaunch, list[int]]:
        """The launch message with the sockets and the clock of this host."""
        if self._http is None or http is None:
            raise ValueError("this node has no HTTP port: it was started without --frontend-per-node")
        first = launch.index - http
        others = {first + index: fd for index, fd in self._http.descriptors_without(http).items()}
        passed = [self._http.open(http).fileno(), *others.values()]
        admin_fd = self._admin.fileno() if self._admin is not None and http == 0 else None
        passed += [] if admin_fd is None else [admin_fd]
        launch = replace(
            launch, listen_fd=passed[0], admin_fd=admin_fd, started_at=self._started_at, other_fds=others
        )
        return launch, passed

    def _signal(self, life: str, process: str, number: int) -> None:
        child = self._lives[life].children.get(process) if life in self._lives else None
        if child is None or not child.is_alive:
            return
        child.process.send_signal(signal.Signals(number))

    def _report(self) -> None:
        """Forward what the processes have sent, then report which of them have ended."""
        for name, life in self._lives.items():
            while life.socket.poll(0):
                self._send(Report(name, life.socket.recv()))
            for process in [each for each, child in life.children.items() if not child.is_alive]:
                self._report_end(name, life, process)
        if self._control is not None:
            for wanted in self._control.receive(self._engines):
                self._send(SetState(wanted.state) if isinstance(wanted, SetServerState) else wanted)

    def _report_end(self, name: str, life: _Life, process: str) -> None:
        """Send Exited once, with a delay while last messages of the process may be on their way."""
        status = life.children[process].process.returncode
        assert status is not None
        ended_at = life.ended_at.setdefault(process, time.monotonic())
        if status < 0 or time.monotonic() - ended_at > _FINAL_MESSAGE_S:
            del life.children[process]
            self._send(Exited(name, process, status))

    # End

    def _end(self, name: str) -> None:
        if (life := self._lives.pop(name, None)) is not None:
            save_stacks(life.directory, f"{name}, on node {self._node.rank}", life.children.values())
            kill(life.children.values())
            life.socket.close()
            shutil.rmtree(life.directory, ignore_errors=True)

    def _end_all(self) -> None:
        """End all processes."""
        kill([child for life in self._lives.values() for child in life.children.values()])
        for name in list(self._lives):
            self._end(name)
