"""Linear layers, spread over the tensor-parallel ranks by output rows or by input columns.

T tokens, I input features, O output features; all counts in `forward` are this rank's.
"""

from collections.abc import Sequence

import torch

from atom_ops import linear, pack_linear_weight
from parallel.sharding import split
from workers.layers.context import BuildContext
from workers.layers.weighted import Range, Source, WeightedLayer


def tp_range(total: int, build: BuildContext) -> Range:
    """This rank's share of a dimension that may be cut anywhere."""
    return Range(total, *split(total, build.tp.size, build.tp.rank))


class Linear(WeightedLayer):
    """x W^T + b."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None)

    def finish_loading(self) -> None:
        """Exchange the plain weight for the layout that the matrix product is fastest in."""
        self.weight = pack_linear_weight(self.weight)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        return linear(x_TI, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """Each rank makes a part of the output features; several projections may be fused.

    `outputs` has one range for each fused projection, in the order of packed_modules_mapping.
    """

    def __init__(self, in_features: int, outputs: Sequence[Range], bias: bool, build: BuildContext):
        super().__init__()
        self.add_weight("weight", [Source((o.total, in_features), 0, o) for o in outputs], build)
        if bias:
            self.add_weight("bias", [Source((o.total,), 0, o) for o in outputs], build)


class RowParallelLinear(Linear):
    """Each rank reads a part of the input features; the partial sums are added over the ranks.

    Without `reduce` they stay partial: whoever adds them to others sums them all at once.
    """

    def __init__(
        self, inputs: Range, out_features: int, bias: bool, build: BuildContext, reduce: bool = True
    ):
        super().__init__()
        self._tp = build.tp
        self._reduce = reduce
        self.add_weight("weight", [Source((out_features, inputs.total), 1, inputs)], build)
        if bias:
            self.add_weight("bias", [Source((out_features,), 0, Range.whole(out_features))], build)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        # The bias belongs to the sum: one rank adds it.
        bias = self.bias if self._tp.rank == 0 else None
        partial_TO = linear(x_TI, self.weight, bias)
        return self._tp.all_reduce(partial_TO) if self._reduce else partial_TO
