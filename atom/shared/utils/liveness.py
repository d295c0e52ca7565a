"""Detection of hung processes: each process sends heartbeats, another one measures its silence.

A process is unresponsive after a sixth of the hang timeout without a heartbeat, and hung after all of it;
a worker that shares collectives with others earlier.
Time in which the measuring process itself did not run hardly counts: after SIGCONT, or after a pause
of the whole container, the heartbeats that wait in its socket are read before anything is decided.
"""

import contextlib
import time
from collections.abc import Callable

import msgspec
import zmq

from atom.shared.messages.codec import encode
from atom.shared.utils.endpoint import connect
from atom.shared.utils.logger import get_logger

__all__ = [
    "WARNINGS_PER_TIMEOUT",
    "HeartbeatSender",
    "PeerMonitor",
    "SilenceTimer",
    "heartbeat_interval",
    "worker_monitor",
]

_HEARTBEATS_PER_TIMEOUT = 60
_MAX_INTERVAL_S = 1.0
WARNINGS_PER_TIMEOUT = 6
"""What is silent for this share (1 / 6) of its timeout is told of."""
_UPDATES_PER_WARNING = 4
_QUEUED_HEARTBEATS = 10
# Workers that run collectives together all wait for a silent one. Their heartbeats come from a thread,
# however long a step takes, so that this is no limit of a step.
_COLLECTIVE_HANG_S = 7.0
_COLLECTIVE_WARN_S = 3.5


def heartbeat_interval(hang_timeout_s: float) -> float:
    """Seconds between two heartbeats."""
    return min(_MAX_INTERVAL_S, hang_timeout_s / _HEARTBEATS_PER_TIMEOUT)


class HeartbeatSender:
    """Sends `message()` to `endpoint` about every `interval_s`, on a socket of its own.

    A separate socket, so that unread heartbeats never fill the queue of other messages.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        kind: int,
        endpoint: str,
        message: Callable[[], msgspec.Struct],
        interval_s: float,
    ):
        self._socket = context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_HEARTBEATS)
        connect(self._socket, endpoint)
        self._message = message
        self._interval_s = interval_s
        self._next = 0.0

    def send_if_due(self) -> None:
        """Send a heartbeat unless the last one is recent; never waits."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._interval_s
        with contextlib.suppress(zmq.Again):  # the queue is full: the reader has enough of them
            self._socket.send(encode(self._message()), zmq.DONTWAIT)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class SilenceTimer:
    """Seconds since a peer was last seen.

    Between two updates at most `max_gap_s` are counted.
    """

    def __init__(self, max_gap_s: float, clock: Callable[[], float] = time.monotonic):
        self._max_gap_s = max_gap_s
        self._clock = clock
        self._silence_s = 0.0
        self._updated_at = clock()

    def update(self, seen: bool) -> float:
        """Returns the silence; `seen` says whether the peer was seen since the last update."""
        now = self._clock()
        gap = min(now - self._updated_at, self._max_gap_s)
        self._updated_at = now
        self._silence_s = 0.0 if seen else self._silence_s + gap
        return self._silence_s


class PeerMonitor:
    """Measures the silence of several peers, and logs when one stops or resumes responding."""

    def __init__(
        self,
        hang_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        warn_s: float | None = None,
    ):
        """`warn_s`: the silence after which a peer is unresponsive, instead of a sixth of the timeout."""
        self._timeout_s = hang_timeout_s
        self._warn_s = hang_timeout_s / WARNINGS_PER_TIMEOUT if warn_s is None else warn_s
        self._clock = clock
        self._timers: dict[str, SilenceTimer] = {}
        self._seen: set[str] = set()
        self._unresponsive: dict[str, float] = {}

    @property
    def unresponsive(self) -> str:
        """One line on a peer that does not respond; empty when all do."""
        return next((_line(peer, silence) for peer, silence in self._unresponsive.items()), "")

    def hung(self) -> str:
        """One line on a peer that was silent for the whole timeout; else empty."""
        silences = self._unresponsive.items()
        return next((_line(peer, silence) for peer, silence in silences if silence >= self._timeout_s), "")

    def seen(self, peer: str) -> None:
        """Note a message of `peer`. Its silence is measured from its first one on."""
        self._seen.add(peer)

    def update(self) -> bool:
        """Measure; call it several times a second, after receiving. True when a peer changed its state."""
        for peer in self._seen - self._timers.keys():
            self._timers[peer] = SilenceTimer(self._warn_s / _UPDATES_PER_WARNING, self._clock)
        changes = [self._update_peer(peer, timer) for peer, timer in self._timers.items()]
        self._seen.clear()
        return any(changes)

    def _update_peer(self, peer: str, timer: SilenceTimer) -> bool:
        silence = timer.update(peer in self._seen)
        before = self._unresponsive.get(peer)
        if silence >= self._warn_s:
            self._unresponsive[peer] = silence
            if before is None:
                get_logger().warning(_line(peer, silence))
        elif before is not None:
            del self._unresponsive[peer]
            get_logger().warning("%s responds again after %.0f s", peer, before)
        return (before is None) != (peer not in self._unresponsive)


def worker_monitor(hang_timeout_s: float, collective: bool) -> PeerMonitor:
    """The monitor of serving workers; workers with collectives count as hung after 7 s at most."""
    if not collective:
        return PeerMonitor(hang_timeout_s)
    warn_s = min(hang_timeout_s / WARNINGS_PER_TIMEOUT, _COLLECTIVE_WARN_S)
    return PeerMonitor(min(hang_timeout_s, _COLLECTIVE_HANG_S), warn_s=warn_s)


def _line(peer: str, silence_s: float) -> str:
    return f"{peer} has not responded for {silence_s:.0f} s"
