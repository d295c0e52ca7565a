"""The report of a run: a table on the console, and a JSON file with ATOM's keys."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from atom.benchmarks.backend_request_func import RequestFuncOutput
from atom.benchmarks.benchmark_utils import convert_to_pytorch_benchmark_format
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.metrics import METRICS, BenchmarkMetrics, percentile_name
from atom.benchmarks.serving.speculation import Speculation
from atom.shared.utils import envs

__all__ = ["DETAILS", "failures", "file_name", "make_result", "result_lines", "write_result"]

_WIDTH = 50
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")
"""Keys with one value per request."""


def result_lines(args: argparse.Namespace, metrics: BenchmarkMetrics) -> list[str]:
    """The table on the console."""
    lines = [
        f"{' Serving Benchmark Result ':=^{_WIDTH}}",
        _line("Successful requests:", metrics.completed),
        _line("Benchmark duration (s):", metrics.duration),
        _line("Total input tokens:", metrics.total_input),
        _line("Total generated tokens:", metrics.total_output),
        _line("Request throughput (req/s):", metrics.request_throughput),
    ]
    if metrics.request_goodput is not None:
        lines.append(_line("Request goodput (req/s):", metrics.request_goodput))
    lines.append(_line("Output token throughput (tok/s):", metrics.output_throughput))
    lines.append(_line("Total Token throughput (tok/s):", metrics.total_token_throughput))
    for name in args.percentile_metrics:
        short, long = METRICS[name]
        found = metrics.distributions[name]
        lines.append(f"{long:-^{_WIDTH}}")
        lines.append(_line(f"Mean {short} (ms):", found.mean))
        lines.append(_line(f"Median {short} (ms):", found.median))
        for percentile, value in found.percentiles:
            lines.append(_line(f"P{percentile_name(percentile)} {short} (ms):", value))
    return [*lines, "=" * _WIDTH]


def failures(outputs: Sequence[RequestFuncOutput]) -> list[str]:
    """A line per distinct error, the most frequent first."""
    counted = Counter(output.error for output in outputs if not output.success)
    return [f"{count} of {len(outputs)} requests failed: {error}" for error, count in counted.most_common(5)]


def make_result(
    args: argparse.Namespace,
    metrics: BenchmarkMetrics,
    outputs: Sequence[RequestFuncOutput],
    speculation: Speculation | None,
    now: datetime,
) -> dict[str, Any]:
    """The content of the JSON file."""
    result: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": args.model,
        "tokenizer_id": args.tokenizer or args.model,
        "best_of": args.best_of,
        "num_prompts": len(outputs),
    }
    result |= dict(args.metadata or [])
    result |= {
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **_figures(args, metrics),
        "accept_length": speculation.accept_length if speculation else None,
        "acceptance_rate": speculation.acceptance_rate if speculation else None,
        "forced_acceptance_length": speculation.forced_length if speculation else None,
    }
    return result | _details(outputs) if args.save_detailed else result


def file_name(args: argparse.Namespace, result: dict[str, Any]) -> str:
    """--result-filename, or a name with backend, rate, model and date."""
    if args.result_filename:
        return str(args.result_filename)
    concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
    base_model = args.model.rstrip("/").split("/")[-1]
    return f"{args.backend}-{args.request_rate}qps{concurrency}-{base_model}-{result['date']}.json"


def write_result(args: argparse.Namespace, result: dict[str, Any]) -> list[Path]:
    """Write the files and return their paths. Raises BenchmarkError."""
    path = Path(args.result_dir) / file_name(args, result)
    texts = {path: json.dumps(result)}
    if envs.SAVE_TO_PYTORCH_BENCHMARK_FORMAT:
        records = convert_to_pytorch_benchmark_format(args, result)
        texts[path.with_name(f"{path.name.removesuffix('.json')}.pytorch.json")] = json.dumps(records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for each, text in texts.items():
            each.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"cannot write the result: {error}") from None
    return list(texts)


def _figures(args: argparse.Namespace, metrics: BenchmarkMetrics) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "duration": metrics.duration,
        "completed": metrics.completed,
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        # ATOM's client writes this key with the colon, and scripts read it.
        "request_goodput:": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "concurrency": metrics.concurrency,
    }
    for name in args.percentile_metrics:
        found = metrics.distributions[name]
        figures |= {f"mean_{name}_ms": found.mean, f"median_{name}_ms": found.median}
        figures[f"std_{name}_ms"] = found.std
        figures |= {f"p{percentile_name(part)}_{name}_ms": value for part, value in found.percentiles}
    return figures


def _details(outputs: Sequence[RequestFuncOutput]) -> dict[str, list[Any]]:
    columns = (
        [output.prompt_len for output in outputs],
        [(output.output_tokens or 0) if output.success else 0 for output in outputs],
        [output.ttft for output in outputs],
        [output.itl for output in outputs],
        [output.generated_text for output in outputs],
        [output.error for output in outputs],
    )
    return dict(zip(DETAILS, columns, strict=True))


def _line(name: str, value: float) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"
