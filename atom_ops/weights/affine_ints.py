"""Integers of 4, 6 or 8 bits with a scale, perhaps an offset, for each group of inputs, as in GGUF files."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

ZERO = 8
"""The stored 4-bit code of 0, where there are no offsets."""


@dataclass(frozen=True, slots=True)
class AffineInts:
    """Integers in groups of G inputs: code[o, i] * scale[o, i // G] + offset[o, i // G].

    Activations are not rounded.
    """

    codes: Tensor
    """int8 [..., O, I]; or uint8 [..., O, I / 2]: 4-bit codes, without offsets plus 8, even inputs in the low
    nibbles."""
    scales: Tensor
    """[..., O, I / G], in any float dtype; or int8, to be multiplied by their units."""
    offsets: Tensor | None = None
    """[..., O, I / G], as the scales; None: 0."""
    scale_units: Tensor | None = None
    """[..., O, I / G], in any float dtype; None unless scales are integers."""
    offset_units: Tensor | None = None
    """[..., O, I / G], in any float dtype; None unless offsets are integers."""
    narrow: bool = False
    """Whether all codes of an int8 tensor are in -32 .. 31, so that kernels may keep six bits."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        if self.codes.dtype != torch.int8:
            return 4
        return 6 if self.narrow else 8

    @property
    def shape(self) -> tuple[int, ...]:
        columns = self.codes.shape[-1]
        return (*self.codes.shape[:-1], columns * 2 if self.bits == 4 else columns)

    @property
    def group(self) -> int:
        """G: the number of inputs that share a scale; it divides I."""
        return self.shape[-1] // self.scales.shape[-1]

    @property
    def row_unit(self) -> int:
        """The number of rows that share scales."""
        return 1

    @property
    def terms(self) -> list[Tensor]:
        """The scales and, where there are any, the offsets as numbers, float32 [..., O, I / G]."""
        pairs = ((self.scales, self.scale_units), (self.offsets, self.offset_units))
        return [
            part.float() if units is None else part.float() * units.float()
            for part, units in pairs
            if part is not None
        ]

    def expert(self, number: int) -> "AffineInts":
        return self._mapped(lambda part: part[number])

    def rows(self, start: int, stop: int) -> "AffineInts":
        """Rows of [O, I]."""
        return self._mapped(lambda part: part[start:stop])

    def flattened(self) -> "AffineInts":
        """The matrices of a stack as one, [X * O, I]."""
        return self._mapped(lambda part: part.flatten(0, 1))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, computed in float32 and rounded to `dtype`."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8)
            codes = codes if self.offsets is not None else codes - ZERO
        scales, *offsets = self.terms
        numbers = codes.unflatten(-1, (-1, self.group)).float().mul_(scales.unsqueeze(-1))
        for part in offsets:
            numbers.add_(part.unsqueeze(-1))
        return numbers.flatten(-2).to(dtype)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "AffineInts":
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {
            name: change(part) for name, part in parts.items() if isinstance(part, Tensor)
        }
        return replace(self, **changed)
