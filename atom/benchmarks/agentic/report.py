"""The figures of a run of sessions: latencies of first and later turns, goodput, hit rate, each session."""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from atom.benchmarks.agentic.cache_hits import CacheHits
from atom.benchmarks.agentic.replay import TurnResult
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.metrics import BenchmarkMetrics, calculate_metrics, is_good
from atom.benchmarks.serving.report import result_lines

__all__ = ["AgenticMetrics", "SessionFigures", "measure", "report_lines", "write_report"]

_WIDTH = 50


@dataclass(frozen=True)
class SessionFigures:
    """One session; times in milliseconds."""

    session: str
    turns: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    median_ttft_ms: float
    median_tpot_ms: float


@dataclass(frozen=True)
class AgenticMetrics:
    """A run; hit rates are fractions of all prompt tokens."""

    serving: BenchmarkMetrics
    median_prompt: float
    first_ttft_ms: float
    """Median of first turns."""
    later_ttft_ms: float
    """Median of all other turns."""
    known_rate: float
    """Prompt tokens that were in earlier prompts and replies: the highest hit rate that is possible."""
    hit_rate: float | None
    """None if the server's usage does not say."""
    tier_rates: dict[str, float]
    """Hit rates by tier, from the server's /metrics; empty if it does not say."""
    good_output_throughput: float | None
    """Output tokens/s of requests that met every goal; None without --goodput."""
    sessions: list[SessionFigures]


def measure(
    results: Sequence[TurnResult],
    duration_s: float,
    percentiles: Sequence[float],
    goals_ms: dict[str, float],
    hits: CacheHits | None = None,
) -> AgenticMetrics:
    """The figures of the requests that did not fail."""
    for result in results:
        result.output.prompt_len = result.output.prompt_tokens or result.output.prompt_len
    serving = calculate_metrics([result.output for result in results], duration_s, percentiles, goals_ms)
    done = [result for result in results if result.output.success]
    prompt = sum(result.output.prompt_len for result in done)
    cached = [result.output.cached_tokens for result in done if result.output.cached_tokens is not None]
    good = [result for result in done if is_good(result.output, goals_ms)]
    good_tokens = sum(result.output.output_tokens or 0 for result in good)
    return AgenticMetrics(
        serving=serving,
        median_prompt=_median(result.output.prompt_len for result in done),
        first_ttft_ms=_median(result.output.ttft * 1e3 for result in done if result.turn == 0),
        later_ttft_ms=_median(result.output.ttft * 1e3 for result in done if result.turn > 0),
        known_rate=sum(result.known_tokens for result in done) / prompt if prompt else 0.0,
        hit_rate=sum(cached) / prompt if cached and prompt else None,
        tier_rates=hits.rates if hits is not None else {},
        good_output_throughput=good_tokens / duration_s if goals_ms else None,
        sessions=_sessions(results),
    )


def report_lines(args: argparse.Namespace, metrics: AgenticMetrics) -> list[str]:
    """The table on the console."""
    hits = "unknown: the server's usage has no cached_tokens"
    if metrics.hit_rate is not None:
        hits = f"{metrics.hit_rate:.3f}"
    lines = result_lines(args, metrics.serving)[:-1]
    lines += [
        f"{'Sessions':-^{_WIDTH}}",
        _line("Sessions and forks:", str(len(metrics.sessions))),
        _line("Median prompt (tokens):", f"{metrics.median_prompt:.0f}"),
        _line("Median TTFT of first turns (ms):", f"{metrics.first_ttft_ms:.2f}"),
        _line("Median TTFT of later turns (ms):", f"{metrics.later_ttft_ms:.2f}"),
        _line("Known part of the prompts:", f"{metrics.known_rate:.3f}"),
        _line("Hit rate:", hits),
    ]
    if len(metrics.tier_rates) > 1:
        lines += [_line(f"Hit rate of {name}:", f"{rate:.3f}") for name, rate in metrics.tier_rates.items()]
    if metrics.good_output_throughput is not None:
        lines.append(_line("Output tok/s that met the goals:", f"{metrics.good_output_throughput:.2f}"))
    if args.num_gpus is not None:
        per_gpu = metrics.serving.output_throughput / args.num_gpus
        lines.append(_line("Output tok/s per GPU:", f"{per_gpu:.2f}"))
    return [*lines, "=" * _WIDTH]


def write_report(args: argparse.Namespace, metrics: AgenticMetrics, now: datetime) -> Path:
    """A JSON file with all figures and each session. Raises BenchmarkError."""
    date = now.strftime("%Y%m%d-%H%M%S")
    base_model = args.model.rstrip("/").split("/")[-1]
    path = Path(args.result_dir) / (args.result_filename or f"agentic-{base_model}-{date}.json")
    figures = asdict(metrics)
    serving = metrics.serving
    figures["serving"] |= {
        "request_throughput": serving.request_throughput,
        "request_goodput": serving.request_goodput,
        "output_throughput": serving.output_throughput,
        "total_token_throughput": serving.total_token_throughput,
    }
    result = {"date": date, "flags": _plain(vars(args)), **figures}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"cannot write the result: {error}") from None
    return path


def _sessions(results: Sequence[TurnResult]) -> list[SessionFigures]:
    grouped: dict[str, list[TurnResult]] = {}
    for result in results:
        grouped.setdefault(result.session, []).append(result)
    return [_session(name, turns) for name, turns in sorted(grouped.items())]


def _session(name: str, turns: Sequence[TurnResult]) -> SessionFigures:
    outputs = [turn.output for turn in turns if turn.output.success]
    return SessionFigures(
        session=name,
        turns=len(turns),
        failed=len(turns) - len(outputs),
        prompt_tokens=sum(output.prompt_len for output in outputs),
        output_tokens=sum(output.output_tokens or 0 for output in outputs),
        cached_tokens=sum(output.cached_tokens or 0 for output in outputs),
        median_ttft_ms=_median(output.ttft * 1e3 for output in outputs),
        median_tpot_ms=_median(output.tpot * 1e3 for output in outputs),
    )


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Flags as JSON has them: it has no infinity."""
    return {name: str(value) if value == float("inf") else value for name, value in values.items()}


def _line(name: str, value: str) -> str:
    return f"{name:<40} {value}"
