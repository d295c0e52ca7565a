"""The engine on a GPU, beside vLLM's recorded figures and what the hardware allows.

    python -m atom.benchmarks.gpu --models Qwen3-0.6B --rows batch-1 batch-64

Runs every row of every model, unless its result is there already, and writes docs/benchmarks.md.
Engine flags are passed on (--enforce-eager, ...); weights are random unless --no-load-dummy.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom import EngineArgs
from atom.benchmarks.document import write_document
from atom.benchmarks.gpu_document import terminal_table
from atom.benchmarks.gpu_results import ResultFile, SettingsError
from atom.benchmarks.gpu_rows import READY, READY_FIRST, ROWS, Figure
from atom.benchmarks.gpu_run import Launch
from atom.benchmarks.serving.errors import BenchmarkError
from atom.config.cli import CommandLineParser, explicit_fields, with_environment
from atom.config.fields import ConfigError
from atom.utils.process import spawn

_SHIPPED = Path(__file__).with_name("models")
# The small one first: what is broken shows after seconds.
_MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B")
_OPTIONS: dict[str, Any] = {
    "load_dummy": True,
    "max_model_len": 8192,
    "gpu_memory_utilization": 0.85,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 16384,
}
_STOP_S = 20.0


@dataclass(frozen=True)
class GenerateRequest:
    """One model and what is asked of it."""

    file: ResultFile
    path: str
    options: dict[str, Any]
    rows: list[str]
    shrink: int

    def starts(self) -> list[list[str]]:
        """The rows that are left, as one list for each start of the engine.

        A start that is to show warm caches needs one before it, which is a row of its own.
        """
        content = self.file.read()
        left = [name for name in self.rows if content is None or name not in content.rows]
        first = [name for name in left if name == READY_FIRST.name]
        second = [name for name in left if name != READY_FIRST.name]
        return [first, second] if READY.name in left else [rows for rows in (first, second) if rows]


def main() -> None:
    """Measure, print the table, write the document; exit status 1 when a row is missing."""
    args = _parser().parse_args()
    try:
        jobs = _jobs(args)
        failures = [] if args.document_only else _measure(jobs, args.time_limit, args.fresh)
        results = {job.file.model: content for job in jobs if (content := job.file.read()) is not None}
        print(terminal_table(results))
        if results:
            write_document(args.results, args.document)
    except (ConfigError, SettingsError, BenchmarkError) as error:
        sys.exit(f"error: {error}")
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


def _parser() -> argparse.ArgumentParser:
    parser = CommandLineParser(prog="atom.benchmarks.gpu", description=__doc__)
    add = parser.add_argument_group("benchmark").add_argument
    add("--models", nargs="+", default=_MODELS, help="shipped names, or directories with config.json")
    add("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="which rows to measure")
    add("--results", type=Path, default=Path("docs/benchmarks"), help="folder of the JSON results")
    add("--document", type=Path, default=Path("docs/benchmarks.md"), help="file to write")
    add("--document-only", action="store_true", help="measure nothing, write from the results")
    add("--fresh", action="store_true", help="measure rows again that are there")
    add("--time-limit", type=float, default=480.0, help="seconds for one model")
    add("--shrink", type=int, default=1, help="divide requests and lengths, to try the script")
    EngineArgs.add_cli_args(parser)
    return parser


def _jobs(args: argparse.Namespace) -> list[GenerateRequest]:
    """Raises ConfigError for what cannot be, before anything starts."""
    args = with_environment(args)
    given = explicit_fields(args)
    if "model" in given:
        raise ConfigError("--model: name the models with --models")
    if args.shrink < 1:
        raise ConfigError(f"--shrink {args.shrink}: at least 1")
    options = _OPTIONS | {name: getattr(args, name) for name in sorted(given)}
    return [
        GenerateRequest(
            ResultFile(args.results, Path(name).name), _directory(name), options, args.rows, args.shrink
        )
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


def _measure(jobs: list[GenerateRequest], time_limit_s: float, fresh: bool) -> list[str]:
    """Run every job; returns why some have no results."""
    failures = []
    for job in jobs:
        if fresh:
            job.file.forget(set(job.rows))
        job.file.check_options(job.options, job.shrink)
        deadline = time.monotonic() + time_limit_s
        try:
            for rows in job.starts():
                _start(job, rows, deadline)
        except BenchmarkError as error:
            failures.append(str(error))
    return failures


def _start(job: GenerateRequest, rows: list[str], deadline: float) -> None:
    """One start of the engine. Raises BenchmarkError when it fails or takes too long."""
    model = job.file.model
    print(f"{model}  starting for {', '.join(_in_order(rows)) or 'warm caches'}", flush=True)
    launch = Launch(
        model,
        job.path,
        job.options,
        str(job.file.directory),
        _in_order(rows),
        job.shrink,
        time.monotonic(),
    )
    process = spawn("atom.benchmarks.gpu_run", launch)
    try:
        status = process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        text = "out of time; what was measured is kept, run again for the rest"
        raise BenchmarkError(f"{model}: {text}") from None
    finally:
        _stop(process)
    if status:
        raise BenchmarkError(f"{model}: the run ended with exit status {status}")


def _in_order(rows: list[str]) -> list[str]:
    """A ready row is known first."""
    return sorted(rows, key=lambda name: ROWS[name].figure is not Figure.READY)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it if it still runs; its engine ends with it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.stdin is not None
    process.stdin.close()


if __name__ == "__main__":
    main()
