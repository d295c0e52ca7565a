"""FP8 with a scale for each output: per channel, or per tensor with its scale repeated."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChannelFP8:
    """8-bit floats with one scale for each output: values[o, i] * scales[o].

    The one scale of a tensor is repeated for its rows when it is loaded, so that matrices with
    different scales are stacked into one as they are.

    Kernels may round the activations to e4m3 as well: by `input_scale`, or else each token with a
    scale of its own, at most `input_bound` / 448. The reference does not round them.
    """

    values: Tensor
    """float8_e4m3fn [..., O, I]."""
    scales: Tensor
    """float32 [..., O]."""
    input_scale: Tensor | None = None
    """float32 [...]: a token's e4m3 values are clamp(x / input_scale, -448, 448); None: scaled per token."""
    input_bound: float | None = None
    """Largest magnitude that scales per token represent (FBGEMM's activation_scale_ub); None: no bound."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def row_unit(self) -> int:
        """The number of rows that share scales."""
        return 1

    def expert(self, number: int) -> "ChannelFP8":
        input_scale = None if self.input_scale is None else self.input_scale[number]
        return ChannelFP8(self.values[number], self.scales[number], input_scale, self.input_bound)

    def rows(self, start: int, stop: int) -> "ChannelFP8":
        """Rows of [O, I]."""
        values, scales = self.values[start:stop], self.scales[start:stop]
        return ChannelFP8(values, scales, self.input_scale, self.input_bound)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, computed in float32 and rounded to `dtype`."""
        return self.values.float().mul_(self.scales.unsqueeze(-1)).to(dtype)
