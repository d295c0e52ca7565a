"""All-to-all of variable sizes: a token goes once to each rank that has an expert for it."""

from typing import NamedTuple

import torch
from torch import Tensor

from parallel.expert.dispatch import PlannedDispatch, RoutedTokens
from parallel.expert.rows import packed, unpacked


class _Sent(NamedTuple):
    """What `combine` needs of the dispatch before it."""

    tokens: int
    """T: tokens of the data-parallel rank."""
    token_N: Tensor
    """Index among these of each row sent."""
    sent: list[int]
    """Rows sent to each rank; they add up to N."""
    received: list[int]


class AllToAllDispatch(PlannedDispatch):
    """`all_to_all_single` with the sizes that the router's choice needs: the least bytes.

    The sizes travel first, and the host reads them: a wait for the device in every layer. For eager steps of
    many tokens. Every rank with tokens or without takes part.
    """

    capturable = False

    def dispatch(
        self, x_TD: Tensor, topk_ids_TJ: Tensor, topk_weights_TJ: Tensor, num_experts: int
    ) -> RoutedTokens:
        tokens, hidden = x_TD.shape
        top_k = topk_ids_TJ.shape[1]
        share = self._share(tokens)
        rank_N, token_N = _destinations(topk_ids_TJ[share], num_experts, self.ep.size)
        counts = torch.bincount(rank_N, minlength=self.ep.size)
        each = [1] * self.ep.size
        sizes = torch.stack([counts, self.ep.all_to_all_rows(counts, each, each)])
        sent, received = sizes.tolist()
        rows = packed(x_TD[share], topk_ids_TJ[share], topk_weights_TJ[share])
        arrived = self.ep.all_to_all_rows(rows[token_N], sent, received)
        self._last = _Sent(tokens, token_N + share.start, sent, received)
        return unpacked(arrived, top_k, hidden, x_TD.dtype)

    def combine(self, out_MD: Tensor) -> Tensor:
        last = self._last
        returned = self.ep.all_to_all_rows(out_MD, last.received, last.sent)
        sums_TD = returned.new_zeros(last.tokens, returned.shape[1], dtype=torch.float32)
        # A rank returns a token once at most, so that the order of the sums is fixed.
        for part, token in zip(returned.split(last.sent), last.token_N.split(last.sent), strict=True):
            sums_TD.index_add_(0, token, part.float())
        return sums_TD.to(out_MD.dtype)


def owners(ids: Tensor, num_experts: int, ranks: int) -> Tensor:
    """The rank that has each expert, as `ExpertDispatch.local_experts` says; `ranks` for ids of none."""
    size, extra = divmod(num_experts, ranks)
    longer = extra * (size + 1)  # experts of the ranks that have one more
    found = torch.where(ids < longer, ids // (size + 1), extra + (ids - longer) // size)
    return found.where((ids >= 0) & (ids < num_experts), ranks)


def _destinations(topk_ids_TJ: Tensor, num_experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """(rank, token) of each row to send, in the order of the ranks, then of the tokens."""
    needed = torch.zeros(ranks + 1, len(topk_ids_TJ), dtype=torch.bool, device=topk_ids_TJ.device)
    needed.scatter_(0, owners(topk_ids_TJ, num_experts, ranks).t(), True)
    rank_N, token_N = needed[:ranks].nonzero(as_tuple=True)
    return rank_N, token_N
