"""What this process counts while it serves.

Plain integers and lists, touched by the event loop's thread alone: a token costs one bisection.
`frontend.exposition` turns them into Prometheus' text when somebody asks.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from atom.messages.engine import FirstToken

__all__ = ["Histogram", "Metrics", "Progress"]

# vLLM's words for how a choice ended; whatever else ended it is a stop.
_ENDS = {"max_tokens": "length", "aborted": "abort", "error": "error"}


class Histogram:
    """Counts values by the bucket whose upper bound is the first that is not below them."""

    def __init__(self, bounds: list[float]):
        assert all(low < high for low, high in pairwise(bounds))
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """The last one counts what is above every bound."""
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass(slots=True)
class Progress:
    """One choice as the metrics see it. Moments are of the monotonic clock."""

    arrived_at: float
    prompt_tokens: int
    tokens: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0


def _series(steps: tuple[float, ...], first: int, last: int) -> list[float]:
    """The same steps in every decade from 10**first on, up to 10**last."""
    bounds = [float(f"{step}e{decade}") for decade in range(first, last) for step in steps]
    return [*bounds, float(f"1e{last}")]


def _seconds() -> Histogram:
    return Histogram(_series((1, 2, 5), -3, 3))


def _fine_seconds() -> Histogram:
    return Histogram(_series((1, 1.5, 2, 3, 5, 7), -3, 1))


def _token_counts() -> Histogram:
    return Histogram(_series((1, 2, 5), 0, 6))


@dataclass
class Metrics:
    """Counters and histograms since this process began."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Choices by how they ended: stop, length, abort or error."""
    responses: Counter[int] = field(default_factory=Counter)
    """HTTP answers by status."""
    disconnects: int = 0
    """Clients that left before their answer was complete."""
    stalled: int = 0
    """Clients that were cut off because they did not read their answer."""
    time_to_first_token: Histogram = field(default_factory=_seconds)
    inter_token: Histogram = field(default_factory=_fine_seconds)
    latency: Histogram = field(default_factory=_seconds)
    queue_time: Histogram = field(default_factory=_seconds)
    prefill_time: Histogram = field(default_factory=_seconds)
    decode_time: Histogram = field(default_factory=_seconds)
    prompt_lengths: Histogram = field(default_factory=_token_counts)
    answer_lengths: Histogram = field(default_factory=_token_counts)

    def admitted(self, first: FirstToken) -> None:
        """A choice has left queue and prefill behind."""
        self.queue_time.observe(first.queued_s)
        self.prefill_time.observe(first.prefill_s)

    def advanced(self, progress: Progress, tokens: int, now: float) -> None:
        """A choice has new tokens."""
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
        """A choice has ended, for the raw `reason` of its update."""
        self.ended[_ENDS.get(reason, "stop")] += 1
        self.latency.observe(now - progress.arrived_at)
        self.prompt_lengths.observe(progress.prompt_tokens)
        self.answer_lengths.observe(progress.tokens)
        if progress.tokens:
            self.decode_time.observe(now - progress.first_token_at)

    def aborted(self, count: int) -> None:
        """Choices that their client gave up."""
        self.ended["abort"] += count

    def failed(self, count: int) -> None:
        """Choices that the end of the engine or of this process cut short."""
        self.ended["error"] += count
