"""One rank of `atom.benchmarks.all_reduce`: a process that it starts. Rank 0 prints the rows as JSON."""

import statistics
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from atom.messages.launch import Rendezvous
from atom.utils.process import read_launch
from atom_ops import add_rms_norm, backend
from parallel.communicator import Communicator
from parallel.mesh import MeshShape, join_mesh
from workers.graph_recorder import GraphRecorder

__all__ = ["AllReduceLaunch"]

_JOIN_S = 60.0
_EPS = 1e-6
_WAYS = ("two_calls", "communicator")

Summed = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Summed]
Round = Callable[[], float]


class AllReduceLaunch(msgspec.Struct, frozen=True):
    """For `python -m atom.benchmarks.all_reduce_rank`."""

    ranks: int
    device: str
    threads: int
    """Of a rank on a CPU."""
    dtype: str
    tokens: list[int]
    width: int
    calls: int
    rounds: int
    rank: int = 0
    where: Rendezvous | None = None


def main() -> None:
    launch = read_launch(AllReduceLaunch)
    device = torch.device("cpu") if launch.device == "cpu" else torch.device("cuda", launch.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(launch.threads)
    backend.resolve(device)
    mesh = join_mesh(MeshShape(tp=launch.ranks), launch.rank, launch.where, device, _JOIN_S)
    with torch.inference_mode():
        rows = [_Comparison(launch, tokens, mesh.tp, device).row() for tokens in launch.tokens]
    mesh.close()
    if launch.rank == 0:
        print(msgspec.json.encode(rows).decode(), flush=True)


class _Comparison:
    """Both ways with one number of tokens."""

    def __init__(self, launch: AllReduceLaunch, tokens: int, tp: Communicator, device: torch.device):
        self._launch, self._tp, self._device = launch, tp, device
        dtype, sizes = getattr(torch, launch.dtype), (tokens, launch.width)
        shared = torch.Generator(device).manual_seed(1)
        self._residual_TD = torch.randn(sizes, generator=shared, device=device).to(dtype)
        self._weight_D = torch.rand(launch.width, generator=shared, device=device).to(dtype)
        own = torch.Generator(device).manual_seed(2 + launch.rank)
        self._partial_TD = torch.randn(sizes, generator=own, device=device).to(dtype)

    def row(self) -> dict[str, int | float | bool]:
        """Microseconds of a call, by both ways."""
        steps: list[Step] = [self._two_calls, self._communicator]
        self._check(*steps)
        rounds = [self._round(step) for step in steps]
        seconds: list[list[float]] = [[], []]
        for _ in range(self._launch.rounds):
            for taken, one_round in zip(seconds, rounds, strict=True):
                taken.append(one_round())
        medians = [statistics.median(taken) * 1e6 / self._launch.calls for taken in seconds]
        times = {f"{way}_us": round(median, 2) for way, median in zip(_WAYS, medians, strict=True)}
        one_kernel = self._tp.fuses_norm(self._partial_TD)
        return {"tokens": len(self._partial_TD), **times, "one_kernel": one_kernel}

    def _two_calls(self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor) -> Summed:
        dist.all_reduce(x_TD)
        return add_rms_norm(x_TD, residual_TD, weight_D, _EPS)

    def _communicator(self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor) -> Summed:
        return self._tp.all_reduce_add_rms_norm(x_TD, residual_TD, weight_D, _EPS)

    def _check(self, *steps: Step) -> None:
        """Raises AssertionError if the ways differ by more than rounding."""
        first, second = (step(self._partial_TD.clone(), self._residual_TD, self._weight_D) for step in steps)
        tolerance = 1e-5 if self._launch.dtype == "float32" else 5e-2
        torch.testing.assert_close(second, first, atol=tolerance, rtol=tolerance)

    def _round(self, step: Step) -> Round:
        """Runs `calls` calls; returns their seconds. An untimed run first lets the ranks begin together."""
        # Zeros stay zeros: each round finds the inputs of the one before.
        first_TD = torch.zeros_like(self._partial_TD)

        def body() -> None:
            x_TD, residual_TD = first_TD, self._residual_TD
            for _ in range(self._launch.calls):
                x_TD, residual_TD = step(x_TD, residual_TD, self._weight_D)

        body()
        return self._gpu_round(body) if self._device.type == "cuda" else _host_round(body)

    def _gpu_round(self, body: Callable[[], None]) -> Round:
        replay, _ = GraphRecorder()(body, "timed")

        def one_round() -> float:
            first, last = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
            replay()
            first.record()
            replay()
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


if __name__ == "__main__":
    main()
