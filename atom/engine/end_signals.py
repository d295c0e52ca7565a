"""The signals that end this process, noticed where nothing is half done."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from atom.supervisor import StartError

__all__ = ["EndSignals"]


class EndSignals:
    """Counts SIGTERM, SIGINT and SIGHUP (unless that is ignored, as under nohup) within `with`.

    The handler never raises, since it runs between any two instructions: a socket that its context does not
    know yet would let the end of the context wait for ever, and a child or a directory that has no owner yet
    would be left. What starts something calls `check` several times a second instead.
    """

    def __init__(self, status: int | None = None, second_kills: bool = False):
        """`status` is the exit status after a signal, by default 128 and its number, as of a shell.

        With `second_kills` the same signal once more ends the process at once, whatever it leaves.
        """
        self.count = 0
        """How many have come."""
        self._first = 0
        self._status = status
        self._second_kills = second_kills
        self._numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._numbers.append(signal.SIGHUP)

    def __enter__(self) -> "EndSignals":
        for number in self._numbers:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        # An ending Python restores the defaults, but not of ignored ones: none may change the exit status.
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def check(self) -> None:
        """Raises SystemExit once a signal has come."""
        if self.count:
            raise SystemExit(128 + self._first if self._status is None else self._status)

    @contextlib.contextmanager
    def before_failures(self) -> Iterator[None]:
        """A StartError of the block after a signal is SystemExit: a service manager signals children, too."""
        try:
            yield
        except StartError:
            self.check()
            raise

    def _note(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        self._first = self._first or number
        if self._second_kills:
            signal.signal(number, signal.SIG_DFL)
