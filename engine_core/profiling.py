"""Whether the workers record traces: one switch for all ranks, turned for one frontend at a time.

off ──ask(on)──▶ starting ──all ranks──▶ on ──ask(off)──▶ stopping ──all ranks──▶ off
                    └─────────────a rank could not─────────────▲
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from atom.messages.profile import Profile, ProfileAnswer, RankTrace

_DEADLINE_S = 300.0


class _State(Enum):
    OFF = "off"
    STARTING = "being started"
    ON = "on"
    STOPPING = "being written"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a frontend is to hear; and whether the workers must stop, since not all could start."""

    frontend: bytes | None
    """None where nobody waits any more."""
    answer: ProfileAnswer
    undo: bool = False


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
        self._got: dict[int, RankTrace] = {}

    @property
    def awaited(self) -> bool:
        """Whether a frontend waits for its answer."""
        return self._frontend is not None

    def ask(self, message: Profile, frontend: bytes) -> ProfileAnswer | None:
        """None: hand the message on to the workers. Else the answer: it makes no sense now."""
        refusal = self._refusal(message.on)
        if refusal:
            return ProfileAnswer(message.number, message.on, refusal=refusal)
        self._frontend, self._number, self._asked_at = frontend, message.number, self._clock()
        self._begin(_State.STARTING if message.on else _State.STOPPING)
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
            self._state = _State.ON if starting else _State.OFF
        return self._outcome(ProfileAnswer(self._number, starting, traces, error=error), undo)

    def overdue(self) -> Outcome | None:
        """The answer for a frontend that has waited too long; the ranks may still finish."""
        if self._frontend is None or self._clock() - self._asked_at < _DEADLINE_S:
            return None
        missing = ", ".join(str(rank) for rank in range(self._num_ranks) if rank not in self._got)
        error = f"waited {_DEADLINE_S:.0f} s for worker {missing} to start or write its trace"
        return self._outcome(ProfileAnswer(self._number, self._state is _State.STARTING, error=error))

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

    def _outcome(self, answer: ProfileAnswer, undo: bool = False) -> Outcome:
        frontend, self._frontend = self._frontend, None
        return Outcome(frontend, answer, undo)
