"""A sweep over concurrencies: a table, and a plot of throughput against interactivity."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.metrics import BenchmarkMetrics

__all__ = ["Point", "check_plotting", "point_args", "save_plot", "table", "write_sweep"]

_PROMPTS_PER_STREAM = 10
_COLUMNS = (
    "concurrency",
    "requests",
    "output tok/s",
    "total tok/s",
    "tok/s per user",
    "TTFT ms",
    "TPOT ms",
    "E2EL ms",
)


@dataclass(frozen=True)
class Point:
    """A run at one concurrency. Latencies are medians in milliseconds."""

    concurrency: int
    completed: int
    output_throughput: float
    total_throughput: float
    ttft: float
    tpot: float
    e2el: float
    goodput: float | None
    """Requests per second that met all goals; None without --goodput."""

    @classmethod
    def of(cls, concurrency: int, metrics: BenchmarkMetrics) -> "Point":
        found = metrics.distributions
        return cls(
            concurrency,
            metrics.completed,
            metrics.output_throughput,
            metrics.total_token_throughput,
            found["ttft"].median,
            found["tpot"].median,
            found["e2el"].median,
            metrics.request_goodput,
        )

    @property
    def interactivity(self) -> float:
        """Tokens/s per user; 0 if outputs had a single token."""
        return 1e3 / self.tpot if self.tpot else 0.0


def point_args(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The arguments of each run, sorted by concurrency."""
    return [_at(args, concurrency) for concurrency in sorted(set(args.sweep))]


def _at(args: argparse.Namespace, concurrency: int) -> argparse.Namespace:
    name = args.result_filename
    changed: dict[str, Any] = {
        "max_concurrency": concurrency,
        "num_prompts": args.num_prompts or _PROMPTS_PER_STREAM * concurrency,
        "result_filename": name and f"{name.removesuffix('.json')}-concurrency{concurrency}.json",
    }
    return argparse.Namespace(**vars(args) | changed)


def table(points: Sequence[Point]) -> list[str]:
    """The lines of a Markdown table, aligned for terminals."""
    with_goodput = any(point.goodput is not None for point in points)
    header = [*_COLUMNS, "goodput req/s"] if with_goodput else [*_COLUMNS]
    rows = [header, ["-" * (len(name) - 1) + ":" for name in header]]
    for point in points:
        figures = [point.output_throughput, point.total_throughput, point.interactivity]
        figures += [point.ttft, point.tpot, point.e2el]
        if with_goodput:
            figures.append(point.goodput or 0.0)
        rows.append([str(point.concurrency), str(point.completed), *(f"{figure:.2f}" for figure in figures)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"| {' | '.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]


def check_plotting() -> None:
    """Raises BenchmarkError if matplotlib is not installed; called before the first run."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise BenchmarkError("--sweep needs matplotlib: pip install 'atom-serve[bench]'") from None


def save_plot(points: Sequence[Point], title: str, path: Path, num_gpus: int | None = None) -> None:
    """A PNG of output tokens/s, or those per GPU, over tokens/s per user, with a point per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    positions = [(point.interactivity, point.output_throughput / (num_gpus or 1)) for point in points]
    axes.plot([x for x, _ in positions], [y for _, y in positions], marker="o")
    for point, position in zip(points, positions, strict=True):
        axes.annotate(str(point.concurrency), position, xytext=(5, 5), textcoords="offset points")
    axes.set_title(f"{title}: one point per concurrency")
    axes.set_xlabel("interactivity: tokens/s per user (1 / median TPOT)")
    axes.set_ylabel("throughput: output tokens/s" + (" per GPU" if num_gpus else ""))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150, format="png")


def write_sweep(
    args: argparse.Namespace, points: Sequence[Point], date: str, num_gpus: int | None = None
) -> list[Path]:
    """Write the table and the plot next to the files of the runs. Raises BenchmarkError."""
    base_model = args.model.rstrip("/").split("/")[-1]
    name = f"{args.backend}-{args.request_rate}qps-sweep-{base_model}-{date}"
    if args.result_filename:
        name = f"{args.result_filename.removesuffix('.json')}-sweep"
    directory = Path(args.result_dir)
    # with_suffix would cut a name at its last dot.
    text = directory / f"{name}.md"
    plot = directory / f"{name}.png"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text.write_text("\n".join(table(points)) + "\n", encoding="utf-8")
        save_plot(points, base_model, plot, num_gpus)
    except OSError as error:
        raise BenchmarkError(f"cannot write the sweep: {error}") from None
    return [text, plot]
