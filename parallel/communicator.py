"""The collectives that a model's layers call."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from parallel.state import TPGroup


class Communicator:
    """Collectives of one tensor-parallel group; no-ops with one rank.

    Every rank must call the same collectives in the same order. If a rank is missing, the others
    raise torch's RuntimeError after the group's timeout.
    """

    def __init__(self, group: TPGroup) -> None:
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns `x`, which must be contiguous.

        The result is bitwise equal on all ranks.
        """
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather_last_dim(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate the ranks' `x` along the last dimension, in rank order.

        `sizes[r]` is the last dimension of rank r's tensor; the other dimensions are equal.
        """
        if self.size == 1:
            return x
        widest = max(sizes)
        padded = functional.pad(x, (0, widest - x.shape[-1])).contiguous()
        gathered = padded.new_empty(self.size, *padded.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), padded)
        parts = [part[..., :size] for part, size in zip(gathered, sizes, strict=True)]
        return torch.cat(parts, dim=-1)
