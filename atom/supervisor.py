"""Starts, monitors and stops the processes of one engine.

All processes are direct children of the supervisor, so that it detects the death of each one
and can stop the others. It handles neither models nor HTTP.

    supervisor ─┬─ prepare    (ends once the checkpoint is plain files)
                ├─ worker 0 … tp-1
                ├─ core
                └─ frontend   (absent under the library)
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from atom.config.checkpoint import Checkpoint
from atom.config.engine import EngineConfig
from atom.config.model import ModelConfig
from atom.config.resolve import DeviceCapabilities
from atom.config.server import ServerConfig
from atom.messages.codec import Decoder, encode
from atom.messages.launch import CoreLaunch, EngineAddress, FrontendLaunch, PrepareLaunch, WorkerLaunch
from atom.messages.supervisor import Dead, Heartbeat, Progress, Ready, ToSupervisor
from atom.messages.worker import WorkerFailed
from atom.utils import envs
from atom.utils.exit_status import ExitStatus
from atom.utils.liveness import PeerMonitor
from atom.utils.logger import get_logger
from atom.utils.process import spawn
from atom.utils.rendezvous import open_rendezvous
from atom.utils.run_directory import RunDirectory

PREPARE_DEADLINE_S = 3600.0
START_DEADLINE_S = 3600.0
STALL_NOTICE_S = 60.0
ENGINE_STOP_S = 10.0
_POLL_S = 0.1
# How long the last message of a process may arrive after its end.
_FINAL_MESSAGE_S = 0.3
# Time for a core to send its frontends the cause.
_NOTIFY_S = 1.0
# Time for a frontend to send its clients error events after the second SIGTERM.
_CLIENT_ERRORS_S = 5.0

# Signals of a crash or from outside. Not SIGABRT: NCCL aborts when another rank dies.
_KILL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)


class StartError(RuntimeError):
    """The engine could not start, or has ended; the text is one line a user can act on."""

    def __init__(self, text: str, status: int = ExitStatus.FAILURE):
        super().__init__(text)
        self.status = status
        """Exit status for the program."""


class PrepareResult(msgspec.Struct, frozen=True):
    """The line that the preparation step prints: an error, or the checkpoint and the device."""

    error: str = ""
    checkpoint: Checkpoint | None = None
    device: DeviceCapabilities | None = None


@dataclass
class Child:
    """One child process."""

    name: str
    process: subprocess.Popen[bytes]
    ready: bool = False
    stopping: bool = False
    """Whether it is being stopped: its end is expected."""

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


class Supervisor:
    """Owns the run directory, the child processes and their status socket.

    Use as a context manager, or call `close`. `on_progress` receives the progress of loading.
    """

    def __init__(self, on_progress: Callable[[Progress], None] = lambda progress: None):
        self._directory = RunDirectory()
        self.run_dir = self._directory.path
        self.details: dict[str, int | str] = {}
        """Figures for the banner, from the Ready messages."""
        self.engines = [EngineAddress(0, 0, self.endpoint("core-0.0"))]
        self._children: dict[str, Child] = {}
        self._deaths: list[Dead] = []
        self._on_progress = on_progress
        self._last_received = time.monotonic()
        self._monitor: PeerMonitor | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint("supervisor"))
        self._decoder = Decoder[ToSupervisor](ToSupervisor)

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def endpoint(self, name: str) -> str:
        """The local socket called `name`, in this engine's private directory."""
        return f"ipc://{self.run_dir}/{name}"

    def prepare(self, config: ModelConfig) -> tuple[Checkpoint, DeviceCapabilities]:
        """Run the preparation step in a process of its own; raises StartError."""
        model = config.model
        launch = PrepareLaunch(config, envs.ATOM_CACHE_DIR, self.endpoint("supervisor"))
        process = spawn("workers.prepare", launch, stdout=subprocess.PIPE)
        self._children["prepare"] = Child("prepare", process)
        output = self._output_of(process, f"preparing {model}")
        del self._children["prepare"]
        try:
            result = msgspec.json.decode(output, type=PrepareResult)
        except msgspec.DecodeError:
            raise StartError(f"preparing {model} failed: {_how_it_ended(process.returncode)}") from None
        if result.error or result.checkpoint is None or result.device is None:
            text = result.error or f"preparing {model} returned no result"
            raise StartError(text, process.returncode or ExitStatus.FAILURE)
        return result.checkpoint, result.device

    def _output_of(self, process: subprocess.Popen[bytes], task: str) -> bytes:
        """Everything a child prints until it ends; its progress messages are processed meanwhile."""
        assert process.stdout is not None and process.stdin is not None
        os.set_blocking(process.stdout.fileno(), False)
        deadline = time.monotonic() + PREPARE_DEADLINE_S
        output = b""
        with process.stdout, process.stdin:
            while process.poll() is None:
                self._receive(_POLL_S)
                output += process.stdout.read() or b""
                if time.monotonic() > deadline:
                    raise StartError(f"{task} took longer than {PREPARE_DEADLINE_S:.0f} s")
            return output + (process.stdout.read() or b"")

    def start_engine(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """Start the core and its workers; `wait_ready` waits for them."""
        self._monitor = PeerMonitor(config.reliability.hang_timeout)
        workers, status = self.endpoint("workers"), self.endpoint("supervisor")
        core = CoreLaunch(config, checkpoint, self.engines[0].endpoint, workers, status)
        self._spawn("core", "engine_core.process", core)
        with open_rendezvous(config.parallel.tensor_parallel_size) as places:
            for rank, place in enumerate(places):
                launch = WorkerLaunch(config, checkpoint, rank, workers, status, place, device_index=rank)
                self._spawn(f"worker {rank}", "workers.main", launch, place.pass_fds if place else ())

    def start_frontend(
        self,
        config: EngineConfig,
        server: ServerConfig,
        checkpoint: Checkpoint,
        listener: socket.socket,
    ) -> None:
        """Start the HTTP side on a socket that is already listening."""
        launch = FrontendLaunch(
            config,
            server,
            checkpoint,
            self.engines,
            self.endpoint("supervisor"),
            listener.fileno(),
            metrics_dir=str(self.run_dir),
        )
        self._spawn("frontend", "frontend.main", launch, pass_fds=[listener.fileno()])

    def wait_ready(self, names: set[str]) -> None:
        """Wait until the named children are ready.

        Raises StartError when a child ends or the deadline passes.
        """
        deadline = time.monotonic() + START_DEADLINE_S
        while waiting := sorted(name for name in names if not self._children[name].ready):
            self.check()
            now = time.monotonic()
            if now > deadline:
                raise StartError(f"not ready after {START_DEADLINE_S:.0f} s: {', '.join(waiting)}")
            if now - self._last_received > STALL_NOTICE_S:
                self._last_received = now
                get_logger().info("still waiting for: %s", ", ".join(waiting))

    def check(self, wait_s: float = _POLL_S) -> None:
        """Process the children's messages for up to `wait_s`.

        Raises StartError if a child has ended or the core hangs.
        """
        self._receive(wait_s)
        self._check_hung()
        if self._unexpected_ends():
            self._receive_for(_FINAL_MESSAGE_S)
            raise self._root_cause(self._unexpected_ends())

    def is_alive(self, name: str) -> bool:
        """Whether the child of that name was started and has not ended."""
        child = self._children.get(name)
        return child is not None and child.is_alive

    def end_engine(self, cause: str) -> None:
        """Stop the core and its workers. A running core first sends `cause` to its frontends."""
        engine = [child for child in self._children.values() if child.name != "frontend"]
        for child in engine:
            child.stopping = True
        core = self._children.get("core")
        if core is not None and core.is_alive:
            self._send_cause_to_core(cause)
            _wait_for([core], _NOTIFY_S)
        for child in engine:
            _kill(child)

    def stop_frontend(self, timeout_s: float, hurry: Callable[[], bool]) -> None:
        """Stop the frontend after its running requests, at most `timeout_s`, or once `hurry()` is true."""
        child = self._children.get("frontend")
        if child is None:
            return
        child.stopping = True
        child.process.terminate()
        deadline = time.monotonic() + timeout_s
        while child.is_alive and time.monotonic() < deadline and not hurry():
            self.check()
        child.process.terminate()  # the second SIGTERM: it ends its running requests with errors
        _wait_for([child], _CLIENT_ERRORS_S)
        _kill(child)

    def close(self) -> None:
        """Stop every child, with SIGKILL where SIGTERM was not enough, and remove the run directory.

        May be called twice.
        """
        running = [child for child in self._children.values() if child.is_alive]
        for child in running:
            if not child.name.startswith("worker"):
                child.process.terminate()
        # The core sends Shutdown to its workers, but only once it is ready.
        if any(child.name == "core" and child.ready for child in running):
            _wait_for(running, ENGINE_STOP_S)
        for child in self._children.values():
            _kill(child)
        self._children.clear()
        if not self._context.closed:
            self._socket.close()
            self._context.term()
        self._directory.close()

    def pids(self) -> dict[str, int]:
        """Process ids of the children by name."""
        return {name: child.process.pid for name, child in self._children.items()}

    def _spawn(self, name: str, module: str, launch: msgspec.Struct, pass_fds: Sequence[int] = ()) -> None:
        self._children[name] = Child(name, spawn(module, launch, pass_fds))

    def _receive(self, wait_s: float) -> bool:
        if not self._socket.poll(int(wait_s * 1000)):
            return False
        message = self._decoder.decode(self._socket.recv())
        if not isinstance(message, Heartbeat):
            self._last_received = time.monotonic()
        match message:
            case Ready(process, detail):
                self._children[process].ready = True
                self.details.update(detail)
            case Progress() as progress:
                self._on_progress(progress)
            case Dead() as death:
                self._deaths.append(death)
            case Heartbeat(process) if self._monitor is not None:
                self._monitor.seen(process)
        return True

    def _check_hung(self) -> None:
        """Raises StartError for a hung core; a hung frontend is logged. The core monitors its workers."""
        if self._monitor is None:
            return
        while self._receive(0):  # heartbeats that came while this process was stopped or busy
            pass
        self._monitor.update()
        core = self._children.get("core")
        if core is not None and not core.stopping and (reason := self._monitor.hung("core")):
            raise StartError(reason)

    def _receive_for(self, wait_s: float) -> None:
        """Process messages until none has come for `wait_s`, at most ten times as long."""
        deadline = time.monotonic() + 10 * wait_s
        while self._receive(wait_s) and time.monotonic() < deadline:
            pass

    def _unexpected_ends(self) -> list[Child]:
        """Children that ended but were not being stopped."""
        return [child for child in self._children.values() if not (child.stopping or child.is_alive)]

    def _root_cause(self, ended: list[Child]) -> StartError:
        """The first cause. A dead process makes the others fail, which then report errors, too.

        Hence this order: a killed process, an error report other than the core's, a crashed process
        other than the core, the core's report, an exit status alone.
        """
        reports = {dead.process: dead for dead in reversed(self._deaths)}
        names = [
            *(child.name for child in ended if -child.process.returncode in _KILL_SIGNALS),
            *(name for name in reports if name != "core"),
            *(child.name for child in ended if child.name != "core" and child.process.returncode),
            *reports,
            *(child.name for child in ended),
        ]
        name = names[0]
        if (dead := reports.get(name)) is not None:
            return StartError(f"{name}: {dead.reason}", dead.status)
        return StartError(f"{name}: {_how_it_ended(self._children[name].process.returncode)}")

    def _send_cause_to_core(self, cause: str) -> None:
        """Send the WorkerFailed that a dead worker could not send; without a dead worker, stop the core."""
        name, _, reason = cause.partition(": ")
        rank = name.removeprefix("worker ")
        if not rank.isdigit():
            self._children["core"].process.terminate()
            return
        with self._context.socket(zmq.DEALER) as workers:
            workers.setsockopt(zmq.LINGER, int(_NOTIFY_S * 1000))
            workers.connect(self.endpoint("workers"))
            workers.send(encode(WorkerFailed(int(rank), reason)), zmq.DONTWAIT)


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def _wait_for(children: list[Child], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))


def _kill(child: Child) -> None:
    if child.process.poll() is None:
        child.process.kill()
    child.process.wait()
    if child.process.stdin is not None:
        with contextlib.suppress(OSError):
            child.process.stdin.close()
