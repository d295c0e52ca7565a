"""Every rank sees all tokens: all-gather over dp, reduce-scatter of the partial sums over dp."""

from torch import Tensor

from parallel.expert.dispatch import PlannedDispatch, RoutedTokens
from parallel.expert.rows import packed, unpacked


class GatherDispatch(PlannedDispatch):
    """All-gather and reduce-scatter, over the data-parallel ranks.

    The tensor-parallel ranks of a data-parallel rank have the same tokens already, so that with dp 1
    nothing is sent before the all-reduce of the next norm.
    """

    def dispatch(
        self, x_TD: Tensor, topk_ids_TJ: Tensor, topk_weights_TJ: Tensor, num_experts: int
    ) -> RoutedTokens:
        """Raises ValueError for another number of tokens than was planned."""
        if self._dp.size == 1:
            return RoutedTokens(x_TD, topk_ids_TJ, topk_weights_TJ)
        tokens, hidden = x_TD.shape
        top_k = topk_ids_TJ.shape[1]
        rows = self._dp.all_gather_rows(packed(x_TD, topk_ids_TJ, topk_weights_TJ), self._planned(tokens))
        return unpacked(rows, top_k, hidden, x_TD.dtype)

    def combine(self, out_MD: Tensor) -> Tensor:
        return self._dp.reduce_scatter_rows(out_MD, self._tokens or [out_MD.shape[0]])
