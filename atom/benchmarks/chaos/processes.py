"""The processes of a server on this host, found from its supervisor."""

import asyncio
import contextlib
import os
import random
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

__all__ = [
    "ChaosError",
    "all_processes_of",
    "forbid_growth",
    "pause_at_random",
    "processes_of",
    "resident_bytes",
    "restored_limits",
    "send",
    "supervisor_of",
    "wait_for_kind",
]

_MODULES = {"worker": "workers.main", "core": "engine_core.process", "frontend": "frontend.main"}
_CREDENTIALS = struct.Struct("3i")
_START_DEADLINE_S = 120.0
_LONGEST_PAUSE_S = 1.0


class ChaosError(Exception):
    """A scenario cannot be run; the text says what to do."""


def supervisor_of(admin_socket: str) -> int:
    """The process id of the supervisor of the server with this admin socket. Raises ChaosError."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(admin_socket)
        except OSError as error:
            text = f"cannot connect to the admin socket {admin_socket}: {error.strerror}"
            raise ChaosError(f"{text}; start the server with --admin-socket {admin_socket}") from None
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(peer)[0]
    for candidate in (pid, _parent(pid)):  # a frontend serves the socket that its supervisor has made
        if any(processes_of(candidate, kind) for kind in _MODULES):
            return candidate
    raise ChaosError(f"process {pid}, which serves {admin_socket}, has no engines on this host")


def processes_of(supervisor: int, kind: str, engine: int | None = None) -> list[int]:
    """The ids of its processes of a kind: worker, core or frontend; of one engine, if it is given."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(int(entry.name)) == supervisor:
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_text().split("\0")
                if _MODULES[kind] in command and engine in (None, _engine_of(command)):
                    found.append(int(entry.name))
    return sorted(found)


def all_processes_of(supervisor: int) -> list[int]:
    """The ids of its processes of all kinds."""
    return [pid for kind in _MODULES for pid in processes_of(supervisor, kind)]


def _engine_of(command: list[str]) -> int:
    """The engine that a process belongs to, by its name: the only engine's has no number."""
    match = re.search(r"\0engine (\d+) ", "\0".join(command))
    return int(match[1]) if match else 0


def wait_for_kind(supervisor: int, kind: str, count: int) -> None:
    """Wait until there are so many processes of a kind. Raises ChaosError."""
    deadline = time.monotonic() + _START_DEADLINE_S
    while len(processes_of(supervisor, kind)) < count:
        if time.monotonic() > deadline:
            raise ChaosError(f"after {_START_DEADLINE_S:.0f} s the server has fewer than {count} of: {kind}")
        time.sleep(0.2)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def pause_at_random(supervisor: int, count: int, seed: int, until: asyncio.Event) -> None:
    """Stop random processes of the server one after another, each for up to a second, as a busy host does."""
    chosen = random.Random(seed)
    for _ in range(count):
        if until.is_set():
            return
        pids = all_processes_of(supervisor)
        if not pids:
            return
        pid = chosen.choice(pids)
        send(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(chosen.uniform(0, _LONGEST_PAUSE_S))
        finally:
            send(pid, signal.SIGCONT)
        await asyncio.sleep(chosen.uniform(0, _LONGEST_PAUSE_S))


def forbid_growth(pid: int, what: Literal["memory", "disk"]) -> None:
    """Let a process map no more memory than it has, or make no file larger."""
    number, size = _LIMITS[what]
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
        _, hard = resource.prlimit(pid, number)
        resource.prlimit(pid, number, (size(pid), hard))


@contextlib.contextmanager
def restored_limits(supervisor: int) -> Iterator[None]:
    """The server's limits are lifted in the end."""
    try:
        yield
    finally:
        for pid in (supervisor, *all_processes_of(supervisor)):
            for number, _ in _LIMITS.values():
                with contextlib.suppress(ProcessLookupError):
                    _, hard = resource.prlimit(pid, number)
                    resource.prlimit(pid, number, (hard, hard))


def _mapped_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


_LIMITS: dict[str, tuple[int, Callable[[int], int]]] = {
    "memory": (resource.RLIMIT_AS, _mapped_bytes),
    "disk": (resource.RLIMIT_FSIZE, lambda pid: 0),
}


def resident_bytes(pids: list[int]) -> int:
    """Resident memory of these processes together."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _parent(pid: int) -> int:
    """The parent of a living process; 0 without one."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return 0
    return 0 if state == "Z" else int(parent)
