"""Linear layers, sharded over the tensor-parallel ranks by output rows or by input columns.

T tokens, I input features, O output features; in `forward` all sizes are this rank's.
"""

from collections.abc import Sequence

import torch

from atom_ops import Weight, add_norm_linear, linear, pack_linear_weight
from parallel.sharding import split
from workers.layers.activation import GatedLinear
from workers.layers.context import BuildContext
from workers.layers.norm import RMSNorm
from workers.layers.quantization.scheme import PLAIN
from workers.layers.weighted import ShardRange, ShardSpec, WeightedLayer


def tp_range(total: int, build: BuildContext, unit: int = 1) -> ShardRange:
    """This rank's range of a dimension that may be split between blocks of `unit` entries.

    Blocks are split as evenly as possible; the last one may be smaller. Raises ValueError if there
    are fewer blocks than ranks.
    """
    blocks = -(-total // unit)
    if unit > 1 and blocks < build.tp.size:
        raise ValueError(
            f"{build.prefix}: {total} features are {blocks} blocks of {unit}, too few for "
            f"--tensor-parallel-size {build.tp.size}: use at most {blocks}"
        )
    start, size = split(blocks, build.tp.size, build.tp.rank)
    return ShardRange(total, start * unit, min((start + size) * unit, total) - start * unit)


def mlp_range(features: int, build: BuildContext) -> ShardRange:
    """This rank's features of a gated MLP: whole blocks of both of its layers."""
    schemes = [build.quantization.linear(build.at(name).prefix) for name in ("gate_up_proj", "down_proj")]
    return tp_range(features, build, max(schemes[0].unit[0], schemes[1].unit[1]))


class Linear(WeightedLayer):
    """x W^T + b. Plain, unless a subclass adds its matrix with a scheme."""

    weight: Weight
    bias: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None)

    def process_weights_after_loading(self) -> None:
        """Convert the weight to the layout in which the matmul is fastest."""
        self.set_weight("weight", pack_linear_weight(self.loaded("weight")))

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        return linear(x_TI, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """Each rank computes a part of the output features; several projections may be fused.

    `outputs` has one range for each fused projection, in the order of packed_modules_mapping.
    """

    def __init__(self, in_features: int, outputs: Sequence[ShardRange], bias: bool, build: BuildContext):
        super().__init__()
        scheme = build.quantization.linear(build.prefix)
        shards = [ShardSpec((o.total, in_features), 0, o) for o in outputs]
        self.add_matrix("weight", scheme, shards, build)
        if bias:
            self.add_weight("bias", [ShardSpec((o.total,), 0, o) for o in outputs], build)

    def after_norm(
        self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(linear(norm(x + residual)), x + residual); see `RMSNorm.add` for `x_TD`."""
        if norm.tp.size > 1 and residual_TD is not None:
            normed_TD, total_TD = norm.add(x_TD, residual_TD)
            return self(normed_TD), total_TD
        return add_norm_linear(x_TD, residual_TD, norm.weight, norm.eps, self.weight, self.bias)


class ReorderedLinear(ColumnParallelLinear):
    """A linear layer whose output features have another order than the checkpoint's rows."""

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[ShardRange],
        bias: bool,
        build: BuildContext,
        order: torch.Tensor,
    ):
        """Output feature i is row `order[i]` of the rows that this rank keeps.

        Raises ValueError for a quantized matrix, whose rows cannot be reordered one by one.
        """
        super().__init__(in_features, outputs, bias, build)
        if (scheme := build.quantization.linear(build.prefix)) is not PLAIN:
            raise ValueError(f"{build.prefix} in {scheme.name} is not supported: use a plain checkpoint")
        self._order = order.to(build.device)

    def process_weights_after_loading(self) -> None:
        self.set_weight("weight", self.get_buffer("weight").index_select(0, self._order))
        if self.bias is not None:
            self.bias = self.bias.index_select(0, self._order)
        super().process_weights_after_loading()


class RowParallelLinear(Linear):
    """Each rank multiplies a part of the input features; the output is its partial sum.

    The norm that reads it sums over the ranks: `RMSNorm.add`.
    """

    def __init__(self, inputs: ShardRange, out_features: int, bias: bool, build: BuildContext):
        super().__init__()
        self._adds_bias = build.tp.rank == 0
        scheme = build.quantization.linear(build.prefix)
        self.add_matrix("weight", scheme, [ShardSpec((out_features, inputs.total), 1, inputs)], build)
        if bias:
            self.add_weight("bias", [ShardSpec((out_features,), 0, ShardRange.whole(out_features))], build)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        return linear(x_TI, self.weight, self._rank_bias)

    def after_gate(self, gated: GatedLinear, x_T2F: torch.Tensor) -> torch.Tensor:
        """linear(activation(gate) * up), where `x_T2F` holds gate and up side by side."""
        return gated(x_T2F, self.weight, self._rank_bias)

    @property
    def _rank_bias(self) -> torch.Tensor | None:
        """The bias is added once, by rank 0."""
        return self.bias if self._adds_bias else None
