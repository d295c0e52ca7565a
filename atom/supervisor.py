"""Starts, watches and ends the processes of one engine.

The tree is flat: every process is a child of the supervisor, so that it sees each death
itself and can end the rest. It knows nothing about models or HTTP.

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
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from atom.config.checkpoint import Checkpoint
from atom.config.engine import EngineConfig
from atom.config.model import ModelConfig
from atom.config.resolve import DeviceCapabilities
from atom.config.server import ServerConfig
from atom.messages.codec import Decoder, encode
from atom.messages.launch import CoreLaunch, FrontendLaunch, PrepareLaunch, WorkerLaunch
from atom.messages.supervisor import Dead, Progress, Ready, ToSupervisor
from atom.messages.worker import WorkerFailed
from atom.utils import envs
from atom.utils.exit_status import ExitStatus
from atom.utils.logger import get_logger
from atom.utils.process import spawn
from atom.utils.run_directory import RunDirectory

PREPARE_DEADLINE_S = 3600.0
START_DEADLINE_S = 3600.0
STALL_NOTICE_S = 60.0
ENGINE_STOP_S = 10.0
_POLL_S = 0.1
# How long a dying process's own words may trail its death.
_LAST_WORDS_S = 0.3
# What a core gets to tell its frontends why it ends, and a frontend to tell its clients.
_FAREWELL_S = 1.0

# Signals that no process sends itself; an abort may be its answer to another's end.
_KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)


class StartError(RuntimeError):
    """The engine cannot start, or ended; the text is one line a user can act on."""

    def __init__(self, text: str, status: int = ExitStatus.FAILURE):
        super().__init__(text)
        self.status = status
        """What the program should exit with."""


class PrepareResult(msgspec.Struct, frozen=True):
    """The line that the preparation step prints: an error, or what it found."""

    error: str = ""
    checkpoint: Checkpoint | None = None
    device: DeviceCapabilities | None = None


@dataclass
class Child:
    """One running process and what it said last."""

    name: str
    process: subprocess.Popen[bytes]
    ready: bool = False
    leaving: bool = False
    """It was told to end: that it does is no news."""

    @property
    def lives(self) -> bool:
        return self.process.poll() is None


class Supervisor:
    """Owns the run directory, the children and their status socket.

    Use as a context manager, or call `close`. `on_progress` draws the progress bars.
    """

    def __init__(self, on_progress: Callable[[Progress], None] = lambda progress: None):
        self._directory = RunDirectory()
        self.run_dir = self._directory.path
        self.details: dict[str, int | str] = {}
        """Figures that children sent with their Ready, for the banner."""
        self._children: dict[str, Child] = {}
        self._deaths: list[Dead] = []
        self._on_progress = on_progress
        self._last_sign = time.monotonic()
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
        """Turn the model into plain files in a process that ends afterwards; raises StartError."""
        model = config.model
        launch = PrepareLaunch(config, envs.ATOM_CACHE_DIR, self.endpoint("supervisor"))
        process = spawn("workers.prepare", launch, stdout=subprocess.PIPE)
        self._children["prepare"] = Child("prepare", process)
        output = self._output_of(process, f"preparing {model}")
        del self._children["prepare"]
        try:
            answer = msgspec.json.decode(output, type=PrepareResult)
        except msgspec.DecodeError:
            raise StartError(f"preparing {model} failed: {_how_it_ended(process.returncode)}") from None
        if answer.error or answer.checkpoint is None or answer.device is None:
            text = answer.error or f"preparing {model} gave no result"
            raise StartError(text, process.returncode or ExitStatus.FAILURE)
        return answer.checkpoint, answer.device

    def _output_of(self, process: subprocess.Popen[bytes], task: str) -> bytes:
        """All that a child writes until it ends; progress is shown meanwhile."""
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
        """Start the core and its workers; `wait_ready` tells when they can work."""
        workers, status = self.endpoint("workers"), self.endpoint("supervisor")
        core = CoreLaunch(config, checkpoint, self.endpoint("core"), workers, status)
        self._spawn("core", "engine_core.process", core)
        for rank in range(config.parallel.tensor_parallel_size):
            launch = WorkerLaunch(config, checkpoint, rank, workers, status, str(self.run_dir / "rendezvous"))
            self._spawn(f"worker {rank}", "workers.main", launch)

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
            self.endpoint("core"),
            self.endpoint("supervisor"),
            listener.fileno(),
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
            if now - self._last_sign > STALL_NOTICE_S:
                self._last_sign = now
                get_logger().info("still waiting for: %s", ", ".join(waiting))

    def check(self, wait_s: float = _POLL_S) -> None:
        """Take in what children say, for up to `wait_s`; raises StartError if one has ended."""
        self._receive(wait_s)
        if self._ended():
            self._receive_for(_LAST_WORDS_S)
            raise self._first_cause(self._ended())

    def lives(self, name: str) -> bool:
        """Whether the child of that name was started and has not ended."""
        child = self._children.get(name)
        return child is not None and child.lives

    def end_engine(self, cause: str) -> None:
        """End core and workers because of `cause`. A living core hands it on to its frontends first."""
        engine = [child for child in self._children.values() if child.name != "frontend"]
        for child in engine:
            child.leaving = True
        core = self._children.get("core")
        if core is not None and core.lives:
            self._tell_core(cause)
            _wait_for([core], _FAREWELL_S)
        for child in engine:
            _kill(child)

    def stop_frontend(self, timeout_s: float, hurry: Callable[[], bool]) -> None:
        """Let the frontend finish what runs, at most `timeout_s`; at once when `hurry` says so."""
        child = self._children.get("frontend")
        if child is None:
            return
        child.leaving = True
        child.process.terminate()
        deadline = time.monotonic() + timeout_s
        while child.lives and time.monotonic() < deadline and not hurry():
            self.check()
        child.process.terminate()  # a second time: it tells its clients that they are cut off
        _wait_for([child], _FAREWELL_S)
        _kill(child)

    def close(self) -> None:
        """End every child, politely first, and remove the run directory. May be called twice."""
        living = [child for child in self._children.values() if child.lives]
        for child in living:
            if not child.name.startswith("worker"):
                child.process.terminate()
        # Workers leave when the core tells them to; a core that is not up yet tells nobody.
        if any(child.name == "core" and child.ready for child in living):
            _wait_for(living, ENGINE_STOP_S)
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

    def _spawn(
        self, name: str, module: str, launch: msgspec.Struct, pass_fds: list[int] | None = None
    ) -> None:
        self._children[name] = Child(name, spawn(module, launch, pass_fds or ()))

    def _receive(self, wait_s: float) -> bool:
        if not self._socket.poll(int(wait_s * 1000)):
            return False
        self._last_sign = time.monotonic()
        match self._decoder.decode(self._socket.recv()):
            case Ready(process, detail):
                self._children[process].ready = True
                self.details.update(detail)
            case Progress() as progress:
                self._on_progress(progress)
            case Dead() as death:
                self._deaths.append(death)
        return True

    def _receive_for(self, wait_s: float) -> None:
        """Take in what comes until nothing has come for `wait_s`, at most ten times as long."""
        deadline = time.monotonic() + 10 * wait_s
        while self._receive(wait_s) and time.monotonic() < deadline:
            pass

    def _ended(self) -> list[Child]:
        """Children that ended without being told to."""
        return [child for child in self._children.values() if not (child.leaving or child.lives)]

    def _first_cause(self, ended: list[Child]) -> StartError:
        """What began it. A killed process makes its peers fail with many words; a worker, its core.

        Hence: a kill, another's words than the core's, another that crashed, the core's words, a
        bare exit status.
        """
        said = {dead.process: dead for dead in reversed(self._deaths)}
        names = [
            *(child.name for child in ended if -child.process.returncode in _KILLS),
            *(name for name in said if name != "core"),
            *(child.name for child in ended if child.name != "core" and child.process.returncode),
            *said,
            *(child.name for child in ended),
        ]
        name = names[0]
        if (dead := said.get(name)) is not None:
            return StartError(f"{name}: {dead.reason}", dead.status)
        return StartError(f"{name}: {_how_it_ended(self._children[name].process.returncode)}")

    def _tell_core(self, cause: str) -> None:
        """In the place of a worker that could not say it itself; another cause it need not know."""
        name, _, reason = cause.partition(": ")
        rank = name.removeprefix("worker ")
        if not rank.isdigit():
            self._children["core"].process.terminate()  # nobody is left whom it could tell
            return
        with self._context.socket(zmq.DEALER) as workers:
            workers.setsockopt(zmq.LINGER, int(_FAREWELL_S * 1000))
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
