"""Whether this frontend may try suspected requests: one frontend at a time, as the supervisor says.

Several that tried requests at the same time could not tell whose had ended an engine.
"""

import time
from collections.abc import Callable

from atom.shared.messages.supervisor import Trial

__all__ = ["TrialTurn"]

_NEWS_S = 3.0
"""The end of another frontend's trial may be known before the end of the engine that it has ended."""


class TrialTurn:
    """The turns of frontend `index`. `want(number)` asks the supervisor for turn `number`; 0 asks for none.

    Without `want` no other frontend tries requests, and it is always this one's turn.
    """

    def __init__(self, index: int = 0, want: Callable[[int], None] | None = None):
        self._index = index
        self._want = want
        self._number = 0
        """Number of the latest turn that was asked for, from 1."""
        self._is_asking = False
        self._current = Trial()
        self._of_another_until = 0.0

    @property
    def is_alone(self) -> bool:
        """Whether no other frontend tries requests."""
        return self._want is None

    @property
    def is_of_another(self) -> bool:
        """Whether another frontend tries requests, or did a moment ago."""
        return self._is_current_of_another or time.monotonic() < self._of_another_until

    @property
    def _is_current_of_another(self) -> bool:
        return self._current.frontend not in (self._index, Trial().frontend)

    def ask(self) -> bool:
        """Whether it is this frontend's turn; if not, it will be."""
        if self._want is None:
            return True
        if not self._is_asking:
            self._is_asking = True
            self._number += 1
            self._want(self._number)
        return self._current == Trial(self._index, self._number)

    def leave(self) -> None:
        """Give up the turn of this frontend, or no longer ask for one."""
        if self._want is not None and self._is_asking:
            self._is_asking = False
            self._want(0)

    def set_current(self, current: Trial) -> None:
        """Note whose turn it is, as the supervisor says."""
        if self._is_current_of_another and current != self._current:
            self._of_another_until = time.monotonic() + _NEWS_S
        self._current = current
