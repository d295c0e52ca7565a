"""What a process of the server is: its role, how it is started, and how it is watched."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

__all__ = ["Process", "ProcessSpec", "Role"]


class Process(Protocol):
    """The part of subprocess.Popen that is used: a process may be on another node."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""

    def send_signal(self, number: int) -> None: ...


class Role(Enum):
    """What a process is for. The value is the Python module that it runs."""

    PREPARATION = "workers.checkpoint.prepare"
    CORE = "engine_core.process"
    WORKER = "workers.main"
    FRONTEND = "frontend.main"


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start."""

    name: str
    role: Role
    launch: msgspec.Struct
    """The message that it reads first."""
    pass_fds: Sequence[int] = ()
    http: int | None = None
    """Number of the HTTP socket that it gets on its node."""
    engine: int = 0
    """Rank of the engine that a core or a worker belongs to."""
    worker: int = 0
    """Number of a worker in its engine."""
