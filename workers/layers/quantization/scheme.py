"""What a format stores for one matrix of the checkpoint, and the weight that this becomes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops import Weight

Fill = Callable[[Tensor, float, torch.Generator], None]
"""Fills a tensor so that the matrix's random numbers have a standard deviation of the second argument."""

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Packing:
    """How the checkpoint stores a tensor whose layout in memory is another one."""

    name: str
    """The last part of its name, instead of that of the matrix with the suffix."""
    unit: tuple[int, int]
    """Outputs and inputs of the matrix for each of its entries; 0: all of them."""
    transposed: bool
    """Whether its first dimension is the inputs."""
    unpack: Callable[[Tensor], Tensor]
    """Maps a part of it, outputs first, to the same part in memory."""
    vector: bool = False
    """Whether it has no dimension for the outputs."""

    def shape(self, matrix: tuple[int, int]) -> tuple[int, ...]:
        """Its shape for a matrix of that shape."""
        outputs, inputs = _entries(matrix, self.unit)
        if self.vector:
            return (inputs,)
        return (inputs, outputs) if self.transposed else (outputs, inputs)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of the tensors that together store a matrix [O, I]."""

    suffix: str
    """Of its name: that of the matrix, and this."""
    unit: tuple[int, int]
    """Outputs and inputs of the matrix for each of its entries; 0: all of them."""
    dtypes: tuple[torch.dtype, ...]
    """What the checkpoint may hold."""
    fill: Fill
    dtype: torch.dtype | None = None
    """In memory; None: the compute dtype."""
    packing: Packing | None = None
    """Of the checkpoint; None: as in memory."""
    all_inputs: bool = False
    """Whether a rank that keeps some inputs of the matrix needs its entries for all of them."""

    def shape(self, matrix: tuple[int, int]) -> tuple[int, int]:
        """Its shape in memory for a matrix of that shape."""
        return _entries(matrix, self.unit)

    def in_checkpoint(self, name: str, matrix: tuple[int, int]) -> tuple[str, tuple[int, ...]]:
        """Its name and shape in the checkpoint, for a matrix `name` of that shape."""
        if self.packing is None:
            return name + self.suffix, self.shape(matrix)
        return self.packing.name, self.packing.shape(matrix)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format."""

    name: str
    unit: tuple[int, int]
    """Outputs and inputs that share a scale: a rank keeps all or none of such a block."""
    tensors: tuple[StoredTensor, ...]
    weight: Callable[..., Weight]
    """Makes the weight of `tensors`, in their order."""
    ragged: bool = True
    """Whether the last blocks of a matrix may be smaller."""
    families: tuple[str, ...] = ()
    """Model types whose checkpoints are supported; empty: all."""
    linear: bool = True
    """Whether it stores linear layers too, and not only routed experts."""
    unused: tuple[str, ...] = ()
    """Tensors that a matrix's module may hold beside these, and that are not needed."""


def _entries(matrix: tuple[int, int], unit: tuple[int, int]) -> tuple[int, int]:
    outputs, inputs = (-(-size // each) if each else 1 for size, each in zip(matrix, unit, strict=True))
    return outputs, inputs


def _uniform(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    bound = 3**0.5 * std
    tensor.uniform_(-bound, bound, generator=generator)


PLAIN = Scheme("plain", (1, 1), (StoredTensor("", (1, 1), FLOATS, _uniform),), lambda weight: weight)
