"""Starts the ranks of a benchmark of collectives, on the GPUs of this host or on its CPU."""

import argparse
import contextlib
import os
import subprocess
import time
from typing import Any

import msgspec
import torch

from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.config.cli import CommandLineParser
from atom.shared.messages.launch import Rendezvous
from atom.shared.utils.process import last_line, spawn
from benchmarks.common.arguments import positive
from benchmarks.ranks.rendezvous import open_rendezvous

_DTYPES = ("float32", "float16", "bfloat16")
_DEADLINE_S = 300.0
_EXIT_S = 10.0


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank is told."""

    ranks: int
    device: str
    threads: int
    """Number of threads of a rank on a CPU."""
    dtype: str
    calls: int
    """Calls in a round."""
    rounds: int
    rank: int = 0
    where: Rendezvous | None = None


def measure(module: str, launch: RankLaunch) -> list[dict[str, Any]]:
    """Runs `python -m module` as every rank; returns the rows that rank 0 printed as JSON.

    Raises BenchmarkError if a rank fails, or does not end in time.
    """
    deadline = time.monotonic() + _DEADLINE_S
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
            if status := child.wait(_EXIT_S):
                raise BenchmarkError(f"rank {rank} ended with status {status}: its last lines are above")
    rows: list[dict[str, Any]] = msgspec.json.decode(lines[0])
    return rows


def add_rank_flags(parser: CommandLineParser, calls: int, rounds: int) -> None:
    """`calls` and `rounds` are the defaults."""
    add = parser.add_argument
    add("--ranks", type=positive, help="processes, one on each GPU; all GPUs, or 2 on a CPU, if omitted")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--dtype", choices=_DTYPES, help="float32 on a CPU, else bfloat16, if omitted")
    add("--calls", type=positive, default=calls, help="calls in a round, which may depend on one another")
    add("--rounds", type=positive, default=rounds, help="rounds of each way")


def rank_settings(args: argparse.Namespace, what: str) -> dict[str, Any]:
    """The fields of `RankLaunch` by the flags. Raises BenchmarkError for ranks that this host has not.

    `what` is between the ranks: "an all-reduce".
    """
    device = _device(args.device)
    gpus = torch.cuda.device_count()
    ranks = args.ranks or (gpus if device == "cuda" else 2)
    if ranks < 2:
        raise BenchmarkError(f"{what} is between 2 ranks or more, not {ranks}; --device cpu needs no GPU")
    if device == "cuda" and ranks > gpus:
        raise BenchmarkError(f"--ranks {ranks}: torch sees {gpus} GPUs here")
    return {
        "ranks": ranks,
        "device": device,
        "threads": max(1, len(os.sched_getaffinity(0)) // ranks),
        "dtype": args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        "calls": args.calls,
        "rounds": args.rounds,
    }


def gpu_names(launch: RankLaunch) -> list[str]:
    """Names of the GPUs that the ranks use; none on a CPU."""
    if launch.device == "cpu":
        return []
    return [torch.cuda.get_device_name(rank) for rank in range(launch.ranks)]


def _device(name: str) -> str:
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise BenchmarkError("--device cuda: torch sees no GPU here; use --device cpu")
    return "cuda" if there and name != "cpu" else "cpu"
