"""How checkpoints store the weights of their experts.

X experts, D hidden, F features of an expert. Every layout yields, for one expert, gate [F, D],
up [F, D] and down [D, F], and their biases.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from workers.layers.quantization import mxfp4
from workers.layers.weighted import CheckpointTensor

Part = Literal["gate", "up", "down"]
Stored = tuple[tuple[CheckpointTensor, ...], Callable[..., Tensor] | None]
"""`tensors` and `decode` of a `ShardSpec`."""


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

    @abstractmethod
    def matrix(self, part: Part, expert: int, sizes: ExpertSizes) -> Stored: ...

    @abstractmethod
    def bias(self, part: Part, expert: int, sizes: ExpertSizes) -> Stored: ...


@dataclass(frozen=True, slots=True)
class PerExpert(ExpertLayout):
    """One tensor for each matrix of each expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def matrix(self, part: Part, expert: int, sizes: ExpertSizes) -> Stored:
        name = f"{expert}.{getattr(self, part)}.weight"
        return (CheckpointTensor(name, sizes.matrix(part)),), None

    def bias(self, part: Part, expert: int, sizes: ExpertSizes) -> Stored:
        name = f"{expert}.{getattr(self, part)}.bias"
        return (CheckpointTensor(name, sizes.matrix(part)[:1]),), None


PER_EXPERT = PerExpert()


class Interleaved(ExpertLayout):
    """GPT-OSS: all experts stacked in one tensor, inputs before outputs, rows of gate and up interleaved.

    gate_up_proj [X, D, 2F]   down_proj [X, F, D]   gate_up_proj_bias [X, 2F]   down_proj_bias [X, D]
    """

    def matrix(self, part: Part, expert: int, sizes: ExpertSizes) -> Stored:
        hidden, features = sizes.hidden, sizes.features
        if part == "down":
            return (CheckpointTensor("down_proj", (sizes.experts, features, hidden), expert),), _transposed
        fused = CheckpointTensor("gate_up_proj", (sizes.experts, hidden, 2 * features), expert)
        return (fused,), partial(_transposed_half, part)

    def bias(self, part: Part, expert: int, sizes: ExpertSizes) -> Stored:
        if part == "down":
            return (CheckpointTensor("down_proj_bias", (sizes.experts, sizes.hidden), expert),), None
        fused = CheckpointTensor("gate_up_proj_bias", (sizes.experts, 2 * sizes.features), expert)
        return (fused,), partial(_half, part)


class InterleavedMXFP4(Interleaved):
    """GPT-OSS as published: matrices in MXFP4, outputs before inputs; biases not quantized.

    gate_up_proj_blocks [X, 2F, D/32, 16]   down_proj_blocks [X, D, F/32, 16]   …_scales: without the 16
    """

    def matrix(self, part: Part, expert: int, sizes: ExpertSizes) -> Stored:
        rows, columns = sizes.matrix(part)
        if columns % mxfp4.BLOCK:
            raise ValueError(f"MXFP4 experts of {columns} inputs: not a multiple of {mxfp4.BLOCK}")
        name, rows = ("down_proj", rows) if part == "down" else ("gate_up_proj", 2 * rows)
        scales = (sizes.experts, rows, columns // mxfp4.BLOCK)
        parts = (
            CheckpointTensor(f"{name}_blocks", (*scales, mxfp4.BLOCK // 2), expert),
            CheckpointTensor(f"{name}_scales", scales, expert),
        )
        return parts, mxfp4.dequantize if part == "down" else partial(_dequantized_half, part)


def _half(part: Part, interleaved: Tensor) -> Tensor:
    return interleaved[0 if part == "gate" else 1 :: 2]


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.t()


def _transposed_half(part: Part, interleaved_D2F: Tensor) -> Tensor:
    return _half(part, interleaved_D2F.t())


def _dequantized_half(part: Part, blocks: Tensor, scales: Tensor) -> Tensor:
    return mxfp4.dequantize(_half(part, blocks), _half(part, scales))
