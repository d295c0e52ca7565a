"""Root-mean-square normalisation. T tokens, D features."""

import torch

from atom_ops import add_rms_norm, rms_norm
from workers.layers.context import BuildContext
from workers.layers.weighted import DiskTensor, Range, Source, WeightedLayer


class RMSNorm(WeightedLayer):
    """Scales each row to unit mean square, then by the weight.

    A zero-centred one is on disk as what it has more than one; it keeps the digits that adding one takes.
    """

    weight: torch.Tensor

    def __init__(self, size: int, eps: float, build: BuildContext, zero_centred: bool = False):
        super().__init__()
        self.eps = eps
        whole = Range.whole(size)
        if zero_centred:
            source = Source((size,), 0, whole, (DiskTensor("weight", (size,)),), _one_more)
            self.add_weight("weight", [source], build, torch.float32)
        else:
            self.add_weight("weight", [Source((size,), 0, whole)], build)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TD, self.weight, self.eps)

    def add(self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum); without a residual yet the sum is `x_TD` itself."""
        if residual_TD is None:
            return self(x_TD), x_TD
        return add_rms_norm(x_TD, residual_TD, self.weight, self.eps)


def _one_more(weight_D: torch.Tensor) -> torch.Tensor:
    return weight_D.float() + 1.0
