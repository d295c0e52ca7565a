"""A child process that forks for each set of descriptors that its parent passes, from the parent's side."""

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from atom.shared.utils.process import spawn

__all__ = ["ForkServer"]

_PIECE = 1 << 18
_END_S = 0.5
_TRIES = 2


class ForkServer:
    """Starts the process with the first descriptors, and again after it has died. Safe in any thread."""

    def __init__(self, module: str, launch: Callable[[int], msgspec.Struct]):
        """`launch(fd)` is the launch message of `python -m module`, where `fd` is its control socket."""
        self._module = module
        self._launch = launch
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None while it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def has_ended(self, pid: int) -> bool:
        """Whether the process `pid` does not run any more; waits for its end, up to half a second.

        What it had open is closed some time before.
        """
        process = self._process
        if process is not None and process.pid == pid:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        return self.pid != pid

    def ask(
        self,
        frame: bytes,
        timeout_s: float,
        cpu_s: float,
        using: "Callable[[socket.socket], AbstractContextManager[object]]" = nullcontext,
    ) -> tuple[bytes, float]:
        """(everything that a fork answers to a frame, the seconds that it took); empty if it was ended.

        One that ends before `cpu_s`, its limit, may have been killed for what others do: another one is asked
        once. `using` is entered with each connection while it is open.

        Raises TimeoutError, and another OSError if the process that forks has ended or cannot be started.
        """
        for _ in range(_TRIES):
            started = time.monotonic()
            ours, theirs = socket.socketpair()
            with ours, theirs, using(ours):
                pid = self.pass_descriptors([theirs.fileno()])
                theirs.close()  # the fork has the only one, so that its end is noticed
                answer = exchange(ours, frame, started + timeout_s)
            took_s = time.monotonic() - started
            if not answer and self.has_ended(pid):
                raise ConnectionResetError("try again")
            if answer or took_s >= cpu_s:
                break
        return answer, took_s

    def pass_descriptors(self, descriptors: Sequence[int]) -> int:
        """Give the process copies of these; returns its id. Raises OSError if it has ended just now."""
        with self._lock:
            if self.pid is None:
                self._end()
                self._start()
            assert self._control is not None and self._process is not None
            socket.send_fds(self._control, [b"d"], list(descriptors))
            return self._process.pid

    def close(self) -> None:
        """End the process and its forks."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawn(self._module, self._launch(theirs.fileno()), pass_fds=[theirs.fileno()])
        self._control = ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process = self._control = None


def exchange(connection: socket.socket, frame: bytes, deadline: float) -> bytes:
    """Send a frame to a fork, and return everything that comes back; empty if the fork was ended.

    `deadline` is of the monotonic clock. Raises TimeoutError.
    """
    answer = []
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.sendall(frame)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(_PIECE):
            answer.append(piece)
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
    except TimeoutError:
        raise
    except OSError:
        return b""
    return b"".join(answer)
