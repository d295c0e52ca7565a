"""Root-mean-square normalisation. T tokens, D features."""

from collections.abc import Callable
from functools import partial

import torch

from atom_ops import add_rms_norm, normalised_queries_keys, query_key_squares, rms_norm
from workers.layers.context import BuildContext
from workers.layers.weighted import CheckpointTensor, ReadDecoded, ShardRange, ShardSpec, WeightedLayer


class RMSNorm(WeightedLayer):
    """RMSNorm over the last dimension.

    `zero_centred`: the checkpoint stores weight - 1. `scale` is a factor of the output. With either the
    weight is kept in float32, because in 16 bits it would lose digits.
    """

    weight: torch.Tensor

    def __init__(
        self,
        size: int,
        eps: float,
        build: BuildContext,
        zero_centred: bool = False,
        scale: float = 1.0,
        kept: ShardRange | None = None,
    ):
        super().__init__()
        self.eps = eps
        self.tp = build.tp
        kept = kept or ShardRange.whole(size)
        if zero_centred or scale != 1.0:
            reading = ReadDecoded(partial(_factors, zero_centred, scale))
            shard = ShardSpec((size,), 0, kept, CheckpointTensor("weight", ((size,),)), reading)
            self.add_weight("weight", [shard], build, torch.float32)
        else:
            self.add_weight("weight", [ShardSpec((size,), 0, kept)], build)

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


def add_norms(
    x_norm: RMSNorm | None, norm: RMSNorm | None, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(total), total), where total is x_norm(x) + residual; a norm that is None is left out.

    Both norms have the same epsilon. See `RMSNorm.add_norm` for `x_TD` and a missing residual.
    """
    if residual_TD is None:
        return x_TD if norm is None else norm(x_TD), x_TD
    if x_norm is None:
        assert norm is not None, "blocks have a norm before or after them"
        return norm.add_norm(x_TD, residual_TD)
    assert norm is None or norm.eps == x_norm.eps
    weight_D = None if norm is None else norm.weight
    return add_rms_norm(x_norm.tp.all_reduce(x_TD), residual_TD, weight_D, x_norm.eps, x_norm.weight)


class NormAcrossRanks(RMSNorm):
    """RMSNorm over the features of all heads, of which each rank has a range."""

    def __init__(self, kept: ShardRange, eps: float, build: BuildContext):
        super().__init__(kept.total, eps, build, kept=kept)
        self.kept = kept


def norm_queries_and_keys(
    qkv_TO: torch.Tensor, q_norm: NormAcrossRanks, k_norm: NormAcrossRanks, repeated: int
) -> torch.Tensor:
    """A fused projection with normalised queries and keys; several ranks need one all-reduce for both.

    The first `repeated` features of the keys are in the sum of another rank.
    """
    q = q_norm.kept
    k = k_norm.kept
    squares_T2 = None
    if q_norm.tp.size > 1:
        squares_T2 = q_norm.tp.all_reduce(query_key_squares(qkv_TO, q.size, k.size, repeated))
    return normalised_queries_keys(
        qkv_TO, squares_T2, q_norm.weight, k_norm.weight, q.total, k.total, q_norm.eps
    )


def _factors(zero_centred: bool, scale: float, weight_D: torch.Tensor) -> torch.Tensor:
    return (weight_D.float() + float(zero_centred)) * scale
