"""MXFP4: 4-bit floats with a power of two for each group of 32 inputs (OCP microscaling)."""

from dataclasses import dataclass

import torch
from torch import Tensor

_GROUP = 32


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

    def expert(self, number: int) -> "MXFP4":
        return MXFP4(self.blocks[number], self.scales[number])

    def rows(self, start: int, stop: int) -> "MXFP4":
        """Rows of [O, I]."""
        return MXFP4(self.blocks[start:stop], self.scales[start:stop])

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, rounded to `dtype`; exact in bfloat16 and float32."""
        pairs = _pairs_of_e2m1(self.blocks.device).index_select(0, self.blocks.flatten().int())
        numbers = pairs.view(*self.scales.shape, _GROUP)
        powers = self.scales.view(torch.float8_e8m0fnu).float()
        return numbers.mul_(powers.unsqueeze(-1)).flatten(-2).to(dtype)


def _pairs_of_e2m1(device: torch.device) -> Tensor:
    """The two numbers in each byte, [256, 2]; computed, because a copy from the host would break graphs."""
    byte = torch.arange(256, device=device)
    code = torch.stack((byte & 15, byte >> 4), 1)
    sign = 1 - 2 * (code >> 3)
    exponent = (code >> 1) & 3
    mantissa = (code & 1) * 0.5
    magnitude = torch.where(exponent > 0, torch.ldexp(1 + mantissa, exponent - 1), mantissa)
    return magnitude * sign
