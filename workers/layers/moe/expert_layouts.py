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
from workers.layers.quantization.scheme import PLAIN, WHOLE, Matrix, Scheme, StoredTensor
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
    transformers may save  gate_up_proj [X, 2F, D]   down_proj [X, D, F], if they are plain

    FP8 has the layout that is published, and scales next to it. In blocks, as in Qwen's checkpoints:
    gate_up_proj_scale_inv [X, D/128, 2F/128]   down_proj_scale_inv [X, F/128, D/128]
    Per channel, as transformers saves fbgemm_fp8; the axis of 1 may be elsewhere, or not be there:
    gate_up_proj_scale [X, 1, 2F]               down_proj_scale [X, D, 1]

    All other formats, and these too, may be those of each expert, as in `PerExpert`: Llama 4 Maverick in FP8
    by compressed-tensors, and GGUF files.
    """

    @property
    def matrices(self) -> tuple[str, ...]:
        return ("gate_up_proj", "down_proj")

    def matrix(self, shard: ShardSpec, part: Part, expert: int, sizes: ExpertSizes) -> ShardSpec:
        alone = PER_EXPERT.matrix(shard, part, expert, sizes)
        stored = shard.stored
        if stored.stacked is None:
            return alone
        assert alone.tensor is not None
        matrix = rows, columns = sizes.matrix(part)
        name, all_rows = ("down_proj", rows) if part == "down" else ("gate_up_proj", 2 * rows)
        published, *others = _stacked_shapes(stored, (all_rows, columns))
        decode = partial(_rows_of_outputs, stored, matrix, published, part == "up")
        stacked = CheckpointTensor(
            name + stored.stacked,
            tuple((sizes.experts, *shape) for shape in (published, *others)),
            expert,
            reading=ReadDecoded(decode),
        )
        return replace(shard, tensor=replace(alone.tensor, stacked=stacked))

    def bias(self, shard: ShardSpec, part: Part, expert: int, sizes: ExpertSizes) -> ShardSpec:
        raise ValueError("biases of stacked experts whose inputs come first are not supported")

    def check(self, scheme: Scheme, path: str) -> None:
        PER_EXPERT.check(scheme, path)


def _stacked_shapes(stored: StoredTensor, matrix: Matrix) -> tuple[tuple[int, ...], ...]:
    """The shapes that one expert's entry may have; in the first, inputs are before outputs."""
    outputs, inputs = stored.shape(matrix)
    if stored in PLAIN.tensors:
        return (inputs, outputs), (outputs, inputs)
    if stored.unit[1] == WHOLE:
        return (inputs, outputs), (outputs, inputs), (outputs,)
    return ((inputs, outputs),)


def _rows_of_outputs(
    stored: StoredTensor, matrix: Matrix, published: tuple[int, ...], second: bool, entry: Tensor
) -> Tensor:
    """The rows of one matrix [O, I], the first or the second of those in the entry of its expert."""
    outputs_first = entry.t() if entry.shape == published else entry
    count = stored.shape(matrix)[0]
    rows = outputs_first[count if second else 0 :][:count]
    return rows if stored.decode is None else stored.decode(rows, matrix)


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


def _transposed_half(part: Part, interleaved_D2F: Tensor) -> Tensor:
    return _half(part, interleaved_D2F.t())


def _rows(part: Part, grouped: bool, packed: Tensor) -> Tensor:
    """The rows of a part; `grouped`: in groups, which become one row."""
    rows = packed if part == "down" else _half(part, packed)
    return rows.flatten(1) if grouped else rows
