"""How checkpoints store the weights of their experts.

X experts, D hidden, F features of an expert. Every layout yields, for one expert, gate [F, D],
up [F, D] and down [D, F], as the quantization scheme stores them, and their biases.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from workers.layers.quantization.mxfp4 import GROUP
from workers.layers.quantization.scheme import PLAIN, Scheme
from workers.layers.weighted import CheckpointTensor, ReadDecoded, ShardSpec

Part = Literal["gate", "up", "down"]


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """X, D and F of a layer, before sharding."""

    experts: int
    hidden: int
    features: int

    def matrix(self, part: Part) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs)."""
        return (self.hidden, self.features) if part == "down" else (self.features, self.hidden)


class ExpertLayout(ABC):
    """Locates one expert's matrices and biases in the checkpoint, relative to the layer's name."""

    @property
    @abstractmethod
    def matrices(self) -> tuple[str, ...]:
        """Names of one expert's matrices, by which a quantization config excludes them."""

    @abstractmethod
    def matrix(self, shard: ShardSpec, part: Part, expert: int, sizes: ExpertSizes) -> ShardSpec:
        """The shard of one of the tensors that store the part's matrix, with the tensor that holds it."""

    @abstractmethod
    def bias(self, shard: ShardSpec, part: Part, expert: int, sizes: ExpertSizes) -> ShardSpec:
        """The shard of the part's bias, with the tensor that holds it."""

    @abstractmethod
    def check(self, scheme: Scheme, path: str) -> None:
        """Raise ValueError if experts in this layout are not supported in that scheme."""


