"""One life (restart generation) of a failure domain: its processes, their reports, why it has failed."""

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from atom.shared.messages.codec import Decoder
from atom.shared.messages.supervisor import Dead, Heartbeat, Progress, Ready, ToSupervisor
from atom.shared.utils.liveness import PeerMonitor
from atom.supervisor.child import Child, kill, wait_for
from atom.supervisor.failure import Failure
from atom.supervisor.hangs import ask_for_stacks, save_stacks
from atom.supervisor.node import Node
from atom.supervisor.process import ProcessSpec, Role

START_DEADLINE_S = 3600.0
# How long the last message of a process may arrive after its end.
_FINAL_MESSAGE_S = 0.3

OnProgress = Callable[[Progress], None]


class Life:
    """Children that end together, and the socket that they report to.

    Its sockets lie in `directory`, which `close` removes: no message reaches another life.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        directory: Path,
        hang_timeout_s: float,
        on_progress: OnProgress = lambda progress: None,
        num_ready: int = 1,
    ):
        """The life is ready once `num_ready` of its processes are."""
        directory.mkdir(mode=0o700)
        self.directory = directory
        self.children: dict[str, Child] = {}
        self.reports: dict[str, Ready] = {}
        """By name of the process: its message that it is ready."""
        self.started_at = time.monotonic()
        self.ready_at = 0.0
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.endpoint("supervisor"))
        self._nodes: set[Node] = set()
        self._locations: dict[str, str] = {}  # of the children on other nodes
        self._num_ready = num_ready
        self._on_progress = on_progress
        self._deaths: list[Dead] = []
        self._monitor = PeerMonitor(hang_timeout_s)
        self._decoder = Decoder[ToSupervisor](ToSupervisor)

    def endpoint(self, name: str) -> str:
        """The local socket called `name` of this life."""
        return f"ipc://{self.directory}/{name}"

    @property
    def name(self) -> str:
        """Name of its directory, the same on every node."""
        return self.directory.name

    def spawn(self, node: Node, spec: ProcessSpec) -> None:
        """Start a child on `node`. Raises OSError."""
        self._nodes.add(node)
        if node.info.rank:
            self._locations[spec.name] = f" on node {node.info.rank} ({node.info.address})"
        process = node.spawn(self.name, spec)
        self.children[spec.name] = Child(spec.name, spec.role, process, spec.engine, spec.worker)

    @property
    def is_ready(self) -> bool:
        """Whether enough processes have reported that they are ready."""
        return len(self.reports) == self._num_ready

    @property
    def is_alive(self) -> bool:
        """Whether one of its processes has not ended."""
        return any(child.is_alive for child in self.children.values())

    @property
    def is_stopping(self) -> bool:
        """Whether one of its processes is being stopped."""
        return any(child.stopping for child in self.children.values())

    @property
    def responds(self) -> bool:
        """Whether every process responds; silence counts from the first message of a process."""
        return not self._monitor.unresponsive

    @property
    def ready_s(self) -> float:
        """How long it has been ready, in seconds."""
        return time.monotonic() - self.ready_at if self.is_ready else 0.0

    def receive(self, wait_s: float = 0.0) -> bool:
        """Process the messages that are waiting, or the first ones of the next `wait_s`."""
        received = False
        while self.socket.poll(0 if received else int(wait_s * 1000)):
            self._process(self._decoder.decode(self.socket.recv()))
            received = True
        return received

    def _process(self, message: ToSupervisor) -> None:
        match message:
            case Ready():
                self.reports[message.process] = message
                self.ready_at = time.monotonic()
                # It may stop responding before its first heartbeat arrives: its silence counts from here.
                self._monitor.seen(message.process)
            case Progress():
                self._on_progress(message)
            case Dead():
                self._deaths.append(message)
            case Heartbeat(process):
                self._monitor.seen(process)

    def failure(self) -> Failure | None:
        """The first cause, once a process has ended, hangs or is not ready in time; after `receive`."""
        self._monitor.update()
        if lost := next((node.lost for node in self._nodes if node.lost and not self.is_stopping), ""):
            return Failure(lost, lost)
        if ended := [child for child in self.children.values() if not (child.stopping or child.is_alive)]:
            self._receive_last()
            return self._first_cause(ended)
        if self.is_stopping:
            return None
        if reason := self._monitor.hung():
            return Failure(reason, reason, is_hang=True)
        if not self.is_ready and time.monotonic() - self.started_at > START_DEADLINE_S:
            names = ", ".join(child.name for child in self.children.values())
            reason = f"not ready after {START_DEADLINE_S:.0f} s: {names}"
            return Failure(reason, reason)
        return None

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal to every process but workers, whose core stops them."""
        for child in self.children.values():
            if child.is_alive and child.role is not Role.WORKER:
                child.terminate(number)

    def wait(self, timeout_s: float) -> None:
        """Wait until all processes have ended, at most `timeout_s`."""
        wait_for(self.children.values(), timeout_s)

    def keep_stacks(self, title: str) -> None:
        """Save the stacks of all processes that run, within seconds; other nodes save theirs at the end."""
        ask_for_stacks(self.children.values(), self.directory)
        save_stacks(self.directory, title, self.children.values())

    def close(self) -> None:
        """Kill what still runs, and remove the sockets."""
        kill(self.children.values())
        self.socket.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        for node in self._nodes:
            node.end_life(self.name)

    def _receive_last(self) -> None:
        """Process messages until none has come for a while, at most ten times as long."""
        deadline = time.monotonic() + 10 * _FINAL_MESSAGE_S
        while self.receive(_FINAL_MESSAGE_S) and time.monotonic() < deadline:
            pass

    def _first_cause(self, ended: list[Child]) -> Failure:
        """A dead process makes the others fail, which then report errors, too.

        Hence this order: a killed process, an error report other than a core's, a crashed process
        other than a core, a core's report, an exit status alone.
        """
        reports = {dead.process: dead for dead in reversed(self._deaths)}
        cores = {child.name for child in self.children.values() if child.role is Role.CORE}
        names = [
            *(child.name for child in ended if child.was_killed),
            *(name for name in reports if name not in cores),
            *(child.name for child in ended if child.name not in cores and child.process.returncode),
            *reports,
            *(child.name for child in ended),
        ]
        name = names[0]
        where = name + self._locations.get(name, "")
        child = self.children.get(name)
        if (dead := reports.get(name)) is not None:
            return Failure(dead.reason, f"{where}: {dead.reason}", dead.status, child, dead.is_hang)
        assert child is not None
        return Failure(child.end, f"{where}: {child.end}", child=child)
