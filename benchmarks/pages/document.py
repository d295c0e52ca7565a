"""docs/measurements/benchmarks.md: every recorded result, with its command, hardware, software and date."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_runs.gpu_document import gpu_section
from benchmarks.gpu_runs.gpu_results import Content, ResultFile
from benchmarks.pages.records import KINDS, Record, read_json, read_record

__all__ = ["document", "write_document"]

Figures = dict[str, Any]

_TITLES = {
    "serving": ("Serving", "A client and a server over HTTP: `python -m atom.benchmarks.benchmark_serving`."),
    "throughput": (
        "Throughput",
        "All requests at once, offline: `make bench-throughput`. Rates are over the whole time, prompts "
        "included.",
    ),
    "latency": ("Latency", "One batch after another, offline: `make bench-latency`."),
    "kernels": (
        "Kernels",
        "Each op with each provider, `make bench-kernels`: *of roofline* is the least time for its bytes "
        "or its operations, at the measured rates of the device's own copy and GEMM, divided by the time "
        "that it took.",
    ),
    "all_reduce": (
        "All-reduce",
        "The all-reduce, add and norm after each layer, between the GPUs of one host: "
        "`make bench-all-reduce`. *Two calls* are torch.distributed and a norm; layers call the "
        "communicator.",
    ),
    "decode_step": (
        "Decode steps",
        "Steps whose kernels are recorded: `make bench-step ARGS=--kernels`. *ms* is the time of a step that "
        "is launched while the previous one runs; [roofline](roofline.md) compares it with the least that it "
        "could take.",
    ),
    "scheduler": (
        "Scheduler",
        "The engine core's time for a step, without a model: `make bench-scheduler`.",
    ),
    "accuracy": (
        "Accuracy",
        "lm-eval on the server and on transformers: `make accuracy`, [accuracy](accuracy.md).",
    ),
}


def write_document(folder: Path, path: Path) -> None:
    """Raises BenchmarkError or SettingsError for a file in the folder that is not a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(folder), encoding="utf-8")


def document(folder: Path) -> str:
    """The whole page, from all results in the folder."""
    gpu: dict[str, Content] = {}
    records: list[Record] = []
    for path in sorted(folder.glob("*.json")):
        if "benchmark" in read_json(path):
            records.append(read_record(path))
        elif content := ResultFile(folder, path.stem).read():
            gpu[path.stem] = content
    parts = [
        "# Benchmarks",
        "Written by `make bench-document` from the results in `docs/measurements/results`; change neither by "
        "hand. A result is added by `python -m benchmarks.record FILE`, FILE being what a benchmark wrote "
        "with `--output-json`.",
        *([gpu_section(gpu)] if gpu else []),
        *(_section(kind, found) for kind in KINDS if (found := [one for one in records if one.kind == kind])),
    ]
    return "\n\n".join(parts) + "\n"


def _section(kind: str, records: list[Record]) -> str:
    title, about = _TITLES[kind]
    return "\n\n".join([f"## {title}", about, *map(_record, records)])


def _record(record: Record) -> str:
    names = [name for name in ("hardware", "software", "server", "command", "date") if name in record.facts]
    quoted = ("server", "command")
    facts = [
        f"- {name.capitalize()}: {f'`{record.facts[name]}`' if name in quoted else record.facts[name]}"
        for name in names
    ]
    return "\n\n".join([f"### {record.name}", "\n".join(facts), _BODIES[record.kind](record.figures)])


