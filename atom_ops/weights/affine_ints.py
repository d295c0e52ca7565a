"""Integers of 4 or 8 bits with a scale, and perhaps an offset, for each group of inputs, as in GGUF files."""

from dataclasses import dataclass

import torch
from torch import Tensor

ZERO = 8
"""The stored 4-bit code of 0."""


@dataclass(frozen=True, slots=True)
class AffineInts:
    """Integers in groups of G inputs: code[o, i] * scales[o, i // G] + offsets[o, i // G].

    Activations are not rounded.
    """

    codes: Tensor
    """int8 [..., O, I]; or uint8 [..., O, I / 2]: 4-bit codes plus 8, even inputs in the low nibbles."""
    scales: Tensor
    """[..., O, I / G], in any float dtype."""
    offsets: Tensor | None = None
    """[..., O, I / G], in any float dtype; None: 0."""

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits)

    @property
    def group(self) -> int:
        """G: the number of inputs that share a scale; it divides I."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def row_unit(self) -> int:
        """The number of rows that share scales."""
        return 1

    def expert(self, number: int) -> "AffineInts":
        offsets = None if self.offsets is None else self.offsets[number]
        return AffineInts(self.codes[number], self.scales[number], offsets)

    def rows(self, start: int, stop: int) -> "AffineInts":
        """Rows of [O, I]."""
        offsets = None if self.offsets is None else self.offsets[start:stop]
        return AffineInts(self.codes[start:stop], self.scales[start:stop], offsets)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, computed in float32 and rounded to `dtype`."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - ZERO
        numbers = codes.unflatten(-1, (-1, self.group)).float().mul_(self.scales.float().unsqueeze(-1))
        if self.offsets is not None:
            numbers.add_(self.offsets.float().unsqueeze(-1))
        return numbers.flatten(-2).to(dtype)
