"""Whether the workers record traces: one switch for all ranks, turned for one frontend at a time.

    off ──ask(on)──▶ starting ──all ranks──▶ on ──ask(off)──▶ stopping ──all ranks──▶ off
                        └─────────────a rank could not─────────────▲

A recording that nobody ends would fill the memory: it is ended after a while, and whoever asks for
its end later gets the traces all the same.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from atom.messages.profile import Profile, ProfileResult, RankTrace

_DEADLINE_S = 300.0
LONGEST_S = 600.0
"""A recording lasts no longer."""


class _State(Enum):
    OFF = "off"
    STARTING = "being started"
    ON = "on"
    STOPPING = "being written"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a frontend is to hear; and whether the workers must be told to stop."""

    frontend: bytes | None
    """None where nobody waits."""
    answer: ProfileResult
    stop: bool = False


class Profiling:
    """Says what to tell the workers and what to answer; knows no sockets."""

    def __init__(self, num_ranks: int, available: bool, clock: Callable[[], float] = time.monotonic):
        """`available`: the workers have a directory for traces."""
        self._num_ranks = num_ranks
        self._available = available
        self._clock = clock
        self._state = _State.OFF
        self._frontend: bytes | None = None
        self._number = 0
        self._asked_at = 0.0
        self._started_at = 0.0
        self._got: dict[int, RankTrace] = {}
        self._left: list[RankTrace] = []  # of a recording that was ended unasked

    @property
    def is_timed(self) -> bool:
        """Whether `overdue` may have something to say."""
        return self._frontend is not None or self._state is _State.ON

    def ask(self, message: Profile, frontend: bytes) -> ProfileResult | None:
        """None: hand the message on to the workers. Else the answer: they have nothing to do."""
        if not message.on and self._left:
            traces, self._left = self._left, []
            return ProfileResult(message.number, False, traces)
        refusal = self._refusal(message.on)
        if refusal:
            return ProfileResult(message.number, message.on, refusal=refusal)
        self._frontend, self._number, self._asked_at = frontend, message.number, self._clock()
        self._begin(_State.STARTING if message.on else _State.STOPPING)
        self._left = []
        return None

    def take(self, trace: RankTrace) -> Outcome | None:
        """A rank's answer; an outcome with the last one."""
        self._got[trace.rank] = trace
        if len(self._got) < self._num_ranks:
            return None
        traces = [self._got[rank] for rank in sorted(self._got)]
        error = next((f"worker {one.rank}: {one.error}" for one in traces if one.error), "")
        starting = self._state is _State.STARTING
        undo = starting and bool(error)
        if undo:
            self._begin(_State.STOPPING)
        else:
            self._state, self._started_at = _State.ON if starting else _State.OFF, self._clock()
        if not starting and self._frontend is None:
            self._left = [trace for trace in traces if trace.file]
        return self._outcome(ProfileResult(self._number, starting, traces, error=error), undo)

    def overdue(self) -> Outcome | None:
        """A recording that has lasted too long, or a frontend that has waited too long.

        The ranks of the latter may still finish.
        """
        if self._state is _State.ON and self._clock() - self._started_at >= LONGEST_S:
            self._begin(_State.STOPPING)
            return self._outcome(ProfileResult(0, False), stop=True)
        if self._frontend is None or self._clock() - self._asked_at < _DEADLINE_S:
            return None
        missing = ", ".join(str(rank) for rank in range(self._num_ranks) if rank not in self._got)
        error = f"waited {_DEADLINE_S:.0f} s for worker {missing} to start or write its trace"
        return self._outcome(ProfileResult(self._number, self._state is _State.STARTING, error=error))

    def _refusal(self, on: bool) -> str:
        if not self._available:
            return "the engine has no directory for traces: start it with --torch-profiler-dir"
        if self._state in (_State.STARTING, _State.STOPPING):
            return f"a profile is {self._state.value}; try again later"
        if on and self._state is _State.ON:
            return "profiling is on already"
        return "" if on or self._state is _State.ON else "profiling is not on"

    def _begin(self, state: _State) -> None:
        self._state = state
        self._got = {}

    def _outcome(self, answer: ProfileResult, stop: bool = False) -> Outcome:
        frontend, self._frontend = self._frontend, None
        return Outcome(frontend, answer, stop)
