"""INT4 weights with a scale, and perhaps a zero point, for each group of inputs (W4A16)."""

from dataclasses import dataclass

import torch
from torch import Tensor

_SYMMETRIC_ZERO = 8


@dataclass(frozen=True, slots=True)
class GroupINT4:
    """Unsigned 4-bit integers in groups of G inputs: (code[o, i] - zeros[o, i // G]) * scales[o, i // G].

    Activations are not rounded.
    """

    codes: Tensor
    """uint8 [..., O, I / 2], 0 to 15; low nibble: even input, high nibble: odd."""
    scales: Tensor
    """[..., O, I / G], in any float dtype."""
    zeros: Tensor | None = None
    """uint8 [..., O, I / G], 0 to 15; None: 8."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def group(self) -> int:
        """G: the number of inputs that share a scale; it divides I."""
        return 2 * self.codes.shape[-1] // self.scales.shape[-1]

    @property
    def row_unit(self) -> int:
        """The number of rows that share scales."""
        return 1

    def expert(self, number: int) -> "GroupINT4":
        zeros = None if self.zeros is None else self.zeros[number]
        return GroupINT4(self.codes[number], self.scales[number], zeros)

    def rows(self, start: int, stop: int) -> "GroupINT4":
        """Rows of [O, I]."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return GroupINT4(self.codes[start:stop], self.scales[start:stop], zeros)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, computed in float32 and rounded to `dtype`."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1)
        numbers = codes.view(*self.scales.shape, self.group).float()
        numbers.sub_(_SYMMETRIC_ZERO if self.zeros is None else self.zeros.unsqueeze(-1))
        return numbers.mul_(self.scales.float().unsqueeze(-1)).flatten(-2).to(dtype)
