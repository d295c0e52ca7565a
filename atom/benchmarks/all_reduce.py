"""Microseconds of the all-reduce and norm behind each layer, between the tensor-parallel ranks of this host.

    python -m atom.benchmarks.all_reduce --ranks 2 --tokens 1 16 64 --width 4096

Compares torch.distributed's all-reduce and a separate `add_rms_norm` with the communicator's
`all_reduce_add_rms_norm`, which layers call. Both are checked against each other first. A row is the
median of rounds that alternate between the two; on GPUs a round is one replay of a CUDA graph. *one
kernel* says whether the communicator ran a fused kernel, or the same two calls.
"""

import argparse
import contextlib
import os
import subprocess
import time
from typing import Any

import msgspec
import torch

from atom.benchmarks.all_reduce_rank import AllReduceLaunch
from atom.benchmarks.arguments import add_output_flag, positive, single_line_errors
from atom.benchmarks.report import report, write
from atom.benchmarks.serving.errors import BenchmarkError
from atom.config.cli import CommandLineParser
from atom.utils.process import last_line, spawn
from atom.utils.rendezvous import open_rendezvous

TOKENS = (1, 4, 16, 64, 256, 1024)
_DTYPES = ("float32", "float16", "bfloat16")
_DEADLINE_S = 300.0
_GOODBYE_S = 10.0


def main() -> None:
    args = _parser().parse_args()
    with single_line_errors():
        device = _device(args.device)
        ranks = args.ranks or _default_ranks(device)
        _check_ranks(ranks, device)
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
        launch = AllReduceLaunch(
            ranks, device, threads, dtype, args.tokens, args.width, args.calls, args.rounds
        )
        figures = {"ranks": ranks, "device": device, "dtype": dtype, "width": args.width}
        gpus = [torch.cuda.get_device_name(rank) for rank in range(ranks)] if device == "cuda" else []
        result = report("all_reduce", gpus, {**figures, "rows": measure(launch)})
        print(text(result))
        write(args.output_json, result)


def measure(launch: AllReduceLaunch) -> list[dict[str, Any]]:
    """The rows that rank 0 measured. Raises BenchmarkError if a rank fails."""
    module, deadline = "atom.benchmarks.all_reduce_rank", time.monotonic() + _DEADLINE_S
    with contextlib.ExitStack() as children:
        with open_rendezvous(launch.ranks) as places:
            started = []
            for rank, where in enumerate(places):
                assert where is not None
                mine = msgspec.structs.replace(launch, rank=rank, where=where)
                child = spawn(module, mine, where.pass_fds, stdout=subprocess.PIPE)
                children.callback(child.kill)
                started.append(child)
        try:
            lines = [last_line(child, deadline) for child in started]
        except TimeoutError:
            raise BenchmarkError(f"the ranks did not end within {_DEADLINE_S:.0f} s") from None
        for rank, child in enumerate(started):
            if status := child.wait(_GOODBYE_S):
                raise BenchmarkError(f"rank {rank} ended with status {status}: its last lines are above")
    rows: list[dict[str, Any]] = msgspec.json.decode(lines[0])
    return rows


def text(result: dict[str, Any]) -> str:
    """The result as a table of text."""
    lines = [
        f"{result['ranks']} ranks ({result['device']}), {result['dtype']}, width {result['width']}",
        f"{'tokens':>6}  {'two calls us':>12}  {'communicator us':>15}  one kernel",
    ]
    for row in result["rows"]:
        times = f"{row['two_calls_us']:>12.1f}  {row['communicator_us']:>15.1f}"
        lines.append(f"{row['tokens']:>6}  {times}  {'yes' if row['one_kernel'] else 'no'}")
    return "\n".join(lines)


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="atom.benchmarks.all_reduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=positive, help="processes, one on each GPU; all GPUs, or 2 on a CPU, if omitted")
    add("--tokens", type=positive, nargs="+", default=list(TOKENS), help="rows of the tensor")
    add("--width", type=positive, default=4096, help="features of a token")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--dtype", choices=_DTYPES, help="float32 on a CPU, else bfloat16, if omitted")
    add("--calls", type=positive, default=50, help="calls in a round, each on the results of the one before")
    add("--rounds", type=positive, default=51, help="rounds of each of the two")
    add_output_flag(parser)
    return parser


def _device(name: str) -> str:
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise BenchmarkError("--device cuda: torch sees no GPU here; use --device cpu")
    return "cuda" if there and name != "cpu" else "cpu"


def _default_ranks(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 2


def _check_ranks(ranks: int, device: str) -> None:
    if ranks < 2:
        raise BenchmarkError(
            f"an all-reduce is between 2 ranks or more, not {ranks}; --device cpu needs no GPU"
        )
    if device == "cuda" and ranks > (gpus := torch.cuda.device_count()):
        raise BenchmarkError(f"--ranks {ranks}: torch sees {gpus} GPUs here")


if __name__ == "__main__":
    main()
