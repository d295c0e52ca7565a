"""Decode steps of the first layers of each family's model at their real width, against their floors.

    python -m benchmarks.families --families gemma3 minimax_m2 --output-json families.json

Each family runs in a process of its own, with random weights; one that fails or takes longer than
--time-limit does not end the others. A step's floor is the time to read its weights and caches at
--read-gb-s, of experts those that the batch is expected to choose. Multiplications are left out: those of
at most 64 rows take less time.

  step ms     time of a step as in serving: each is launched while the previous one runs
  device ms   device time of a step
  ratio       step ms / floor ms
  kernels     kernels of a step, for each layer
  torch       ops that ran on torch for want of a kernel
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from atom import EngineArgs
from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.config.cli import CommandLineParser, explicit_fields, with_environment
from atom.shared.utils.process import spawn
from benchmarks.common.arguments import add_output_flag, positive, single_line_errors
from benchmarks.common.processes import stop
from benchmarks.common.report import report, write
from benchmarks.family_runs.family_configs import FAMILIES
from benchmarks.family_runs.family_run import FamilyLaunch, FamilyRow
from benchmarks.simulation.roofline import H200

_OPTIONS: dict[str, Any] = {
    "load_dummy": True,
    "max_model_len": 4096,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 8192,
}
_TITLES = ("family", "rows", "step ms", "device ms", "floor ms", "ratio", "kernels", "torch")


def main() -> None:
    """Measure, print a line for each row, write the report; exit status 1 if a row is missing."""
    args = _parser().parse_args()
    with single_line_errors():
        rows, failures = measure_families(args)
        gpus = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
        figures = {"read_gb_s": args.read_gb_s, "rows": msgspec.to_builtins(rows), "failures": failures}
        write(args.output_json, report("families", gpus, figures))
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="benchmarks.families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("benchmark")
    add = group.add_argument
    add("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), help="which to measure")
    add("--rows", type=positive, nargs="+", default=[1, 64], help="rows of the decode batches")
    add("--context", type=positive, default=1024, help="prompt tokens of each row")
    add("--steps", type=positive, default=64, help="steps of each measurement")
    add("--time-limit", type=positive, default=120, help="seconds for one family")
    rate = round(H200.bytes_per_s / 1e9)
    add(
        "--read-gb-s", type=positive, default=rate, help="rate of reads from GPU memory, by default an H200's"
    )
    add_output_flag(group)
    EngineArgs.add_cli_args(parser)
    return parser


def measure_families(args: argparse.Namespace) -> tuple[list[FamilyRow], list[str]]:
    """The rows, printed as they are measured, and why others are missing."""
    args = with_environment(args)
    given = explicit_fields(args)
    if "model" in given:
        raise BenchmarkError("--model: name the models with --families")
    sizes = {"cudagraph_capture_sizes": json.dumps(sorted(args.rows))}
    options = _OPTIONS | sizes | {name: getattr(args, name) for name in sorted(given)}
    print(("{:<18}" + "{:>10}" * 6 + "  {}").format(*_TITLES), flush=True)
    found: list[FamilyRow] = []
    failures = []
    for name in args.families:
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as directory:
            launch = FamilyLaunch(
                name, directory, options, args.rows, args.context, args.steps, args.read_gb_s
            )
            failure = _run(launch, args.time_limit)
            rows = _rows_in(Path(directory))
        for row in rows:
            print(line_of(row), flush=True)
        found += rows
        if failure:
            failures.append(failure)
            print(failure, flush=True)
    return found, failures


def _run(launch: FamilyLaunch, limit_s: float) -> str:
    """Run a family; returns why rows are missing, or nothing."""
    process = spawn("benchmarks.family_runs.family_run", launch)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"{launch.family}: not finished within {limit_s:.0f} s: raise --time-limit"
    finally:
        stop(process)
    return f"{launch.family}: its process ended with exit status {status}" if status else ""


def _rows_in(directory: Path) -> list[FamilyRow]:
    path = directory / "rows.json"
    return msgspec.json.decode(path.read_bytes(), type=list[FamilyRow]) if path.exists() else []


def line_of(row: FamilyRow) -> str:
    """A row of the table."""
    return (
        f"{row.family:<18}{row.rows:>10}{row.step_ms:>10.3f}{row.device_ms:>10.3f}{row.floor_ms:>10.3f}"
        f"{row.ratio:>10.2f}{row.kernels_per_layer:>10.1f}  {', '.join(row.ran_in_torch) or 'none'}"
    )


if __name__ == "__main__":
    main()
