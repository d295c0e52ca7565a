"""From the outcomes of requests to the figures of a run."""

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
    "percentile_name",
]

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Short and long names by the names that flags and keys use."""
SLO_METRICS = ("ttft", "tpot", "e2el")
"""Metrics that one request has one value of."""


@dataclass(frozen=True)
class Distribution:
    """Milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: list[tuple[float, float]]
    """(percentile, value), in the order asked for."""

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> "Distribution":
        """All zero where nothing was measured."""
        values = np.array(seconds if len(seconds) else [0.0]) * 1e3
        return cls(
            float(values.mean()),
            float(np.median(values)),
            float(values.std()),
            [(percentile, float(np.percentile(values, percentile))) for percentile in percentiles],
        )


@dataclass(frozen=True)
class BenchmarkMetrics:
    """The figures of one run. Failed requests count in none of them."""

    duration: float
    """Seconds from the first request sent to the last answer."""
    completed: int
    total_input: int
    total_output: int
    good: int | None
    """Requests that met every goal; None without --goodput."""
    concurrency: float
    """Requests in flight, on average."""
    distributions: dict[str, Distribution] = field(repr=False)
    """By the names of METRICS, all of them."""

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
    """Needs `output_tokens` of every successful output; fills in its `tpot`."""
    done = [output for output in outputs if output.success]
    for output in done:
        tokens = output.output_tokens or 0
        output.tpot = (output.latency - output.ttft) / (tokens - 1) if tokens > 1 else 0.0
    measured = {
        "ttft": [output.ttft for output in done],
        "tpot": [output.tpot for output in done if (output.output_tokens or 0) > 1],
        "itl": [gap for output in done for gap in output.itl],
        "e2el": [output.latency for output in done],
    }
    return BenchmarkMetrics(
        duration=duration,
        completed=len(done),
        total_input=sum(output.prompt_len for output in done),
        total_output=sum(output.output_tokens or 0 for output in done),
        good=sum(_is_good(output, goals_ms) for output in done) if goals_ms else None,
        concurrency=sum(measured["e2el"]) / duration,
        distributions={name: Distribution.of(values, percentiles) for name, values in measured.items()},
    )


def percentile_name(percentile: float) -> str:
    """99 for 99.0, 99.9 as it is: part of keys and of lines."""
    return f"{percentile:g}"


def _is_good(output: RequestFuncOutput, goals_ms: dict[str, float]) -> bool:
    """An answer of one token has no time per output token, and so misses no goal for it."""
    values = {"ttft": output.ttft, "tpot": output.tpot, "e2el": output.latency}
    return all(values[name] * 1e3 <= goal for name, goal in goals_ms.items())
