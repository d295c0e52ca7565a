"""The engine on a GPU, compared with vLLM's recorded figures and with the hardware's limits.

    python -m benchmarks.gpu --models Qwen3-0.6B --rows batch-1 batch-64

Runs every row of every model that has no result yet, and writes docs/measurements/benchmarks.md. Engine flags
are passed on (--enforce-eager, ...); weights are random unless --no-load-dummy.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom import EngineArgs
from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.config.cli import CommandLineParser, explicit_fields, with_environment
from atom.shared.config.fields import ConfigError
from atom.shared.utils.process import spawn
from benchmarks.common.processes import stop
from benchmarks.gpu_runs.gpu_document import terminal_table
from benchmarks.gpu_runs.gpu_results import ResultFile, SettingsError
from benchmarks.gpu_runs.gpu_rows import READY, READY_FIRST, ROWS, Figure
from benchmarks.gpu_runs.gpu_run import Launch
from benchmarks.pages.document import write_document

_SHIPPED = Path(__file__).with_name("models")
# The smallest first, so that errors show within seconds.
_MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B")
_OPTIONS: dict[str, Any] = {
    "load_dummy": True,
    "max_model_len": 8192,
    "gpu_memory_utilization": 0.85,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 16384,
}


@dataclass(frozen=True)
class ModelRun:
    """The rows to measure of one model, with its options."""

    file: ResultFile
    path: str
    options: dict[str, Any]
    rows: list[str]
    shrink: int

    def starts(self) -> list[list[str]]:
        """The rows to measure, one list for each start of the engine.

        A start with warm caches needs a start before it, which is also a row.
        """
        content = self.file.read()
        left = [name for name in self.rows if content is None or name not in content.rows]
        first = [name for name in left if name == READY_FIRST.name]
        second = [name for name in left if name != READY_FIRST.name]
        return [first, second] if READY.name in left else [rows for rows in (first, second) if rows]


def main() -> None:
    """Measure, print the table, write the document; exit status 1 if a row is missing."""
    args = _parser().parse_args()
    try:
        runs = _runs(args)
        failures = [] if args.document_only else _measure(runs, args.time_limit, args.fresh)
        results = {run.file.model: content for run in runs if (content := run.file.read()) is not None}
        print(terminal_table(results))
        if results:
            write_document(args.results, args.document)
    except (ConfigError, SettingsError, BenchmarkError) as error:
        sys.exit(f"error: {error}")
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


def _parser() -> argparse.ArgumentParser:
    parser = CommandLineParser(prog="benchmarks.gpu", description=__doc__)
    add = parser.add_argument_group("benchmark").add_argument
    add("--models", nargs="+", default=_MODELS, help="shipped names, or directories with config.json")
    add("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="which rows to measure")
    add("--results", type=Path, default=Path("docs/measurements/results"), help="folder of the JSON results")
    add("--document", type=Path, default=Path("docs/measurements/benchmarks.md"), help="file to write")
    add("--document-only", action="store_true", help="measure nothing, write from the results")
    add("--fresh", action="store_true", help="measure all rows again")
    add("--time-limit", type=float, default=480.0, help="seconds for one model")
    add("--shrink", type=int, default=1, help="divide requests and lengths, to try the script")
    EngineArgs.add_cli_args(parser)
    return parser


def _runs(args: argparse.Namespace) -> list[ModelRun]:
    """Raises ConfigError for invalid arguments, before anything starts."""
    args = with_environment(args)
    given = explicit_fields(args)
    if "model" in given:
        raise ConfigError("--model: name the models with --models")
    if args.shrink < 1:
        raise ConfigError(f"--shrink {args.shrink}: at least 1")
    options = _OPTIONS | {name: getattr(args, name) for name in sorted(given)}
    return [
        ModelRun(ResultFile(args.results, Path(name).name), _directory(name), options, args.rows, args.shrink)
        for name in args.models
    ]


def _directory(model: str) -> str:
    shipped = _SHIPPED / model
    path = shipped if shipped.is_dir() else Path(model)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"--models {model}: no directory with config.json; shipped are {', '.join(_MODELS)}"
        )
    return str(path.resolve())


def _measure(runs: list[ModelRun], time_limit_s: float, fresh: bool) -> list[str]:
    """Run every run; returns the reasons why rows are missing."""
    failures = []
    for run in runs:
        if fresh:
            run.file.remove(set(run.rows))
        run.file.check_options(run.options, run.shrink)
        deadline = time.monotonic() + time_limit_s
        try:
            for rows in run.starts():
                _start(run, rows, deadline)
        except BenchmarkError as error:
            failures.append(str(error))
    return failures


def _start(run: ModelRun, rows: list[str], deadline: float) -> None:
    """One start of the engine. Raises BenchmarkError when it fails or takes too long."""
    model = run.file.model
    print(f"{model}  starting for {', '.join(_in_order(rows)) or 'warm caches'}", flush=True)
    launch = Launch(
        model,
        run.path,
        run.options,
        str(run.file.directory),
        _in_order(rows),
        run.shrink,
        time.monotonic(),
    )
    process = spawn("benchmarks.gpu_runs.gpu_run", launch)
    try:
        status = process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        text = "out of time; finished rows are stored, run again for the rest"
        raise BenchmarkError(f"{model}: {text}") from None
    finally:
        stop(process)
    if status:
        raise BenchmarkError(f"{model}: the run ended with exit status {status}")


def _in_order(rows: list[str]) -> list[str]:
    """The rows with those of the start first, which are measured first."""
    return sorted(rows, key=lambda name: ROWS[name].figure is not Figure.READY)


if __name__ == "__main__":
    main()
