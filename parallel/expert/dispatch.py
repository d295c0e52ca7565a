"""Dispatch and combine, which every form of expert parallelism implements.

    x_TD, topk_ids_TJ,         this rank's tokens, their experts and the experts' weights
    topk_weights_TJ
            │ dispatch
    RoutedTokens               tokens that may have selected an expert of this rank
            │ experts          weighted sum over this rank's experts alone
    out_MD
            │ combine
    out_TD                     this rank's tokens again; a partial sum over the tensor-parallel ranks

T tokens of this rank, M tokens at its experts, J experts per token, X experts, D hidden.

The tensor-parallel ranks of a data-parallel rank have the same tokens. The result of `combine` is always
partial over tp, as that of a row-parallel layer: a form in which each of these ranks sends its share of the
tokens (all-to-all) leaves the rows of the others zero, and the sum over tp that follows completes them.

Ids stay global, as all-to-all libraries return them; the `experts` op skips those of other ranks, and a
row that is padding has ids of no expert. `combine` belongs to the `dispatch` before it: rows of
RoutedTokens may lie in a buffer that the next dispatch overwrites. All ranks of the ep group call both
in the same order, ranks without tokens too.

| form      | sent                                       | graphs | file         |
|-----------|--------------------------------------------|--------|--------------|
| local     | nothing                                    | yes    | this one     |
| gather    | all tokens over dp, sums reduced over dp   | yes    | gather.py    |
| padded    | all tokens over ep, sums to their rank     | yes    | padded.py    |
| all-to-all| a token once to each rank that needs it    | no     | all_to_all.py|
| MORI      | the same, by a library for ROCm            | yes    | mori.py      |
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.communicator import Communicator
from parallel.mesh import Mesh
from parallel.sharding import split


class RoutedTokens(NamedTuple):
    """The inputs of this rank's experts."""

    x_MD: Tensor
    topk_ids_MJ: Tensor
    """Global expert ids; those of other ranks' experts, or of none, are skipped."""
    topk_weights_MJ: Tensor


class ExpertDispatch(ABC):
    """How the tokens of a MoE layer reach its experts. One object serves all layers."""

    ep: Communicator
    """The ranks that the experts are spread over. One rank: every rank has every expert."""
    capturable = True
    """Whether a graph may capture dispatch and combine: fixed shapes, and the host waits for nothing."""

    dp_rank = 0
    """Which of the ranks with different tokens this is."""
    reserved_bytes = 0
    """Device memory that this form takes besides torch's; known once a layer has called `reserve`."""

    def local_experts(self, num_experts: int) -> tuple[int, int]:
        """(first, count) of this rank's experts. Raises ValueError with fewer experts than ranks."""
        if num_experts < self.ep.size:
            raise ValueError(
                f"--enable-expert-parallel: {num_experts} experts cannot be spread over {self.ep.size} "
                "ranks; omit the flag"
            )
        return split(num_experts, self.ep.size, self.ep.rank)

    def reserve(self, hidden: int, dtype: torch.dtype, top_k: int, num_experts: int) -> None:
        """State the tokens to come: every MoE layer calls this when it is built, before weights are loaded.

        `top_k` experts of a token, `num_experts` on all ranks. Raises ValueError for what cannot be sent.
        """
        self.reserved_bytes = 0

    @abstractmethod
    def plan(self, tokens: Sequence[int], eager: bool = False) -> None:
        """State the tokens of every data-parallel rank, with padding, in the steps that follow.

        Called on every rank before a step is launched or captured. `eager`: no graph captures the step.
        Raises ValueError if that is not one number for each rank, or for a form that graphs cannot capture.
        """

    @abstractmethod
    def dispatch(
        self, x_TD: Tensor, topk_ids_TJ: Tensor, topk_weights_TJ: Tensor, num_experts: int
    ) -> RoutedTokens:
        """Send tokens to the ranks of the experts in `topk_ids_TJ`: X = `num_experts`, on all ranks."""

    @abstractmethod
    def combine(self, out_MD: Tensor) -> Tensor:
        """[T, D]. Row m of `out_MD` is the output for row m of the last dispatch."""


class LocalDispatch(ExpertDispatch):
    """Every expert is on every rank, or a share of its features: tokens stay where they are."""

    ep = Communicator()

    def plan(self, tokens: Sequence[int], eager: bool = False) -> None:
        """Does nothing: no other rank needs to know."""

    def dispatch(
        self, x_TD: Tensor, topk_ids_TJ: Tensor, topk_weights_TJ: Tensor, num_experts: int
    ) -> RoutedTokens:
        return RoutedTokens(x_TD, topk_ids_TJ, topk_weights_TJ)

    def combine(self, out_MD: Tensor) -> Tensor:
        return out_MD


class PlannedDispatch(ExpertDispatch):
    """A form in which every rank knows how many tokens the others have."""

    def __init__(self, mesh: Mesh):
        self.ep = mesh.ep
        self._dp = mesh.dp
        self._tp = mesh.tp
        self.dp_rank = mesh.dp.rank
        self._tokens: Sequence[int] | None = None

    def plan(self, tokens: Sequence[int], eager: bool = False) -> None:
        if len(tokens) != self._dp.size:
            raise ValueError(f"{len(tokens)} token counts for {self._dp.size} data-parallel ranks")
        if not (eager or self.capturable):
            raise ValueError(f"{type(self).__name__} cannot be captured in a graph: plan it for eager steps")
        self._tokens = tuple(tokens)

    def _planned(self, tokens: int) -> Sequence[int]:
        """The tokens of every data-parallel rank; this one's are `tokens`, or it is a ValueError."""
        if self._dp.size == 1:
            return [tokens]
        if self._tokens is None or self._tokens[self._dp.rank] != tokens:
            raise ValueError(f"data-parallel rank {self._dp.rank} dispatches {tokens} tokens: not as planned")
        return self._tokens

    def _share(self, tokens: int) -> slice:
        """This rank's share of the tokens that the tensor-parallel ranks all have."""
        first, count = split(tokens, self._tp.size, self._tp.rank)
        return slice(first, first + count)
