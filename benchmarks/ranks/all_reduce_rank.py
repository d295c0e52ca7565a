"""One rank of `benchmarks.all_reduce`: a process that it starts. Rank 0 prints the rows as JSON."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from atom.shared.utils.process import read_launch
from atom_ops import add_rms_norm
from benchmarks.ranks.rank_rounds import Round, join, leave, medians_us, timed
from benchmarks.ranks.ranks import RankLaunch
from parallel.communicator import Communicator
from parallel.mesh import MeshShape

__all__ = ["AllReduceLaunch"]

_EPS = 1e-6
_WAYS = ("two_calls", "communicator")

Summed = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Summed]


class AllReduceLaunch(RankLaunch, frozen=True, kw_only=True):
    """For `python -m benchmarks.ranks.all_reduce_rank`."""

    tokens: list[int]
    width: int


def main() -> None:
    launch = read_launch(AllReduceLaunch)
    mesh = join(launch, MeshShape(tp=launch.ranks))
    mesh.tp.open_peers(launch.width, getattr(torch, launch.dtype), mesh.device)
    with torch.inference_mode():
        rows = [_Comparison(launch, tokens, mesh.tp, mesh.device).row() for tokens in launch.tokens]
    leave(launch, mesh, rows)


class _Comparison:
    """Both ways with one number of tokens."""

    def __init__(self, launch: AllReduceLaunch, tokens: int, tp: Communicator, device: torch.device):
        self._launch = launch
        self._tp = tp
        self._device = device
        dtype = getattr(torch, launch.dtype)
        sizes = (tokens, launch.width)
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
        medians = medians_us(rounds, self._launch)
        times = {f"{way}_us": median for way, median in zip(_WAYS, medians, strict=True)}
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
        """Runs `calls` calls; returns their seconds."""
        # Zeros stay zeros: each round finds the inputs of the one before.
        first_TD = torch.zeros_like(self._partial_TD)

        def body() -> None:
            x_TD = first_TD
            residual_TD = self._residual_TD
            for _ in range(self._launch.calls):
                x_TD, residual_TD = step(x_TD, residual_TD, self._weight_D)

        return timed(body, self._device)


if __name__ == "__main__":
    main()
