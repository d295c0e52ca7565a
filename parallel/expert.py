"""Where the experts of a MoE layer are, and how tokens reach them: dispatch and combine.

    x_TD, ids_TJ, weights_TJ   this rank's tokens, and the experts selected for them
            │ dispatch
    RoutedTokens               tokens that may have selected an expert of this rank
            │ experts          weighted sum over this rank's experts alone
    out_MD
            │ combine
    out_TD                     this rank's tokens again; a partial sum over the tensor-parallel ranks

T tokens of this rank, M tokens at its experts, J experts per token, D hidden.

The result of `combine` is always partial over tp, as that of a row-parallel layer: the MoE layer adds
its shared experts' partial sum, and the next norm all-reduces both at once. A form whose ranks return
whole sums of some tokens each (all-to-all) leaves the others' rows zero, which that all-reduce completes.

Ids stay global, as all-to-all libraries return them; the `experts` op skips those of other ranks, and a
row that is padding has ids of no expert. `combine` belongs to the `dispatch` before it: rows of
RoutedTokens may lie in a buffer that the next dispatch overwrites. All ranks of the ep group call both
in the same order, ranks without tokens too.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from parallel.communicator import Communicator
from parallel.mesh import Mesh
from parallel.sharding import split


class RoutedTokens(NamedTuple):
    """The inputs of this rank's experts."""

    x_MD: Tensor
    ids_MJ: Tensor
    """Global expert ids; those of other ranks' experts, or of none, are skipped."""
    weights_MJ: Tensor


class ExpertDispatch(ABC):
    """How the tokens of a MoE layer reach its experts. One object serves all layers."""

    ep: Communicator
    """The ranks that the experts are spread over. One rank: every rank has every expert."""

    def local_experts(self, num_experts: int) -> tuple[int, int]:
        """(first, count) of this rank's experts. Raises ValueError with fewer experts than ranks."""
        if num_experts < self.ep.size:
            raise ValueError(
                f"--enable-expert-parallel: {num_experts} experts cannot be spread over {self.ep.size} "
                "ranks; omit the flag"
            )
        return split(num_experts, self.ep.size, self.ep.rank)

    @abstractmethod
    def plan(self, tokens: Sequence[int]) -> None:
        """State the tokens of every data-parallel rank in the steps that follow.

        Raises ValueError if that is not one number for each rank.
        """

    @abstractmethod
    def dispatch(self, x_TD: Tensor, ids_TJ: Tensor, weights_TJ: Tensor) -> RoutedTokens: ...

    @abstractmethod
    def combine(self, out_MD: Tensor) -> Tensor:
        """[T, D]. Row m of `out_MD` is the output for row m of the last dispatch."""


class LocalDispatch(ExpertDispatch):
    """Every expert is on every rank, or a share of its features: tokens stay where they are."""

    ep = Communicator()

    def plan(self, tokens: Sequence[int]) -> None:
        """Nothing is planned."""

    def dispatch(self, x_TD: Tensor, ids_TJ: Tensor, weights_TJ: Tensor) -> RoutedTokens:
        return RoutedTokens(x_TD, ids_TJ, weights_TJ)

    def combine(self, out_MD: Tensor) -> Tensor:
        return out_MD


class GatherDispatch(ExpertDispatch):
    """Every rank sees all tokens: all-gather over dp, reduce-scatter of the partial sums over dp.

    The tensor-parallel ranks of a data-parallel rank have the same tokens already, so that with dp 1
    nothing is sent before the all-reduce of the next norm.
    """

    def __init__(self, mesh: Mesh):
        self.ep = mesh.ep
        self._dp = mesh.dp
        self._tokens: Sequence[int] | None = None

    def plan(self, tokens: Sequence[int]) -> None:
        """Unused with dp 1."""
        if len(tokens) != self._dp.size:
            raise ValueError(f"{len(tokens)} token counts for {self._dp.size} data-parallel ranks")
        self._tokens = tuple(tokens)

    def dispatch(self, x_TD: Tensor, ids_TJ: Tensor, weights_TJ: Tensor) -> RoutedTokens:
        """Raises ValueError for another number of tokens than was planned."""
        planned = self._planned(x_TD.shape[0])
        gathered = (self._dp.all_gather_rows(each, planned) for each in (x_TD, ids_TJ, weights_TJ))
        return RoutedTokens(*gathered)

    def combine(self, out_MD: Tensor) -> Tensor:
        return self._dp.reduce_scatter_rows(out_MD, self._tokens or [out_MD.shape[0]])

    def _planned(self, tokens: int) -> Sequence[int]:
        if self._dp.size == 1:
            return [tokens]
        if self._tokens is None or self._tokens[self._dp.rank] != tokens:
            raise ValueError(f"data-parallel rank {self._dp.rank} dispatches {tokens} tokens: not as planned")
        return self._tokens


def expert_dispatch(mesh: Mesh, expert_parallel: bool) -> ExpertDispatch:
    """The form for that mesh; without `expert_parallel`, or with one rank, nothing is dispatched."""
    return GatherDispatch(mesh) if expert_parallel and mesh.ep.size > 1 else LocalDispatch()
