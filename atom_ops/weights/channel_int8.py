"""INT8 with a scale for each output, as W8A8 checkpoints store it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChannelINT8:
    """8-bit integers with one scale for each output: values[o, i] * scales[o].

    Kernels may round the activations to int8 as well, each token with a scale of its own; the
    reference does not round them.
    """

    values: Tensor
    """int8 [..., O, I]."""
    scales: Tensor
    """float32 [..., O]."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def row_unit(self) -> int:
        """The number of rows that share scales."""
        return 1

    def expert(self, number: int) -> "ChannelINT8":
        return ChannelINT8(self.values[number], self.scales[number])

    def rows(self, start: int, stop: int) -> "ChannelINT8":
        """Rows of [O, I]."""
        return ChannelINT8(self.values[start:stop], self.scales[start:stop])

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, computed in float32 and rounded to `dtype`."""
        return self.values.float().mul_(self.scales.unsqueeze(-1)).to(dtype)
