"""Which form of dispatch runs: by `--all2all-backend`, and with auto by the tokens of each step.

The figures of `Crossovers` are all that decides; `python -m benchmarks.expert_dispatch` measures them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atom.shared.config.parallel import All2AllBackend
from atom.shared.utils import envs
from atom.shared.utils.logger import get_logger
from parallel.expert.all_to_all import AllToAllDispatch
from parallel.expert.dispatch import ExpertDispatch, LocalDispatch, PlannedDispatch, RoutedTokens
from parallel.expert.gather import GatherDispatch
from parallel.expert.mori import MoriDispatch, mori_failure, mori_problem
from parallel.expert.mori_plan import layout_problem, settings_problem
from parallel.expert.padded import PaddedDispatch
from parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Crossovers:
    """Tokens of a step, over all data-parallel ranks, at which another form is faster."""

    padded: int
    """Up to this many tokens the sums are exchanged directly; with more, reduced and scattered."""
    all_to_all: int
    """Eager steps from this many tokens on send a token only to the ranks that need it."""

    @classmethod
    def from_environment(cls) -> "Crossovers":
        return cls(envs.ATOM_ALL2ALL_PADDED_TOKENS, envs.ATOM_ALL2ALL_EAGER_TOKENS)

    @classmethod
    def always(cls) -> "Crossovers":
        """All-to-all in every step: eager ones of variable sizes, others padded."""
        return cls(padded=1 << 62, all_to_all=0)


class ChosenDispatch(ExpertDispatch):
    """Chooses a form for each step from the planned tokens, so that all ranks choose the same."""

    def __init__(self, mesh: Mesh, crossovers: Crossovers):
        self.ep = mesh.ep
        self.dp_rank = mesh.dp.rank
        self._crossovers = crossovers
        self._gather = GatherDispatch(mesh)
        self._padded = PaddedDispatch(mesh)
        self._all_to_all = AllToAllDispatch(mesh)
        self._form: PlannedDispatch = self._gather

    def plan(self, tokens: Sequence[int], eager: bool = False) -> None:
        self._form = self._choose(sum(tokens), eager)
        self._form.plan(tokens, eager)

    def dispatch(
        self, x_TD: Tensor, topk_ids_TJ: Tensor, topk_weights_TJ: Tensor, num_experts: int
    ) -> RoutedTokens:
        return self._form.dispatch(x_TD, topk_ids_TJ, topk_weights_TJ, num_experts)

    def combine(self, out_MD: Tensor) -> Tensor:
        return self._form.combine(out_MD)

    def _choose(self, tokens: int, eager: bool) -> PlannedDispatch:
        if eager and tokens >= self._crossovers.all_to_all:
            return self._all_to_all
        return self._padded if tokens <= self._crossovers.padded else self._gather


def expert_dispatch(
    mesh: Mesh,
    expert_parallel: bool,
    backend: All2AllBackend = "auto",
    max_tokens: int = 0,
    nodes: int = 1,
    planned_for: torch.device | None = None,
) -> ExpertDispatch:
    """The form for that mesh; without `expert_parallel`, or with one rank, nothing is dispatched.

    `max_tokens`: the most tokens of a data-parallel rank in a step, for which MORI reserves memory. `nodes`:
    hosts that the ranks are spread over evenly. `planned_for`: the device of a plan, whose mesh is on meta.
    Raises ValueError for a backend that cannot run here.
    """
    if not expert_parallel or mesh.ep.size == 1:
        return LocalDispatch()
    if mesh.dp.size == 1:
        return GatherDispatch(mesh)
    if backend in ("mori", "auto") and _mori_runs(mesh, backend == "mori", nodes, planned_for):
        chosen: ExpertDispatch = MoriDispatch(mesh, max_tokens, nodes)
    elif backend == "allgather_reducescatter":
        chosen = GatherDispatch(mesh)
    else:
        crossovers = Crossovers.always() if backend == "alltoall" else Crossovers.from_environment()
        chosen = ChosenDispatch(mesh, crossovers)
    if mesh.ep.rank == 0 and mesh.device != torch.device("meta"):
        get_logger().info("experts over %d ranks: %s", mesh.ep.size, type(chosen).__name__)
    return chosen


def _mori_runs(mesh: Mesh, wanted: bool, nodes: int, planned_for: torch.device | None) -> bool:
    """Whether MORI can run; if it is `wanted`, it must: raises ValueError."""
    device = planned_for or mesh.device
    # A plan for GPUs that this host does not have is a plan for AMD's, if the user names MORI.
    assumed = wanted and planned_for is not None and planned_for.type == "cuda" and torch.version.hip is None
    problem = None if assumed else _on_any_rank(mori_problem(device), mesh)
    layout = layout_problem(mesh.ep.size, nodes) or settings_problem()
    if wanted and (problem or layout):
        raise ValueError(f"--all2all-backend mori: {problem or layout}; use auto")
    broken = mori_failure(device) or (None if problem else layout)
    if broken and mesh.ep.rank == 0:
        get_logger().warning("experts' tokens travel without MORI: %s", broken)
    return not (problem or layout)


def _on_any_rank(problem: str | None, mesh: Mesh) -> str | None:
    """The problem of this rank, or that another one has one: MORI may be broken on one host alone."""
    if mesh.host is None or not any(row[0] for row in mesh.host.all_gather([problem is not None])):
        return problem
    return problem or "MORI cannot run on another rank, whose log has the reason"
