"""Linear layers, sharded over the tensor-parallel ranks by output rows or by input columns.

T tokens, I input features, O output features; in `forward` all sizes are this rank's.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from atom_ops import AffineInts, Weight, add_norm_linear, linear, pack_linear_weight
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
    gate_up = build.quantization.parts(build.at("gate_up_proj").prefix)
    down = build.quantization.linear(build.at("down_proj").prefix)
    return tp_range(features, build, max(down.unit[1], *(scheme.unit[0] for scheme in gate_up)))


class Linear(WeightedLayer):
    """x W^T + b. Plain, unless a subclass adds its matrix with a scheme."""

    weight: Weight
    bias: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None)

    def process_weights_after_loading(self) -> None:
        """Convert the weight to the layout in which the matmul is fastest."""
        self.set_weight("weight", self._packed(self.loaded("weight")))

    def _packed(self, weight: Weight) -> Weight:
        packed = pack_linear_weight(weight)
        if isinstance(packed, AffineInts):  # no kernel here reads them
            self.dequantizes = True
            packed = pack_linear_weight(self.dequantized(weight))
        return packed

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        return linear(x_TI, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    """Each rank computes a part of the output features; several projections may be fused.

    `outputs` has one range for each fused projection, in the order of packed_modules_mapping. If the
    checkpoint stores them in different formats, they are dequantized when they are loaded.
    """

    def __init__(self, in_features: int, outputs: Sequence[ShardRange], bias: bool, build: BuildContext):
        super().__init__()
        schemes = build.quantization.parts(build.prefix)
        shards = [ShardSpec((o.total, in_features), 0, o) for o in outputs]
        self._parts = [f"part{number}" for number in range(len(shards))] if len(set(schemes)) > 1 else []
        self.dequantizes = bool(self._parts)
        if self._parts:
            for number, (scheme, shard) in enumerate(zip(schemes, shards, strict=True)):
                self.add_matrix(f"part{number}", scheme, [replace(shard, module=number)], build)
        else:
            self.add_matrix("weight", schemes[0], shards, build)
        if bias:
            self.add_weight("bias", [ShardSpec((o.total,), 0, o) for o in outputs], build)

    def process_weights_after_loading(self) -> None:
        self._join_parts()
        super().process_weights_after_loading()

    def _join_parts(self) -> None:
        """Make one plain weight of parts that are stored in different formats."""
        if self._parts:
            numbers = [self.dequantized(self.loaded(name)) for name in self._parts]
            for name in self._parts:
                self.remove_matrix(name)
            self.register_buffer("weight", torch.cat(numbers))
            self._parts = []

    def after_norm(
        self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(linear(norm(x + residual)), x + residual); see `RMSNorm.add_norm` for `x_TD`."""
        if norm.tp.size > 1 and residual_TD is not None:
            normed_TD, total_TD = norm.add_norm(x_TD, residual_TD)
            return self(normed_TD), total_TD
        return add_norm_linear(x_TD, residual_TD, norm.weight, norm.eps, self.weight, self.bias)


class ReplicatedLinear(Linear):
    """The whole layer on every rank. Checkpoints do not quantize it."""

    def __init__(self, in_features: int, out_features: int, build: BuildContext):
        super().__init__()
        whole = ShardRange.whole(out_features)
        self.add_weight("weight", [ShardSpec((out_features, in_features), 0, whole)], build)


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

        A quantized matrix is dequantized when it is loaded: rows of a block cannot be reordered one by one.
        """
        super().__init__(in_features, outputs, bias, build)
        self.dequantizes = any(scheme is not PLAIN for scheme in build.quantization.parts(build.prefix))
        self._order = order.to(build.device)

    def process_weights_after_loading(self) -> None:
        self._join_parts()
        ordered = self.dequantized(self.loaded("weight")).index_select(0, self._order)
        self.set_weight("weight", pack_linear_weight(ordered))
        if self.bias is not None:
            self.bias = self.bias.index_select(0, self._order)


class RowParallelLinear(Linear):
    """Each rank multiplies a part of the input features; the output is its partial sum.

    The norm that reads it sums over the ranks: `RMSNorm.add_norm`.
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
