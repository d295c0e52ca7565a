"""The collectives that a model's layers call."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from parallel.state import TPGroup


class Communicator:
    """Collectives of one tensor-parallel group; with one rank none of them does anything.

    Every rank must call the same ones in the same order. A rank that never comes makes the
    others fail with torch's RuntimeError after the group's timeout.
    """

    def __init__(self, group: TPGroup) -> None:
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns `x`, which is contiguous.

        Every rank gets the same bits.
        """
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather_last_dim(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's `x` side by side along the last dimension, in rank order.

        `sizes[r]` is the last dimension of rank r's tensor; the others agree.
        """
        if self.size == 1:
            return x
        widest = max(sizes)
        padded = functional.pad(x, (0, widest - x.shape[-1])).contiguous()
        everyone = padded.new_empty(self.size, *padded.shape)
        dist.all_gather_into_tensor(everyone.flatten(0, 1), padded)
        parts = [part[..., :size] for part, size in zip(everyone, sizes, strict=True)]
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Rank `source`'s numbers in every rank's `x`, in place; returns `x`."""
        if self.size > 1:
            dist.broadcast(x, src=source)
        return x
