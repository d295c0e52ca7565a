"""One rank of a benchmark of collectives: join the others, time rounds of calls, leave."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from atom_ops import backend
from benchmarks.ranks.ranks import RankLaunch
from parallel.mesh import Mesh, MeshShape, join_mesh
from workers.graphs.graph_recorder import GraphRecorder

_JOIN_S = 60.0

Round = Callable[[], float]
"""Runs a round; returns its seconds."""


def join(launch: RankLaunch, shape: MeshShape) -> Mesh:
    """The mesh of this rank, on the device of its number."""
    device = torch.device("cpu") if launch.device == "cpu" else torch.device("cuda", launch.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(launch.threads)
    backend.resolve(device)
    return join_mesh(shape, launch.rank, launch.where, device, _JOIN_S)


def leave(launch: RankLaunch, mesh: Mesh, rows: list[dict[str, Any]]) -> None:
    """Leave the mesh; rank 0 prints the rows."""
    mesh.close()
    if launch.rank == 0:
        print(msgspec.json.encode(rows).decode(), flush=True)


def timed(body: Callable[[], None], device: torch.device, graph: bool = True) -> Round:
    """Times `body`; on a GPU the replay of its graph, or with `graph` off its own launches.

    An untimed run first lets the ranks begin together.
    """
    body()
    if device.type == "cpu":
        return _host_round(body)
    return _gpu_round(GraphRecorder()(body, "timed")[0] if graph else body)


def medians_us(rounds: Sequence[Round], launch: RankLaunch) -> list[float]:
    """Microseconds of a call by each way: the median of rounds that alternate between the ways."""
    seconds: list[list[float]] = [[] for _ in rounds]
    for _ in range(launch.rounds):
        for taken, one_round in zip(seconds, rounds, strict=True):
            taken.append(one_round())
    return [round(statistics.median(taken) * 1e6 / launch.calls, 2) for taken in seconds]


def _gpu_round(body: Callable[[], object]) -> Round:
    def one_round() -> float:
        first = torch.Event("cuda", enable_timing=True)
        last = torch.Event("cuda", enable_timing=True)
        body()
        first.record()
        body()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    return one_round


def _host_round(body: Callable[[], None]) -> Round:
    def one_round() -> float:
        body()
        began = time.perf_counter()
        body()
        return time.perf_counter() - began

    return one_round
