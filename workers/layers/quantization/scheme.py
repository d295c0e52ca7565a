"""What a format stores for one matrix of the checkpoint, and the weight that this becomes.

A scheme does not read files. For a matrix [O, I] it declares some `StoredTensor`s: each has its name in
the checkpoint, one entry for so many outputs and inputs, and, where the file's layout is another one, a
function that decodes the whole tensor (scales: one number for all rows), or a `Packing`, by which each rank
reads and unpacks its part (codes: words of 32 bits, transposed). The loader reads and shards them, stacks
fused matrices along rows, and `Scheme.weight` makes a `Weight` of the buffers.

A file for each format exports functions that return a `Scheme`, the same object for the same parameters
(`functools.cache`): matrices are fused if their schemes are the same object. Which scheme a matrix has is
told by its quantization method, another file: see `rules`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops import Weight

Fill = Callable[[Tensor, float, torch.Generator], None]
"""Fills a tensor so that the matrix's random numbers have a standard deviation of the second argument."""
Matrix = tuple[int, int]
"""Shape [O, I] of a whole matrix: outputs, inputs."""

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = 0
"""As a unit: one entry for the whole dimension. Every rank keeps it, and each fused matrix has its own."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the checkpoint stores a tensor whose layout in memory is another one."""

    name: str
    """The last part of its name, instead of that of the matrix with the suffix."""
    unit: tuple[int, int]
    """Outputs and inputs of the matrix for each of its entries; or `WHOLE`."""
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
    """End of the buffer's name, after the name of the matrix."""
    unit: tuple[int, int]
    """Outputs and inputs of the matrix for each of its entries in memory; or `WHOLE`."""
    dtypes: tuple[torch.dtype, ...]
    """Dtypes that the checkpoint may hold."""
    fill: Fill
    dtype: torch.dtype | None = None
    """Dtype in memory; None: the compute dtype."""
    packing: Packing | None = None
    """Layout in the checkpoint, if a rank reads a part of a tensor in another layout; None: as in memory."""
    all_inputs: bool = False
    """Whether a rank that keeps some inputs of the matrix needs its entries for all of them."""
    names: tuple[str, ...] = ()
    """Possible names within the matrix's module; the file has one of them. Empty: weight and `suffix`."""
    disk_shapes: Callable[[Matrix], tuple[tuple[int, ...], ...]] | None = None
    """The shapes it may have in the checkpoint; None: as in memory."""
    decode: Callable[[Tensor, Matrix], Tensor] | None = None
    """Maps the checkpoint's whole tensor to `shape(matrix)`; None: it has that shape and is only cast."""
    stacked: str | None = None
    """End of its name, after that of the matrix, where experts are stacked with inputs before outputs; None:
    such experts are not read."""

    def shape(self, matrix: Matrix) -> tuple[int, int]:
        """Shape in memory, for a matrix of that shape."""
        return _entries(matrix, self.unit)

    @property
    def on_disk(self) -> tuple[str, ...]:
        """Its possible names within the matrix's module."""
        if self.packing is not None:
            return (self.packing.name,)
        return self.names or (f"weight{self.suffix}",)

    def shapes_on_disk(self, matrix: Matrix) -> tuple[tuple[int, ...], ...]:
        """The shapes it may have in the checkpoint."""
        if self.packing is not None:
            return (self.packing.shape(matrix),)
        return (self.shape(matrix),) if self.disk_shapes is None else self.disk_shapes(matrix)


@dataclass(frozen=True, slots=True, eq=False)
class Scheme:
    """How a quantization format, or the plain one, stores a matrix."""

    name: str
    unit: tuple[int, int]
    """Outputs and inputs that share a scale: a rank keeps all or none of such a block."""
    tensors: tuple[StoredTensor, ...]
    weight: Callable[..., Weight]
    """Makes the weight of the buffers of `tensors`, in their order.

    Each has [rows, columns], or [X, rows, columns] for a stack of X experts.
    """
    ragged: bool = True
    """Whether the last blocks of a matrix may be smaller."""
    families: tuple[str, ...] = ()
    """Model types whose checkpoints are supported; empty: all."""
    linear: bool = True
    """Whether it stores linear layers too, and not only routed experts."""
    mixes: bool = False
    """Whether experts may have it in one of their two matrices, and in the other another one that mixes."""
    unused: tuple[str, ...] = ()
    """Tensors that a matrix's module may hold besides these, and that are not needed."""
    quantize: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    """Online quantization: maps rows of a plain matrix, in the compute dtype, to `tensors` of these rows.

    None: the checkpoint has these tensors.
    """

    @property
    def in_checkpoint(self) -> tuple[StoredTensor, ...]:
        """The tensors that the checkpoint has."""
        return self.tensors if self.quantize is None else PLAIN.tensors


def _entries(matrix: tuple[int, int], unit: tuple[int, int]) -> tuple[int, int]:
    outputs, inputs = (1 if per == WHOLE else -(-size // per) for size, per in zip(matrix, unit, strict=True))
    return outputs, inputs


def _uniform(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    bound = 3**0.5 * std
    tensor.uniform_(-bound, bound, generator=generator)


PLAIN = Scheme(
    "plain",
    (1, 1),
    (StoredTensor("", (1, 1), FLOATS, _uniform, stacked=""),),
    lambda weight: weight,
    mixes=True,
)
