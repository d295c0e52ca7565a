"""Messages from every child process to its supervisor (supervisor binds PULL, children PUSH).

`process` is the supervisor's name of the process: prepare, core, frontend, worker 0, worker 1, …
"""

import msgspec

from atom.utils.exit_status import ExitStatus


class Ready(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """`process` is ready."""

    process: str
    detail: dict[str, int | str] = {}
    """Figures for the banner."""


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


class Heartbeat(msgspec.Struct, tag=4, array_like=True, frozen=True, gc=False):
    """A sign of life of `process` about every second, from its main loop."""

    process: str


ToSupervisor = Ready | Progress | Dead | Heartbeat
