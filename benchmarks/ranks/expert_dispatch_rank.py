"""One rank of `benchmarks.expert_dispatch`: a process that it starts. Rank 0 prints the rows as JSON."""

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from atom.shared.utils.process import read_launch
from benchmarks.ranks.rank_rounds import Round, join, leave, medians_us, timed
from benchmarks.ranks.ranks import RankLaunch
from parallel.expert import ExpertDispatch
from parallel.expert.all_to_all import AllToAllDispatch
from parallel.expert.gather import GatherDispatch
from parallel.expert.mori import MoriDispatch, mori_problem
from parallel.expert.mori_plan import HEAP_VARIABLE
from parallel.expert.padded import PaddedDispatch
from parallel.mesh import Mesh, MeshShape

__all__ = ["DispatchLaunch"]


class DispatchLaunch(RankLaunch, frozen=True, kw_only=True):
    """For `python -m benchmarks.ranks.expert_dispatch_rank`."""

    tokens: list[int]
    """Numbers of tokens per rank to measure."""
    widths: list[int]
    experts: int
    chosen: int


def main() -> None:
    launch = read_launch(DispatchLaunch)
    os.environ.setdefault(HEAP_VARIABLE, "16G")  # one heap for the ops of all comparisons
    mesh = join(launch, MeshShape(dp=launch.ranks))
    rows = []
    with torch.inference_mode():
        for width in launch.widths:
            for skewed in (False, True):
                for tokens in launch.tokens:
                    rows.append(_Comparison(launch, mesh, tokens, width, skewed).row())
    leave(launch, mesh, rows)


class _Comparison:
    """Every form, with one number of tokens."""

    def __init__(self, launch: DispatchLaunch, mesh: Mesh, tokens: int, width: int, skewed: bool):
        """`skewed`: all tokens select experts of rank 0."""
        self._launch = launch
        self._mesh = mesh
        self._skewed = skewed
        device = mesh.device
        own = torch.Generator(mesh.device).manual_seed(2 + launch.rank)
        self._x_TD = torch.randn(tokens, width, generator=own, device=device).to(getattr(torch, launch.dtype))
        reach = launch.experts // launch.ranks if skewed else launch.experts
        scores_TX = torch.rand(tokens, reach, generator=own, device=device)
        self._ids_TJ = scores_TX.topk(launch.chosen).indices
        self._weights_TJ = torch.rand(tokens, launch.chosen, generator=own, device=device)

    def row(self) -> dict[str, int | float | bool]:
        """Microseconds of a dispatch and its combine, by each form."""
        rounds = []
        names = []
        for name, dispatch, graph in self._forms():
            dispatch.plan([len(self._x_TD)] * self._launch.ranks, eager=not graph)
            self._check(dispatch, name)
            rounds.append(self._round(dispatch, graph))
            names.append(f"{name}_us")
        times = dict(zip(names, medians_us(rounds, self._launch), strict=True))
        return {"tokens": len(self._x_TD), "width": self._x_TD.shape[1], "skewed": self._skewed, **times}

    def _forms(self) -> Iterator[tuple[str, ExpertDispatch, bool]]:
        """(name, form, whether it runs in a graph); a CPU has no graphs."""
        mesh = self._mesh
        gather = GatherDispatch(mesh)
        padded = PaddedDispatch(mesh)
        if mesh.device.type == "cuda":
            yield "gather_graph", gather, True
            yield "padded_graph", padded, True
        yield "gather", gather, False
        yield "padded", padded, False
        yield "all_to_all", AllToAllDispatch(mesh), False
        if mori_problem(mesh.device) is None:
            yield "mori_graph", MoriDispatch(mesh, len(self._x_TD)), True

    def _check(self, dispatch: ExpertDispatch, name: str) -> None:
        """Raises AssertionError unless each token comes back from every rank that has an expert for it."""
        experts = self._launch.experts
        ranks = self._launch.ranks
        first, count = dispatch.local_experts(experts)
        x_MD, topk_ids_MJ, _ = dispatch.dispatch(self._x_TD, self._ids_TJ, self._weights_TJ, experts)
        here_M1 = ((topk_ids_MJ >= first) & (topk_ids_MJ < first + count)).any(1, keepdim=True)
        found = dispatch.combine(x_MD.where(here_M1, 0.0))
        starts = torch.tensor([rank * experts // ranks for rank in range(ranks)], device=found.device)
        owners_TJ = torch.searchsorted(starts, self._ids_TJ, right=True)
        times_T1 = (
            (owners_TJ.unsqueeze(-1) == torch.arange(1, ranks + 1, device=found.device)).any(1).sum(1, True)
        )
        torch.testing.assert_close(found, self._x_TD * times_T1, atol=5e-2, rtol=5e-2, msg=name)

    def _round(self, dispatch: ExpertDispatch, graph: bool) -> Round:
        def body() -> None:
            x_TD: Tensor = self._x_TD
            for _ in range(self._launch.calls):
                routed = dispatch.dispatch(x_TD, self._ids_TJ, self._weights_TJ, self._launch.experts)
                dispatch.combine(routed.x_MD)

        return timed(body, self._mesh.device, graph)


if __name__ == "__main__":
    main()
