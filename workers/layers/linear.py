"""Linear layers, spread over the tensor-parallel ranks by output rows or by input columns.

T tokens, I input features, O output features; all counts in `forward` are this rank's.
"""

from collections.abc import Sequence

import torch

from atom_ops import add_norm_linear, linear, pack_linear_weight
from parallel.sharding import split
from workers.layers.activation import GatedLinear
from workers.layers.context import BuildContext
from workers.layers.norm import RMSNorm
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

    def process_weights_after_loading(self) -> None:
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

    def after_norm(
        self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the product of the sum's norm, the sum); without a residual yet the sum is `x_TD` itself."""
        return add_norm_linear(x_TD, residual_TD, norm.weight, norm.eps, self.weight, self.bias)


class ReorderedLinear(ColumnParallelLinear):
    """Its features come in another order than the checkpoint's rows."""

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[Range],
        bias: bool,
        build: BuildContext,
        order: torch.Tensor,
    ):
        """Feature i is row `order[i]` of those that this rank keeps."""
        super().__init__(in_features, outputs, bias, build)
        self._order = order.to(build.device)

    def process_weights_after_loading(self) -> None:
        self.weight = self.weight.index_select(0, self._order)
        if self.bias is not None:
            self.bias = self.bias.index_select(0, self._order)
        super().process_weights_after_loading()


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
        return self._summed(linear(x_TI, self.weight, self._own_bias))

    def after_gate(self, gated: GatedLinear, x_T2F: torch.Tensor) -> torch.Tensor:
        """The product of a gated activation; `x_T2F` holds its gate beside what it lets through."""
        return self._summed(gated(x_T2F, self.weight, self._own_bias))

    def _summed(self, partial_TO: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce(partial_TO) if self._reduce else partial_TO

    @property
    def _own_bias(self) -> torch.Tensor | None:
        """The bias belongs to the sum: one rank adds it."""
        return self.bias if self._tp.rank == 0 else None
