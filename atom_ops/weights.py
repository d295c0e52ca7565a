"""The types of weight that `linear`, the ops fused with it, and `experts` take.

Shapes are those of the matrix that a weight stands for: [O, I], outputs and inputs, or [X, O, I] for
a stack of X experts. Quantized weights stay packed in memory; a provider reads them as they are, and
the torch references multiply by their values, a tile of rows at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

_TILE_NUMBERS = 1 << 22
"""Numbers that a reference dequantizes at once."""
_MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True)
class PackedOneDNN:
    """A plain matrix in the layout of oneDNN, which only its own provider reads."""

    tensor: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockFP8:
    """8-bit floats with one scale for each block: values[o, i] * scales[o // N, i // K].

    Kernels may round the activations to e4m3 as well, each group of K inputs of a token with a scale
    of its own; the reference does not round them.
    """

    values: Tensor
    """float8_e4m3fn [..., O, I]."""
    scales: Tensor
    """float32 [..., ceil(O / N), ceil(I / K)]."""
    block: tuple[int, int]
    """(N, K): outputs and inputs of a block; the last blocks may be smaller."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def row_unit(self) -> int:
        """The number of rows that share scales."""
        return self.block[0]

    def unstacked(self, experts: int) -> "BlockFP8":
        """[X * O, I] as [X, O, I]."""
        return BlockFP8(
            self.values.unflatten(0, (experts, -1)), self.scales.unflatten(0, (experts, -1)), self.block
        )

    def expert(self, number: int) -> "BlockFP8":
        return BlockFP8(self.values[number], self.scales[number], self.block)

    def rows(self, start: int, stop: int) -> "BlockFP8":
        """Rows of [O, I]; `start` is a multiple of `row_unit`."""
        first, last = start // self.block[0], -(-stop // self.block[0])
        return BlockFP8(self.values[start:stop], self.scales[first:last], self.block)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, computed in float32 and rounded to `dtype`."""
        (outputs, inputs), (rows, columns) = self.shape[-2:], self.block
        by_row = self.scales.repeat_interleave(rows, -2).narrow(-2, 0, outputs)
        numbers, whole = self.values.float(), inputs // columns
        if whole:
            part = numbers.narrow(-1, 0, whole * columns).unflatten(-1, (whole, columns))
            part.mul_(by_row.narrow(-1, 0, whole).unsqueeze(-1))
        if rest := inputs - whole * columns:
            numbers.narrow(-1, whole * columns, rest).mul_(by_row.narrow(-1, whole, 1))
        return numbers.to(dtype)


@dataclass(frozen=True, slots=True)
class MXFP4:
    """4-bit floats (e2m1) in groups of 32 inputs that share a scale (OCP microscaling).

    Kernels may round the activations too; the reference does not.
    """

    blocks: Tensor
    """uint8 [..., O, I / 2]; low nibble: even input, high nibble: odd; 1 sign, 2 exponent, 1 mantissa bit."""
    scales: Tensor
    """uint8 [..., O, I / 32]: exponent of 2, plus 127; 255 is NaN."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.blocks.shape[:-1], 2 * self.blocks.shape[-1])

    @property
    def row_unit(self) -> int:
        """The number of rows that share scales."""
        return 1

    def unstacked(self, experts: int) -> "MXFP4":
        """[X * O, I] as [X, O, I]."""
        return MXFP4(self.blocks.unflatten(0, (experts, -1)), self.scales.unflatten(0, (experts, -1)))

    def expert(self, number: int) -> "MXFP4":
        return MXFP4(self.blocks[number], self.scales[number])

    def rows(self, start: int, stop: int) -> "MXFP4":
        """Rows of [O, I]."""
        return MXFP4(self.blocks[start:stop], self.scales[start:stop])

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, rounded to `dtype`; exact in bfloat16 and float32."""
        pairs = _pairs_of_e2m1(self.blocks.device).index_select(0, self.blocks.flatten().int())
        numbers = pairs.view(*self.scales.shape, _MXFP4_GROUP)
        powers = self.scales.view(torch.float8_e8m0fnu).float()
        return numbers.mul_(powers.unsqueeze(-1)).flatten(-2).to(dtype)


Quantized = BlockFP8 | MXFP4
Weight = Tensor | PackedOneDNN | Quantized
"""A matrix that ops multiply by; a Tensor is plain, in the dtype of the activations."""


def unstacked(weight: Weight, experts: int) -> Weight:
    """The matrices [X * O, I] of all experts as [X, O, I]."""
    if isinstance(weight, Tensor):
        return weight.unflatten(0, (experts, -1))
    if isinstance(weight, PackedOneDNN):
        raise TypeError("oneDNN packs single matrices")
    return weight.unstacked(experts)


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
        if isinstance(part := getattr(weight, field.name), Tensor):
            yield part


def _pairs_of_e2m1(device: torch.device) -> Tensor:
    """The two numbers in each byte, [256, 2]; computed, because a copy from the host would break graphs."""
    byte = torch.arange(256, device=device)
    code = torch.stack((byte & 15, byte >> 4), 1)
    sign, exponent, mantissa = 1 - 2 * (code >> 3), (code >> 1) & 3, (code & 1) * 0.5
    magnitude = torch.where(exponent > 0, torch.ldexp(1 + mantissa, exponent - 1), mantissa)
    return magnitude * sign
