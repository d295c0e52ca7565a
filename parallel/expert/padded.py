"""All-to-all of a fixed size: as many rows for each rank as the fullest one sends."""

import torch
from torch import Tensor
from torch.nn import functional

from parallel.expert.dispatch import PlannedDispatch, RoutedTokens
from parallel.expert.rows import packed, unpacked, without_expert


class PaddedDispatch(PlannedDispatch):
    """Every rank gets the share of every other, and returns a partial sum of each row to its rank.

    C rows of each of R ranks, whatever the tokens selected, so that a graph can capture it:

        dispatch   all-gather over ep, [C, D] -> [R, C, D]   every rank sends the same to all
        combine    all-to-all over ep, [R, C, D] -> [R, C, D], summed over R in float32

    It sends no fewer bytes than `GatherDispatch`, but the sums travel once instead of from rank to rank, and
    are not rounded on the way.
    """

    def dispatch(
        self, x_TD: Tensor, topk_ids_TJ: Tensor, topk_weights_TJ: Tensor, num_experts: int
    ) -> RoutedTokens:
        """Raises ValueError for another number of tokens than was planned."""
        tokens, hidden = x_TD.shape
        top_k = topk_ids_TJ.shape[1]
        capacity = -(-max(self._planned(tokens)) // self._tp.size)
        share = self._sent = self._share(tokens)
        self._received = tokens
        rows = packed(x_TD[share], topk_ids_TJ[share], topk_weights_TJ[share])
        if missing := capacity - len(rows):
            rows = torch.cat([rows, without_expert(missing, rows, top_k)])
        gathered = self.ep.all_gather_rows(rows, [capacity] * self.ep.size)
        return unpacked(gathered, top_k, hidden, x_TD.dtype)

    def combine(self, out_MD: Tensor) -> Tensor:
        equal = [len(out_MD) // self.ep.size] * self.ep.size
        returned = self.ep.all_to_all_rows(out_MD, equal, equal)
        sums = returned.unflatten(0, (self.ep.size, -1)).sum(0, dtype=torch.float32).to(out_MD.dtype)
        share = self._sent
        sums = sums[: share.stop - share.start]
        return functional.pad(sums, (0, 0, share.start, self._received - share.stop))
