"""Root-mean-square normalisation. T tokens, D features."""

from collections.abc import Callable

import torch

from atom_ops import rms_norm
from workers.layers.context import BuildContext
from workers.layers.weighted import CheckpointTensor, ReadDecoded, ShardRange, ShardSpec, WeightedLayer


class RMSNorm(WeightedLayer):
    """RMSNorm over the last dimension.

    `zero_centred`: the checkpoint stores weight - 1; the weight is kept in float32, because 1 + w in
    16 bits would lose digits of w.
    """

    weight: torch.Tensor

    def __init__(self, size: int, eps: float, build: BuildContext, zero_centred: bool = False):
        super().__init__()
        self.eps = eps
        self.tp = build.tp
        whole = ShardRange.whole(size)
        if zero_centred:
            shard = ShardSpec(
                (size,), 0, whole, CheckpointTensor("weight", ((size,),)), ReadDecoded(_add_one)
            )
            self.add_weight("weight", [shard], build, torch.float32)
        else:
            self.add_weight("weight", [ShardSpec((size,), 0, whole)], build)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, self.weight, self.eps)

    def add_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual).

        `x_TD` is the output of a block: a partial sum, which is summed over the tensor-parallel ranks,
        in place. Without a residual it is the embedding, the same on every rank.
        """
        if residual_TD is None:
            return self(x_TD), x_TD
        return self.tp.all_reduce_add_rms_norm(x_TD, residual_TD, self.weight, self.eps)

    def begin_add_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Begin `add_norm` of a part of the tokens: see `Communicator.begin_all_reduce_add_rms_norm`."""
        return self.tp.begin_all_reduce_add_rms_norm(x_TD, residual_TD, self.weight, self.eps)


def _add_one(weight_D: torch.Tensor) -> torch.Tensor:
    return weight_D.float() + 1.0
