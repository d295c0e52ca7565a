"""A token, its expert ids and their weights as one row of bytes, so that one collective sends all three.

| J ids, int32 | J weights, float32 | x, D numbers | padding to 16 bytes |
"""

import torch
from torch import Tensor

from parallel.expert.dispatch import RoutedTokens

_ALIGNED = 16


def packed(x_TD: Tensor, topk_ids_TJ: Tensor, topk_weights_TJ: Tensor) -> Tensor:
    """uint8 [T, bytes of a row]. `topk_weights_TJ` is float32."""
    parts = [topk_ids_TJ.int().view(torch.uint8), topk_weights_TJ.contiguous().view(torch.uint8)]
    parts.append(x_TD.contiguous().view(torch.uint8))
    if missing := -sum(part.shape[1] for part in parts) % _ALIGNED:
        parts.append(parts[0].new_zeros(len(x_TD), missing))
    return torch.cat(parts, dim=1)


def unpacked(rows_MB: Tensor, top_k: int, hidden: int, dtype: torch.dtype) -> RoutedTokens:
    """The inverse of `packed`; `x_MD` and the weights are views of the rows."""
    ends = 4 * top_k, 8 * top_k, 8 * top_k + hidden * dtype.itemsize
    ids, weights, x, _ = rows_MB.tensor_split(ends, dim=1)
    return RoutedTokens(x.view(dtype), ids.view(torch.int32).long(), weights.view(torch.float32))


def without_expert(rows: int, like_MB: Tensor, top_k: int) -> Tensor:
    """Rows of padding: their ids are of no expert."""
    padding = like_MB.new_zeros(rows, like_MB.shape[1])
    padding[:, : 4 * top_k] = 255  # -1 in int32
    return padding
