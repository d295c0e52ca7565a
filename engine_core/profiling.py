"""The state of profiling: on or off for all ranks together, switched by one frontend at a time.

    off ──start──▶ starting ──all ranks──▶ on ──stop──▶ stopping ──all ranks──▶ off
                      └──────────a rank failed─────────────▲

A recording fills memory, so it is stopped after `MAX_RECORDING_S`; a stop request that comes later still
gets its traces.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from atom.shared.messages.profile import Profile, ProfileResult, RankTrace

_DEADLINE_S = 300.0
MAX_RECORDING_S = 600.0
"""Longest recording, in seconds."""


class _State(Enum):
    OFF = "off"
    STARTING = "being started"
    ON = "on"
    STOPPING = "being written"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a request, and whether the workers must stop recording."""

    frontend: bytes | None
    """The frontend to send it to, if any."""
    result: ProfileResult
    stop: bool = False


class Profiling:
    """Decides what the workers do and what frontends receive; has no sockets."""

    def __init__(self, num_ranks: int, available: bool, clock: Callable[[], float] = time.monotonic):
        """`available`: whether the workers have a directory for traces."""
        self._num_ranks = num_ranks
        self._available = available
        self._clock = clock
        self._state = _State.OFF
        self._frontend: bytes | None = None
        self._number = 0
        self._requested_at = 0.0
        self._started_at = 0.0
        self._traces: dict[int, RankTrace] = {}
        self._unclaimed: list[RankTrace] = []  # of a recording that was stopped for its length

    @property
    def is_timed(self) -> bool:
        """Whether a deadline is active: call `overdue` regularly."""
        return self._frontend is not None or self._state is _State.ON

    @property
    def is_writing(self) -> bool:
        """Whether the workers write their traces, which may hold their GIL for minutes."""
        return self._state is _State.STOPPING

    def request(self, message: Profile, frontend: bytes) -> ProfileResult | None:
        """Handle a frontend's request.

        Returns None when the message must go to the workers, else the result to send back.
        """
        if not message.on and self._unclaimed:
            traces = self._unclaimed
            self._unclaimed = []
            return ProfileResult(message.number, False, traces)
        refusal = self._refusal(message.on)
        if refusal:
            return ProfileResult(message.number, message.on, refusal=refusal)
        self._frontend = frontend
        self._number = message.number
        self._requested_at = self._clock()
        self._begin(_State.STARTING if message.on else _State.STOPPING)
        self._unclaimed = []
        return None

    def add_trace(self, trace: RankTrace) -> Outcome | None:
        """Add a rank's response; returns the outcome once all ranks have responded."""
        self._traces[trace.rank] = trace
        if len(self._traces) < self._num_ranks:
            return None
        traces = [self._traces[rank] for rank in sorted(self._traces)]
        error = next((f"worker {one.rank}: {one.error}" for one in traces if one.error), "")
        starting = self._state is _State.STARTING
        undo = starting and bool(error)
        if undo:
            self._begin(_State.STOPPING)
        else:
            self._state = _State.ON if starting else _State.OFF
            self._started_at = self._clock()
        if not starting and self._frontend is None:
            self._unclaimed = [trace for trace in traces if trace.file]
        return self._outcome(ProfileResult(self._number, starting, traces, error=error), undo)

    def overdue(self) -> Outcome | None:
        """The outcome of a recording that lasted too long, or of a request that timed out.

        In the second case the workers may still finish.
        """
        if self._state is _State.ON and self._clock() - self._started_at >= MAX_RECORDING_S:
            self._begin(_State.STOPPING)
            return self._outcome(ProfileResult(0, False), stop=True)
        if self._frontend is None or self._clock() - self._requested_at < _DEADLINE_S:
            return None
        missing = ", ".join(str(rank) for rank in range(self._num_ranks) if rank not in self._traces)
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
        self._traces = {}

    def _outcome(self, result: ProfileResult, stop: bool = False) -> Outcome:
        frontend = self._frontend
        self._frontend = None
        return Outcome(frontend, result, stop)