def _table(columns: list[str], rows: Iterable[list[str]], words: int = 1) -> str:
    """The first `words` columns are text, the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(columns) - words)
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, rule, *rows))


def _serving(figures: Figures) -> str:
    line = (
        f"{figures['completed']} requests in {figures['duration']:.1f} s, request rate "
        f"{figures['request_rate']}, at most {figures['max_concurrency'] or 'all'} at once: "
        f"{figures['request_throughput']:.2f} requests/s, {figures['output_throughput']:.1f} output "
        f"tokens/s, {figures['total_token_throughput']:.1f} tokens/s with prompts."
    )
    metrics = [name for name in ("ttft", "tpot", "itl", "e2el") if f"mean_{name}_ms" in figures]
    if not metrics:
        return line
    ends = f"_{metrics[0]}_ms"
    spread = [name.removesuffix(ends) for name in figures if name.endswith(ends)]
    rows = [
        [metric.upper(), *(f"{figures[f'{one}_{metric}_ms']:.2f}" for one in spread)] for metric in metrics
    ]
    return f"{line}\n\n" + _table(["", *(f"{one} ms" for one in spread)], rows)


def _throughput(figures: Figures) -> str:
    columns = [
        "requests",
        "prompt tokens",
        "generated tokens",
        "s",
        "requests/s",
        "tokens/s",
        "output tokens/s",
    ]
    counts = ("num_requests", "total_input_tokens", "total_output_tokens")
    rates = ("elapsed_time", "requests_per_second", "tokens_per_second", "output_tokens_per_second")
    row = [f"{figures[name]:,}" for name in counts] + [f"{figures[name]:,.2f}" for name in rates]
    return _table(columns, [row], words=0)


def _latency(figures: Figures) -> str:
    line = (
        f"{figures['batch_size']} requests of {figures['input_len']} tokens in and "
        f"{figures['output_len']} out: {figures['output_tokens_per_second']:.1f} output tokens/s."
    )
    kinds = {
        "whole batch": ("latency", ""),
        "first token": ("ttft", "ttft_"),
        "later token": ("tpot", "tpot_"),
    }
    rows = [
        [
            title,
            *(
                f"{value * 1e3:.2f}"
                for value in (figures[f"avg_{mean}"], *figures[f"{spread}percentiles"].values())
            ),
        ]
        for title, (mean, spread) in kinds.items()
    ]
    return f"{line}\n\n" + _table(["", "mean ms", *(f"p{name} ms" for name in figures["percentiles"])], rows)


def _kernels(figures: Figures) -> str:
    line = (
        f"Shapes of {figures['model']} in {figures['dtype']}; the device copies "
        f"{figures['copy_bytes_per_s'] / 1e9:,.1f} GB/s and multiplies "
        f"{figures['matmul_flops_per_s'] / 1e12:,.3f} TFLOP/s."
    )
    rows = [
        [
            row["op"], row["provider"], row["step"], row["shape"], row["bound"],
            f"{row['microseconds']:,.1f}", f"{row['floor_microseconds']:,.1f}", f"{row['of_roofline']:.0%}",
        ]
        for row in figures["rows"]
        if "of_roofline" in row
    ]  # fmt: skip
    return f"{line}\n\n" + _table(
        ["op", "provider", "step", "shape", "bound", "us", "floor us", "of roofline"], rows, 5
    )


def _all_reduce(figures: Figures) -> str:
    line = f"{figures['ranks']} ranks ({figures['device']}), {figures['dtype']}, width {figures['width']:,}."
    rows = [
        [
            f"{row['tokens']:,}", f"{row['two_calls_us']:,.1f}", f"{row['communicator_us']:,.1f}",
            "yes" if row["one_kernel"] else "no",
        ]
        for row in figures["rows"]
    ]  # fmt: skip
    return f"{line}\n\n" + _table(["tokens", "two calls us", "communicator us", "one kernel"], rows, words=0)


def _decode_step(figures: Figures) -> str:
    drafts = f", {figures['drafts']} drafts of {figures['method']}" if figures["drafts"] else ""
    context = f", contexts of {figures['context']:,} tokens" if figures["context"] else ""
    rows = []
    for row in figures["rows"]:
        longest = [f"`{one['name']}` {one['runs']} x, {one['microseconds']:,.1f}" for one in row["times"][:4]]
        counts = [
            str(row["rows"]),
            f"{row['tokens']:.2f}",
            f"{row['ahead_ms']:.3f}",
            f"{row['device_ms']:.3f}",
        ]
        rows.append(["; ".join(longest), *counts, str(row["kernels"])])
    columns = ["longest kernels, us in all", "rows", "tokens", "ms", "device ms", "kernels"]
    return f"{figures['model']} in {figures['dtype']}{context}{drafts}.\n\n" + _table(columns, rows)


def _scheduler(figures: Figures) -> str:
    rows = [
        [f"{row['running']:,}", f"{row['median_us']:.1f}", f"{row['p99_us']:.1f}", f"{row['ratio']:.2f}"]
        for row in figures["rows"]
    ]
    return _table(["running requests", "median us", "p99 us", "ratio"], rows, words=0)


def _accuracy(figures: Figures) -> str:
    line = (
        f"Model {figures['model']}, {figures['dtype']}; {figures['harness']}. "
        f"{figures['answers']} answers; different texts: {figures['different_texts']}, "
        f"different greedy flags: {figures['different_flags']}, largest difference of "
        f"{figures['scores']} log probabilities: {figures['largest_difference']:.1e}."
    )
    runs = [name for name in figures["rows"][0] if name not in ("task", "metric")]
    rows = [[row["task"], row["metric"], *(f"{row[run]:.4f}" for run in runs)] for row in figures["rows"]]
    return f"{line}\n\n" + _table(["task", "metric", *runs], rows, 2)


_BODIES: dict[str, Callable[[Figures], str]] = {
    "serving": _serving,
    "throughput": _throughput,
    "latency": _latency,
    "kernels": _kernels,
    "all_reduce": _all_reduce,
    "decode_step": _decode_step,
    "scheduler": _scheduler,
    "accuracy": _accuracy,
}
