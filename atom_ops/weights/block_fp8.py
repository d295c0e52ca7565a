"""FP8 with a scale for each block, the format of DeepSeek V3."""

from dataclasses import dataclass

import torch
from torch import Tensor


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

    def expert(self, number: int) -> "BlockFP8":
        return BlockFP8(self.values[number], self.scales[number], self.block)

    def rows(self, start: int, stop: int) -> "BlockFP8":
        """Rows of [O, I]; `start` is a multiple of `row_unit`."""
        first = start // self.block[0]
        last = -(-stop // self.block[0])
        return BlockFP8(self.values[start:stop], self.scales[first:last], self.block)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers, computed in float32 and rounded to `dtype`."""
        outputs, inputs = self.shape[-2:]
        rows, columns = self.block
        by_row = self.scales.repeat_interleave(rows, -2).narrow(-2, 0, outputs)
        numbers = self.values.float()
        whole = inputs // columns
        if whole:
            part = numbers.narrow(-1, 0, whole * columns).unflatten(-1, (whole, columns))
            part.mul_(by_row.narrow(-1, 0, whole).unsqueeze(-1))
        if rest := inputs - whole * columns:
            numbers.narrow(-1, whole * columns, rest).mul_(by_row.narrow(-1, whole, 1))
        return numbers.to(dtype)
