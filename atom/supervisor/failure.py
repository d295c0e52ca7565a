"""Why a failure domain ended, and how long it stays down."""

import math
from dataclasses import dataclass

from atom.shared.utils.exit_status import ExitStatus
from atom.supervisor.child import Child

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0
# A domain that was ready for this long starts a new row of failures.
STABLE_S = 60.0


class StartError(RuntimeError):
    """The server could not start, or has ended; the text is one line a user can act on."""

    def __init__(self, text: str, status: int = ExitStatus.FAILURE):
        super().__init__(text)
        self.status = status
        """Exit status for the program."""


@dataclass(frozen=True)
class Failure:
    """The first cause of the end of a failure domain."""

    reason: str
    text: str
    """One line with the process and the reason."""
    status: int = ExitStatus.FAILURE
    child: Child | None = None
    """The child that failed first; None if none is to blame."""
    is_hang: bool = False
    """Whether a process does not respond, or a step does not end."""


class Restarts:
    """Delays between the restarts of one domain: they double, until it stays ready for a minute."""

    def __init__(self, most: int):
        """`most` restarts in a row are allowed."""
        self.in_a_row = 0
        self._most = most

    def delay(self, ready_s: float) -> float | None:
        """Seconds until the next start, after a life that was ready for `ready_s`; None: no further one."""
        if ready_s >= STABLE_S:
            self.in_a_row = 0
        if self.in_a_row >= self._most:
            return None
        self.in_a_row += 1
        return min(math.ldexp(FIRST_DELAY_S, self.in_a_row - 1), MAX_DELAY_S)
