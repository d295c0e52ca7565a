"""The closed union of weight types, and what works on all of them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from atom_ops.weights.affine_ints import AffineInts
from atom_ops.weights.block_fp8 import BlockFP8
from atom_ops.weights.channel_fp8 import ChannelFP8
from atom_ops.weights.channel_int8 import ChannelINT8
from atom_ops.weights.four_bit_words import FourBitWords
from atom_ops.weights.group_int4 import GroupINT4
from atom_ops.weights.mxfp4 import MXFP4
from atom_ops.weights.shuffled import Shuffled, ShuffledFP8
from atom_ops.weights.shuffled_mxfp4 import ShuffledMXFP4

_TILE_NUMBERS = 1 << 22
"""Numbers that a reference dequantizes at once."""


@dataclass(frozen=True, slots=True)
class PackedOneDNN:
    """A plain matrix in the layout of oneDNN, which only its own provider reads."""

    tensor: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedPanels:
    """A plain matrix of bfloat16 numbers in panels of outputs, which only the kernels in C++ read."""

    tensor: Tensor
    """bfloat16 [P, I / 2, L, 2]: panel, pair of inputs, output, input; L is a register's float32 values, and
    outputs beyond O are 0."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """dtype of the activations, and of the matrix before it was packed."""


@dataclass(frozen=True, slots=True)
class PackedInts:
    """Integers in panels of outputs, which only the kernels in C++ read, with activations of any dtype."""

    words: Tensor
    """8-bit codes: int16 [P, I / 2, L]; 4-bit codes: int32 [P, I / 8, L]; 6-bit codes: int32
    [P, I * 3 / 16, L]; P and L as in `PackedPanels`."""
    terms: Tensor
    """[P, I / G, 1 or 2, L], the scale of a group, and its offset: float32; float16, 1024 times as much; or
    int8."""
    units: Tensor | None
    """float16 [P, I / B, 1 or 2, L]: what int8 terms are multiplied by."""
    bits: int
    group: int
    """G."""
    block: int
    """B: the number of inputs that share units; 0 without units."""
    shape: tuple[int, ...]
    """[O, I]; or [X, O, I] of a stack, whose tensors have X as their first dimension too."""

    def expert(self, number: int) -> "PackedInts":
        """One matrix of a stack."""
        units = None if self.units is None else self.units[number]
        return replace(
            self, words=self.words[number], terms=self.terms[number], units=units, shape=self.shape[1:]
        )


@dataclass(frozen=True, slots=True)
class PackedINT4:
    """A matrix of 4-bit integers in the layout of torch's kernel for CPUs, which only its provider reads."""

    codes: Tensor
    scales: Tensor
    """bfloat16 [I / G, O, 2]: the scale of a group, and the number that code 8 stands for."""
    group: int
    """G."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reordered:
    """A weight whose inputs are in another order: x is multiplied as x[:, order].

    `linear` gathers the inputs; kernels then read the weight as any other of its type.
    """

    weight: GroupINT4 | FourBitWords | PackedINT4 | PackedInts
    """[..., O, N]."""
    order: Tensor
    """int64 [..., N]; an input of weight zero may be there more than once."""
    inputs: int
    """I, at most N."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.weight.shape[:-1], self.inputs)

    @property
    def row_unit(self) -> int:
        """The number of rows that share scales."""
        return 1

    def expert(self, number: int) -> "Reordered":
        return Reordered(self._quantized.expert(number), self.order[number], self.inputs)

    def rows(self, start: int, stop: int) -> "Reordered":
        """Rows of [O, I]."""
        return Reordered(self._quantized.rows(start, stop), self.order, self.inputs)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers in the order of the inputs, rounded to `dtype`."""
        numbers = self._quantized.dequantized(dtype)
        places = self.order.unsqueeze(-2).expand_as(numbers)
        return numbers.new_zeros(self.shape).scatter_add_(-1, places, numbers)

    @property
    def _quantized(self) -> GroupINT4 | FourBitWords:
        if not isinstance(self.weight, GroupINT4 | FourBitWords):
            raise TypeError("a weight that was packed for one provider is read by it alone")
        return self.weight


InTiles = ShuffledFP8 | ShuffledMXFP4
"""As the matrix instructions of AMD's GPUs read them."""
Integers = AffineInts | ChannelINT8 | GroupINT4
"""Numbers that are integers but for scales and offsets."""
Quantized = BlockFP8 | ChannelFP8 | Integers | MXFP4 | Reordered | FourBitWords | InTiles
Packed = PackedOneDNN | PackedPanels | PackedInts | PackedINT4 | Shuffled
"""In a layout that one provider reads."""
Weight = Tensor | Packed | Quantized
"""A matrix that ops multiply by; a Tensor is plain, in the dtype of the activations."""


def dequantized_tiles(weight: Quantized, dtype: torch.dtype) -> Iterator[Tensor]:
    """All rows of [O, I] in order, as plain matrices of whole blocks."""
    outputs, inputs = weight.shape
    each = max(_TILE_NUMBERS // max(inputs, 1) // weight.row_unit, 1) * weight.row_unit
    for start in range(0, outputs, each):
        yield weight.rows(start, min(start + each, outputs)).dequantized(dtype)


def tensors_of(weight: Weight) -> Iterator[Tensor]:
    """The tensors that a weight holds in memory."""
    if isinstance(weight, Tensor):
        yield weight
        return
    for field in fields(weight):
        part = getattr(weight, field.name)
        if isinstance(part, Tensor | Packed | Quantized):
            yield from tensors_of(part)
