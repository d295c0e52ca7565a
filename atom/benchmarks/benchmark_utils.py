"""Converts results to the format of PyTorch's benchmark dashboard."""

import argparse
from typing import Any

__all__ = ["convert_to_pytorch_benchmark_format"]

_STATISTICS = ("median", "mean", "std", "p99")
_METRICS = ("ttft", "tpot", "itl")


def convert_to_pytorch_benchmark_format(
    args: argparse.Namespace, result: dict[str, Any]
) -> list[dict[str, Any]]:
    """One record per statistic in `result`."""
    keys = [f"{statistic}_{metric}_ms" for metric in _METRICS for statistic in _STATISTICS]
    return [
        {
            "benchmark": {"name": "ATOM serving benchmark", "extra_info": {"args": _plain(vars(args))}},
            "model": {"name": args.model},
            "metric": {"name": key, "benchmark_values": [result[key]], "extra_info": {}},
        }
        for key in keys
        if key in result
    ]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values with infinity as text, because JSON has none."""
    return {name: "inf" if value == float("inf") else value for name, value in values.items()}
