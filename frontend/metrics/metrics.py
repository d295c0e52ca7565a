"""Counters and histograms of a frontend.

Plain integers and lists, used by the event loop's thread only: one bisection a token.
`frontend.metrics.shared_metrics` adds those of several frontends, `frontend.metrics.exposition` formats
them for Prometheus.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from atom.shared.messages.engine import FirstToken

__all__ = ["EngineMetrics", "Histogram", "Metrics", "Progress", "RunningRequest"]

# vLLM's labels of finish reasons; all others are "stop".
_FINISH_LABELS = {
    "max_tokens": "length",
    "aborted": "abort",
    "timeout": "abort",
    "error": "error",
    "overloaded": "abort",
}


class Histogram(msgspec.Struct):
    """Counts values in buckets with inclusive upper bounds."""

    bounds: list[float]
    """Upper bounds of the buckets, ascending."""
    counts: list[int] = []
    """One more than bounds: the last counts the values above all bounds."""
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def merge(self, other: "Histogram") -> None:
        """Add the values of a histogram with the same bounds."""
        self.counts = [own + more for own, more in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass(slots=True)
class Progress:
    """Timestamps (monotonic clock) and token counts of one sequence."""

    arrived_at: float
    prompt_tokens: int
    tokens: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    queue_s: float | None = None
    """Seconds from the arrival at the engine to the admission; None: no token yet."""


class RunningRequest(msgspec.Struct, array_like=True, frozen=True):
    """A sequence in progress."""

    number: int
    """Unique among the sequences of all frontends."""
    rank: int
    prompt_tokens: int
    tokens: int
    """Tokens generated so far."""
    arrived_at: float
    """Time of the monotonic clock, which all processes of a host share."""
    name: str = ""
    """The id of its request that the client knows."""
    first_token_at: float = 0.0
    """Time of the monotonic clock; 0: there is no token yet."""
    last_token_at: float = 0.0
    queue_s: float | None = None
    """Seconds from the arrival at the engine to the admission; None: no token yet."""

    @property
    def tokens_per_second(self) -> float | None:
        """Mean rate since the first token; None before the second one."""
        seconds = self.last_token_at - self.first_token_at
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else None


def _series(steps: tuple[float, ...], first: int, last: int) -> list[float]:
    """The same steps in every decade from 10**first to 10**last."""
    bounds = [float(f"{step}e{decade}") for decade in range(first, last) for step in steps]
    return [*bounds, float(f"1e{last}")]


def _seconds() -> Histogram:
    return Histogram(_series((1, 2, 5), -3, 3))


def _fine_seconds() -> Histogram:
    return Histogram(_series((1, 1.5, 2, 3, 5, 7), -3, 1))


def _token_counts() -> Histogram:
    return Histogram(_series((1, 2, 5), 0, 6))


def _counter() -> Any:
    return Counter()


class EngineMetrics(msgspec.Struct):
    """The sequences that were sent to the engine of one rank, its restarts included."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finish_reasons: dict[str, int] = msgspec.field(default_factory=_counter)
    """Sequences by finish reason: stop, length, abort or error."""
    time_to_first_token: Histogram = msgspec.field(default_factory=_seconds)
    inter_token: Histogram = msgspec.field(default_factory=_fine_seconds)
    latency: Histogram = msgspec.field(default_factory=_seconds)
    queue_time: Histogram = msgspec.field(default_factory=_seconds)
    prefill_time: Histogram = msgspec.field(default_factory=_seconds)
    decode_time: Histogram = msgspec.field(default_factory=_seconds)
    prompt_lengths: Histogram = msgspec.field(default_factory=_token_counts)
    generation_lengths: Histogram = msgspec.field(default_factory=_token_counts)
    replayed: int = 0
    """Times that a sequence was started again, because the engine had ended."""
    handed_over: int = 0
    """Sequences whose prompt the engine has computed for another one."""
    session_hits: int = 0
    """Requests that went to the engine of their session's last one."""
    session_moves: int = 0
    """Requests that came from the engine of their session's last one, which had too much to do."""

    def admitted(self, first: FirstToken) -> None:
        """Count queue and prefill times of a sequence with its first token."""
        self.queue_time.observe(first.queued_s)
        self.prefill_time.observe(first.prefill_s)

    def session_routed(self, stays: bool | None) -> None:
        """Count a request of a session whose last one ran on this engine, or on another; None: on none."""
        self.session_hits += stays is True
        self.session_moves += stays is False

    def advanced(self, progress: Progress, tokens: int, now: float) -> None:
        """Count new tokens of a sequence."""
        self.generated_tokens += tokens
        progress.tokens += tokens
        if progress.last_token_at:
            self.inter_token.observe((now - progress.last_token_at) / tokens, tokens)
        else:
            progress.first_token_at = now
            self.prompt_tokens += progress.prompt_tokens
            self.time_to_first_token.observe(now - progress.arrived_at)
        progress.last_token_at = now

    def finished(self, progress: Progress, reason: str, now: float) -> None:
        """Count a finished sequence; `reason` is the raw finish reason."""
        self.finish_reasons[_FINISH_LABELS.get(reason, "stop")] += 1
        self.latency.observe(now - progress.arrived_at)
        self.prompt_lengths.observe(progress.prompt_tokens)
        self.generation_lengths.observe(progress.tokens)
        if progress.tokens:
            self.decode_time.observe(now - progress.first_token_at)

    def aborted(self) -> None:
        """Count a sequence aborted by its client."""
        self.finish_reasons["abort"] += 1

    def failed(self, count: int) -> None:
        """Count sequences that fail because the engine or this process ends."""
        self.finish_reasons["error"] += count

    def merge(self, other: "EngineMetrics") -> None:
        """Add the figures of another frontend."""
        _merge(self, other)


class Metrics(msgspec.Struct):
    """Counters and histograms of a frontend."""

    refused: int = 0
    """Requests refused because the server was full."""
    disconnects: int = 0
    """Clients that disconnected before their response was complete."""
    stalled: int = 0
    """Clients disconnected because they did not read their response."""
    output_limited: int = 0
    """Requests ended because too much of their output waited to be sent."""
    resumed: int = 0
    """Streams that clients have resumed."""
    expired: int = 0
    """Streams that waited for a client until their time was up."""
    restarts: int = 0
    """Restarts of frontend processes."""
    responses: dict[int, int] = msgspec.field(default_factory=_counter)
    """HTTP responses by status."""
    event_loop_lag: Histogram = msgspec.field(default_factory=_fine_seconds)
    """Lateness of a timer of the event loop."""
    engines: dict[int, EngineMetrics] = {}
    """Figures by rank."""

    def engine(self, rank: int) -> EngineMetrics:
        """The figures of a rank."""
        found = self.engines.get(rank)
        if found is None:
            found = self.engines[rank] = EngineMetrics()
        return found

    def merge(self, other: "Metrics") -> None:
        """Add the figures of another frontend."""
        for rank, engine in other.engines.items():
            self.engine(rank).merge(engine)
        _merge(self, other)


def _merge(total: msgspec.Struct, other: msgspec.Struct) -> None:
    """Add numbers, counters and histograms, field by field."""
    for name in total.__struct_fields__:
        own = getattr(total, name)
        more = getattr(other, name)
        match own:
            case Histogram():
                own.merge(more)
            case Counter():
                own.update(more)
            case int():
                setattr(total, name, own + more)
