"""One child process: how it is stopped, and how it ended."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from atom.shared.utils.logger import get_logger
from atom.supervisor.process import Process, Role

# Signals of a crash or from outside. Not SIGABRT: NCCL aborts when another rank dies.
_KILL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
# A process in an uninterruptible system call of a driver ends after it.
_KILL_DEADLINE_S = 10.0


@dataclass
class Child:
    """A process that was started."""

    name: str
    """Its name in messages and for people, different from that of others in its domain."""
    role: Role
    process: Process
    engine: int = 0
    """Rank of the engine that a core or a worker belongs to."""
    worker: int = 0
    """Number of a worker in its engine."""
    stopping: bool = False
    """Whether it is being stopped: its end is expected."""

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether a signal from outside, or of a crash, ended it."""
        return -(self.process.returncode or 0) in _KILL_SIGNALS

    @property
    def end(self) -> str:
        """How it ended."""
        assert self.process.returncode is not None
        return how_it_ended(self.process.returncode)

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal; its end is expected from now on."""
        self.stopping = True
        self.process.send_signal(number)


def how_it_ended(status: int) -> str:
    """The end of a process in words, from subprocess's return code."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def wait_for(children: Iterable[Child], timeout_s: float) -> None:
    """Wait until all have ended, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))


def kill(children: Iterable[Child]) -> None:
    """Kill all at once, and reap them. A child that does not end within seconds is logged and left."""
    children = list(children)
    for child in children:
        child.stopping = True
        child.process.send_signal(signal.SIGKILL)
    wait_for(children, _KILL_DEADLINE_S)
    for child in children:
        if child.is_alive:
            get_logger().error(
                "%s (process %d) does not end %.0f s after SIGKILL",
                child.name,
                child.process.pid,
                _KILL_DEADLINE_S,
            )
        if isinstance(child.process, subprocess.Popen) and child.process.stdin is not None:
            with contextlib.suppress(OSError):
                child.process.stdin.close()
