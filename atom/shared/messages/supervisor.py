"""Messages between the supervisor and its children.

Every child sends its state (supervisor binds PULL, children PUSH). Frontends also have a control
connection (supervisor binds ROUTER, frontend n connects a DEALER with the identity of its index in
four little-endian bytes): they send GetEngines, and receive Engines then and at every change. The one
that serves the administrators sends SetServerState and RestartEngines, those with suspected requests send
WantTrial, and GetStream and LeaveStream are answered by HandedStream.

`process` is the supervisor's name of the process: prepare, core, frontend, worker 0, worker 1, …
"""

import signal

import msgspec

from atom.shared.messages.admin import ServerState
from atom.shared.messages.launch import EngineAddress
from atom.shared.messages.resume import GetStream, HandedStream, LeaveStream
from atom.shared.utils.exit_status import ExitStatus

INTERRUPT_SIGNAL = signal.SIGUSR1
"""Ends the running requests of a frontend with errors. A second SIGTERM is lost while one is pending."""

LAST_REPORT_MS = 60_000
"""How long the end of a process waits for a supervisor that is stopped to take its Dead."""


class Ready(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """`process` is ready."""

    process: str
    detail: dict[str, int | str] = {}
    """Figures for the banner."""
    num_blocks: list[int] = []
    """From a core: KV blocks of each group."""


class Progress(msgspec.Struct, tag=2, array_like=True, frozen=True, gc=False):
    """Progress of a long phase of the start, for a progress bar."""

    process: str
    phase: str
    done: int
    total: int


class Dead(msgspec.Struct, tag=3, array_like=True, frozen=True, gc=False):
    """`process` ends because of `reason`: one line a user can act on."""

    process: str
    reason: str
    status: int = ExitStatus.FAILURE
    """Exit status for the program, if this was the root cause of a failed start."""
    is_hang: bool = False
    """Whether another process of its life hangs."""


class Heartbeat(msgspec.Struct, tag=4, array_like=True, frozen=True, gc=False):
    """Sent about every second from the main loop of `process`, which is alive."""

    process: str


ToSupervisor = Ready | Progress | Dead | Heartbeat


class GetEngines(msgspec.Struct, tag=20, array_like=True, frozen=True, gc=False):
    """The first message of a frontend: it wants `Engines`, now and at every change."""

    frontend: int


class EngineEnded(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The end of one life of an engine."""

    rank: int
    life: int
    reason: str
    """One line; clients of its requests get it."""
    is_final: bool = False
    """Whether the engine is not started again."""
    is_planned: bool = False
    """Whether an administrator restarts it: no request has ended it."""


class SetServerState(msgspec.Struct, tag=22, array_like=True, frozen=True, gc=False):
    """Set the state; every frontend gets it with the next `Engines`."""

    state: ServerState


class WantTrial(msgspec.Struct, tag=23, array_like=True, frozen=True, gc=False):
    """A frontend wants to try requests that may have ended engines; its earlier turn has ended."""

    frontend: int
    number: int
    """Number of the turn, counted from 1 by the frontend; 0: it wants none."""


class Trial(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The frontend that may try requests now; -1: none."""

    frontend: int = -1
    number: int = 0
    """As in its WantTrial."""


class RestartEngines(msgspec.Struct, tag=26, array_like=True, frozen=True, gc=False):
    """Restart all engines, one after the other."""


ToControl = GetEngines | SetServerState | WantTrial | GetStream | RestartEngines | LeaveStream


class Engines(msgspec.Struct, tag=21, array_like=True, frozen=True, gc=False):
    """All engines that run or start now; every other life has ended."""

    engines: list[EngineAddress]
    """At most one for each rank."""
    ended: list[EngineEnded] = []
    """The latest life that has ended, for each rank that has one."""
    state: ServerState = ServerState()
    trial: Trial = Trial()
    is_leaving: bool = False
    """Whether another server has taken the listening sockets over: frontends end after their connections."""
    to_restart: list[int] = []
    """Ranks of the engines that an administrator restarts and that are not ready again."""
    down: list[int] = []
    """Numbers of the frontends that accept no connections: others of their node do it for them."""


FromControl = Engines | HandedStream


def control_identity(frontend: int) -> bytes:
    """The identity of a frontend's control connection."""
    return frontend.to_bytes(4, "little")