@dataclass(frozen=True)
class PerExpert(ExpertLayout):
    """One tensor for each matrix of each expert, or as many as its scheme has.

    `or_stacked`: plain ones may instead be stacked, gate_up_proj [X, 2F, D] and down_proj [X, D, F].
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    or_stacked: bool = False

    @property
    def matrices(self) -> tuple[str, ...]:
        return tuple(f"0.{name}" for name in (self.gate, self.up, self.down))

    def matrix(self, shard: ShardSpec, part: Part, expert: int, sizes: ExpertSizes) -> ShardSpec:
        name, *others = (f"{expert}.{getattr(self, part)}.{each}" for each in shard.stored.on_disk)
        shapes = shard.stored.shapes_on_disk(sizes.matrix(part))
        stacked = self._stacked(part, expert, sizes) if shard.stored in PLAIN.tensors else None
        return replace(shard, tensor=CheckpointTensor(name, shapes, None, tuple(others), stacked=stacked))

    def _stacked(self, part: Part, expert: int, sizes: ExpertSizes) -> CheckpointTensor | None:
        if not self.or_stacked:
            return None
        rows, columns = sizes.matrix(part)
        if part == "down":
            return CheckpointTensor("down_proj", ((sizes.experts, rows, columns),), expert)
        first_row = rows if part == "up" else 0
        shapes = ((sizes.experts, 2 * rows, columns),)
        return CheckpointTensor("gate_up_proj", shapes, expert, first_row=first_row)

    def bias(self, shard: ShardSpec, part: Part, expert: int, sizes: ExpertSizes) -> ShardSpec:
        name = f"{expert}.{getattr(self, part)}.bias"
        return replace(shard, tensor=CheckpointTensor(name, (shard.shape,)))

    def check(self, scheme: Scheme, path: str) -> None:
        if not scheme.linear:
            raise ValueError(f"{path}: separate tensors of each expert in {scheme.name} are not supported")


PER_EXPERT = PerExpert()
PER_EXPERT_OR_STACKED = PerExpert(or_stacked=True)


class InputsFirst(ExpertLayout):
    """Llama 4, Qwen3-VL: all experts stacked in one tensor, inputs before outputs, gate before up.

    as published           gate_up_proj [X, D, 2F]   down_proj [X, F, D]
    transformers may save  gate_up_proj [X, 2F, D]   down_proj [X, D, F]
    from a GGUF file       those of each expert, as in `PerExpert`; their formats are those of the two above
    """

    @property
    def matrices(self) -> tuple[str, ...]:
        return ("gate_up_proj", "down_proj")

    def matrix(self, shard: ShardSpec, part: Part, expert: int, sizes: ExpertSizes) -> ShardSpec:
        alone = PER_EXPERT.matrix(shard, part, expert, sizes)
        if shard.stored not in PLAIN.tensors:
            return alone
        assert alone.tensor is not None
        rows, columns = sizes.matrix(part)
        name, all_rows = ("down_proj", rows) if part == "down" else ("gate_up_proj", 2 * rows)
        shapes = (columns, all_rows), (all_rows, columns)
        stacked = CheckpointTensor(name, tuple((sizes.experts, *shape) for shape in shapes), expert)
        first = rows if part == "up" else 0
        decode = partial(_rows_of_outputs, shapes[0], all_rows, slice(first, first + rows))
        return replace(shard, tensor=replace(alone.tensor, stacked=stacked), reading=ReadDecoded(decode))

    def bias(self, shard: ShardSpec, part: Part, expert: int, sizes: ExpertSizes) -> ShardSpec:
        raise ValueError("biases of stacked experts whose inputs come first are not supported")

    def check(self, scheme: Scheme, path: str) -> None:
        if scheme.in_checkpoint is not PLAIN.tensors and not scheme.mixes:
            raise ValueError(
                f"{path}: stacked experts whose inputs come first are not supported in {scheme.name}: use a "
                "plain checkpoint"
            )


INPUTS_FIRST = InputsFirst()


class Interleaved(ExpertLayout):
    """GPT-OSS: all experts stacked in one tensor, rows of gate and up interleaved.

    Plain matrices have inputs before outputs:
    gate_up_proj [X, D, 2F]   down_proj [X, F, D]   gate_up_proj_bias [X, 2F]   down_proj_bias [X, D]

    As published, in MXFP4, outputs before inputs; biases are not quantized:
    gate_up_proj_blocks [X, 2F, D/32, 16]   down_proj_blocks [X, D, F/32, 16]   …_scales: without the 16
    """

    @property
    def matrices(self) -> tuple[str, ...]:
        return ("gate_up_proj", "down_proj")

    def matrix(self, shard: ShardSpec, part: Part, expert: int, sizes: ExpertSizes) -> ShardSpec:
        stored = shard.stored
        rows, columns = sizes.matrix(part)
        name, rows = ("down_proj", rows) if part == "down" else ("gate_up_proj", 2 * rows)
        if stored in PLAIN.tensors:
            plain = CheckpointTensor(name, ((sizes.experts, columns, rows),), expert)
            decode = _transposed if part == "down" else partial(_transposed_half, part)
            return replace(shard, tensor=plain, reading=ReadDecoded(decode))
        shape: tuple[int, ...] = (sizes.experts, rows, columns // GROUP)
        if stored.unit[1] < GROUP:
            shape = (*shape, GROUP // stored.unit[1])
        tensor = CheckpointTensor(name + stored.suffix, (shape,), expert)
        return replace(shard, tensor=tensor, reading=ReadDecoded(partial(_rows, part, len(shape) == 4)))

    def bias(self, shard: ShardSpec, part: Part, expert: int, sizes: ExpertSizes) -> ShardSpec:
        if part == "down":
            tensor = CheckpointTensor("down_proj_bias", ((sizes.experts, sizes.hidden),), expert)
            return replace(shard, tensor=tensor)
        fused = CheckpointTensor("gate_up_proj_bias", ((sizes.experts, 2 * sizes.features),), expert)
        return replace(shard, tensor=fused, reading=ReadDecoded(partial(_half, part)))

    def check(self, scheme: Scheme, path: str) -> None:
        if scheme.in_checkpoint is not PLAIN.tensors and scheme.linear:
            raise ValueError(f"{path}: the stacked experts of GPT-OSS in {scheme.name} are not supported")


INTERLEAVED = Interleaved()


def _half(part: Part, interleaved: Tensor) -> Tensor:
    return interleaved[0 if part == "gate" else 1 :: 2]


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.t()


def _rows_of_outputs(published: tuple[int, int], all_rows: int, kept: slice, matrix: Tensor) -> Tensor:
    outputs_first = matrix.t() if matrix.shape == published else matrix
    return outputs_first[kept] if len(outputs_first) == all_rows else outputs_first


def _transposed_half(part: Part, interleaved_D2F: Tensor) -> Tensor:
    return _half(part, interleaved_D2F.t())


def _rows(part: Part, grouped: bool, packed: Tensor) -> Tensor:
    """The rows of a part; `grouped`: in groups, which become one row."""
    rows = packed if part == "down" else _half(part, packed)
    return rows.flatten(1) if grouped else rows
