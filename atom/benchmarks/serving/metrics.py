"""The figures of a run, from the outputs of its requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from atom.benchmarks.backend_request_func import RequestFuncOutput

__all__ = [
    "METRICS",
    "SLO_METRICS",
    "BenchmarkMetrics",
    "Distribution",
    "calculate_metrics",
    "is_good",
    "percentile_name",
]

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Short and long titles, by the names in flags and keys."""
SLO_METRICS = ("ttft", "tpot", "e2el")
"""Metrics with one value per request."""


@dataclass(frozen=True)
class Distribution:
    """Figures of one latency, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: list[tuple[float, float]]
    """(percentile, value), in the order of the flag."""

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> "Distribution":
        """All values are zero for an empty `seconds`."""
        values = np.array(seconds if len(seconds) else [0.0]) * 1e3
        return cls(
            float(values.mean()),
            float(np.median(values)),
            float(values.std()),
            [(percentile, float(np.percentile(values, percentile))) for percentile in percentiles],
        )


@dataclass(frozen=True)
class BenchmarkMetrics:
    """The figures of one run, without failed requests."""

    duration: float
    """Seconds from the first request to the end of the last response."""
    completed: int
    total_input: int
    total_output: int
    good: int | None
    """Requests that met every goal; None without --goodput."""
    concurrency: float
    """Requests in flight, on average."""
    distributions: dict[str, Distribution] = field(repr=False)
    """By the names of METRICS."""

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def request_goodput(self) -> float | None:
        return None if self.good is None else self.good / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input + self.total_output) / self.duration


def calculate_metrics(
    outputs: Sequence[RequestFuncOutput],
    duration: float,
    percentiles: Sequence[float],
    goals_ms: dict[str, float],
) -> BenchmarkMetrics:
    """The figures; sets `tpot` of every successful output, which must have `output_tokens`."""
    done = [output for output in outputs if output.success]
    for output in done:
        tokens = output.output_tokens or 0
        output.tpot = (output.latency - output.ttft) / (tokens - 1) if tokens > 1 else 0.0
    measured = {
        "ttft": [output.ttft for output in done],
        "tpot": [output.tpot for output in done if (output.output_tokens or 0) > 1],
        "itl": [interval for output in done for interval in output.itl],
        "e2el": [output.latency for output in done],
    }
    return BenchmarkMetrics(
        duration=duration,
        completed=len(done),
        total_input=sum(output.prompt_len for output in done),
        total_output=sum(output.output_tokens or 0 for output in done),
        good=sum(is_good(output, goals_ms) for output in done) if goals_ms else None,
        concurrency=sum(measured["e2el"]) / duration,
        distributions={name: Distribution.of(values, percentiles) for name, values in measured.items()},
    )


def percentile_name(percentile: float) -> str:
    """The percentile as text, 99.0 as "99", for keys and titles."""
    return f"{percentile:g}"


def is_good(output: RequestFuncOutput, goals_ms: dict[str, float]) -> bool:
    """Whether all goals are met. The TPOT of a single token is 0, which meets every goal."""
    values = {"ttft": output.ttft, "tpot": output.tpot, "e2el": output.latency}
    return all(values[name] * 1e3 <= goal for name, goal in goals_ms.items())
