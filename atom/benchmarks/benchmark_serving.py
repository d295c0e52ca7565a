"""Measures the throughput and latencies of a running server.

    python -m atom.benchmarks.benchmark_serving --model PATH --backend vllm \\
        --dataset-name random --random-input-len 1024 --random-output-len 1024 \\
        --num-prompts 1280 --max-concurrency 128 --ignore-eos --save-result

    flags ─▶ dataset ─▶ requests ─▶ load: one asyncio loop, one connection per request in flight
                                      └─▶ outputs ─▶ metrics ─▶ table, JSON file

`--sweep 1 4 16 64` does one run per concurrency, then writes a table and a plot of throughput against
interactivity.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import islice

from atom.benchmarks.serving.datasets import SampleRequest, TextSource, load_requests
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.flags import check, make_parser
from atom.benchmarks.serving.metrics import BenchmarkMetrics
from atom.benchmarks.serving.report import failures, make_result, result_lines, write_result
from atom.benchmarks.serving.run import benchmark, run_checked, text_source
from atom.benchmarks.serving.sweep import Point, check_plotting, point_args, table, write_sweep

__all__ = ["BenchmarkMetrics", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if the benchmark cannot run or every request failed."""
    args = make_parser().parse_args(argv)
    return run_checked(args, check, _sweep if args.sweep else _single)


async def _single(args: argparse.Namespace) -> int:
    source = text_source(args)
    metrics = await _measure(args, load_requests(args, source), source)
    return 0 if metrics.completed else 1


async def _sweep(args: argparse.Namespace) -> int:
    """Every run has prompts of its own, so that none hits the prefix cache of an earlier run."""
    check_plotting()
    source = text_source(args)
    runs = point_args(args)
    needed = sum(run.num_prompts for run in runs)
    loaded = load_requests(argparse.Namespace(**vars(args) | {"num_prompts": needed}), source)
    if len(loaded) < needed:
        raise BenchmarkError(f"this sweep needs {needed} prompts: set a smaller --num-prompts")
    samples = iter(loaded)
    points = []
    for run in runs:
        metrics = await _measure(run, list(islice(samples, run.num_prompts)), source)
        if not metrics.completed:
            return 1
        points.append(Point.of(run.max_concurrency, metrics))
    print(*table(points), sep="\n")
    for path in write_sweep(args, points, datetime.now().strftime("%Y%m%d-%H%M%S")):
        print(f"Written: {path}")
    return 0


async def _measure(
    args: argparse.Namespace, samples: Sequence[SampleRequest], source: TextSource
) -> BenchmarkMetrics:
    """One run, printed and saved."""
    run = await benchmark(args, samples, source.tokenizer)
    print(*result_lines(args, run.metrics), sep="\n")
    for line in failures(run.outputs):
        print(line, file=sys.stderr)
    if args.save_result:
        result = make_result(args, run.metrics, run.outputs, run.speculation, datetime.now())
        for path in write_result(args, result):
            print(f"Written: {path}")
    return run.metrics


if __name__ == "__main__":
    sys.exit(main())
