"""A process that has loaded its libraries, and forks itself for each piece of work.

    parent -> control socket: file descriptors, the first of them a new socket, for each piece
    fork   <- that socket: what its module says

So a piece can crash, hang or exhaust nothing but its fork: the kernel ends it by its limits on time and
memory. A fork has 4 MiB of its own, besides its work.
"""

import array
import ctypes
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_MAX_DESCRIPTORS = 2
_INT = array.array("i").itemsize


@dataclass(frozen=True, slots=True)
class ForkLimits:
    """What the kernel allows a fork."""

    memory: int
    """Bytes, besides what the process has."""
    parallel: int
    """Forks at a time; more wait."""


def serve_forks(
    control: socket.socket,
    loaded: T,
    limits: ForkLimits,
    serve: Callable[[socket.socket, list[int], T], None],
) -> None:
    """Fork for each socket that the parent passes, until it closes the control socket.

    `serve` runs in the fork with that socket, the other descriptors and what is `loaded`; the fork ends
    after it.
    """
    own_pid = os.getpid()
    running: set[int] = set()
    while descriptors := _next_descriptors(control):
        _reap(running, limits.parallel)
        if (pid := os.fork()) == 0:
            _serve_and_exit(descriptors, limits.memory, own_pid, loaded, serve)
        running.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)


def _next_descriptors(control: socket.socket) -> list[int]:
    """The next file descriptors that the parent passes; none at the end."""
    data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(_MAX_DESCRIPTORS * _INT))
    if not data:
        return []
    received = array.array("i")
    received.frombytes(ancillary[0][2][: len(ancillary[0][2]) // _INT * _INT])
    return received.tolist()


def _reap(running: set[int], most: int) -> None:
    """Forget forks that have ended; wait until fewer than `most` run."""
    for pid in list(running):
        if os.waitpid(pid, os.WNOHANG)[0]:
            running.discard(pid)
    while len(running) >= most:
        running.discard(os.wait()[0])


def _serve_and_exit(
    descriptors: list[int],
    memory: int,
    parent: int,
    loaded: T,
    serve: Callable[[socket.socket, list[int], T], None],
) -> None:
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:  # otherwise it died before prctl
            resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + memory,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            serve(socket.socket(fileno=descriptors[0]), descriptors[1:], loaded)
            status = 0
    finally:
        os._exit(status)


def _data_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
