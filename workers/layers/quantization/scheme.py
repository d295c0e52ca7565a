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
class StoredTensor:
    """One of the tensors that together store a matrix [O, I]."""

    suffix: str
    """Of its name: that of the matrix, and this."""
    unit: tuple[int, int]
    """Outputs and inputs of the matrix for each of its entries."""
    dtypes: tuple[torch.dtype, ...]
    """What the checkpoint may hold."""
    fill: Fill
    dtype: torch.dtype | None = None
    """In memory; None: the compute dtype."""

    def shape(self, matrix: tuple[int, int]) -> tuple[int, int]:
        """Its shape for a matrix of that shape."""
        return -(-matrix[0] // self.unit[0]), -(-matrix[1] // self.unit[1])


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


def _uniform(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    bound = 3**0.5 * std
    tensor.uniform_(-bound, bound, generator=generator)


PLAIN = Scheme("plain", (1, 1), (StoredTensor("", (1, 1), FLOATS, _uniform),), lambda weight: weight)
