"""Flags that the benchmarks share, and parsers of values, which raise ArgumentTypeError."""

import argparse
from collections.abc import Callable
from typing import TypeVar

from atom.benchmarks.serving.metrics import METRICS, SLO_METRICS

__all__ = ["add_metric_flags", "at_least", "goal", "metric_names", "pair", "percentiles", "positive"]

N = TypeVar("N", int, float)


def add_metric_flags(group: argparse._ArgumentGroup, default_percentiles: str) -> None:
    """Which figures are reported, and goals."""
    group.add_argument(
        "--percentile-metrics",
        type=metric_names,
        default="ttft,tpot,itl",
        help=f"Metrics to report, separated by commas: {', '.join(METRICS)}.",
    )
    group.add_argument(
        "--metric-percentiles",
        type=percentiles,
        default=default_percentiles,
        help="Percentiles, such as 25,50,99.9.",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        type=goal,
        metavar="METRIC:MS",
        help=f"Goals for {', '.join(SLO_METRICS)} in milliseconds; goodput counts requests that meet all.",
    )


def at_least(kind: Callable[[str], N], least: N) -> Callable[[str], N]:
    """A parser of numbers that are not below `least`."""

    def parse(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is too small: it must be at least {least}")
        return value

    return parse


def positive(text: str) -> float:
    """A number above 0; inf is one."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def metric_names(text: str) -> list[str]:
    """Names of METRICS, separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a metric: choose from {', '.join(METRICS)}")
    return names


def percentiles(text: str) -> list[float]:
    """Numbers from 0 to 100, separated by commas."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: it must be numbers separated by commas, such as 25,50,99"
        ) from None
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: percentiles are from 0 to 100")
    return values


def goal(text: str) -> tuple[str, float]:
    """METRIC:MS, for --goodput."""
    name, colon, limit = text.partition(":")
    if not colon or name not in SLO_METRICS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: it must be METRIC:MS with one of {', '.join(SLO_METRICS)}"
        )
    return name, positive(limit)


def pair(text: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value
