"""Root-mean-square normalisation. T tokens, D features."""

from collections.abc import Callable
from functools import partial

import torch

from atom_ops import rms_norm
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


class NormAcrossRanks(RMSNorm):
    """RMSNorm over features of which each rank has a range.

    `share`: 1 / number of ranks that have the same range.
    """

    def __init__(self, kept: ShardRange, eps: float, build: BuildContext, share: float = 1.0):
        super().__init__(kept.total, eps, build, kept=kept)
        self._features = kept.total
        self._share = share

    @property
    def size(self) -> int:
        """Number of features on this rank."""
        return len(self.weight)

    def squares(self, x_TF: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum of squares, float32 [T]."""
        return x_TF.float().square().sum(1) * self._share

    def scaled(self, x_TF: torch.Tensor, squares_T: torch.Tensor) -> torch.Tensor:
        """The normalised features, from the sum of squares of all ranks."""
        factor_T1 = torch.rsqrt(squares_T / self._features + self.eps)[:, None]
        return (x_TF.float() * factor_T1 * self.weight.float()).to(x_TF.dtype)


def norm_queries_and_keys(
    qkv_TO: torch.Tensor, q_norm: NormAcrossRanks, k_norm: NormAcrossRanks
) -> torch.Tensor:
    """A fused projection with normalised queries and keys; one all-reduce for both."""
    sizes = [q_norm.size, k_norm.size]
    *parts, v_TV = qkv_TO.split([*sizes, qkv_TO.shape[1] - sum(sizes)], 1)
    norms = q_norm, k_norm
    if q_norm.tp.size == 1:
        normed = [norm(part.contiguous()) for norm, part in zip(norms, parts, strict=True)]
    else:
        squares = [norm.squares(part) for norm, part in zip(norms, parts, strict=True)]
        # A row for each token, as all-reduces have.
        sums = q_norm.tp.all_reduce(torch.stack(squares, 1)).unbind(1)
        normed = [norm.scaled(part, total) for norm, part, total in zip(norms, parts, sums, strict=True)]
    return torch.cat((*normed, v_TV), 1)


def _factors(zero_centred: bool, scale: float, weight_D: torch.Tensor) -> torch.Tensor:
    return (weight_D.float() + float(zero_centred)) * scale
