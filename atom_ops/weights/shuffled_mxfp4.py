"""MXFP4 in tiles, as the matrix instructions of an MI350 read it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.weights.mxfp4 import MXFP4
from atom_ops.weights.shuffled import unshuffled

_ROWS = 16
"""Rows of a tile of codes or scales, whose columns differ."""


@dataclass(frozen=True, slots=True)
class ShuffledMXFP4:
    """A matrix [O, I], or a stack [X, O, I], padded with zeros; AITER's layouts of codes and scales.

    scales, plain      32 rows: 2, 16    8 columns: 2, 4
    scales, shuffled   32 rows, 8 columns, column of 4, row of 16, column of 2, row of 2
    """

    codes: Tensor
    """float4_e2m1fn_x2 [..., padded O, padded I / 2] in name only, in tiles of 16 rows and 32 bytes. AITER
    marks it by an attribute, so that it must stay this very object."""
    scales: Tensor
    """float8_e8m0fnu [..., padded O, padded I / 32] in name only."""
    shape: tuple[int, ...]
    """Without padding."""
    parts: int = 1
    """2: the rows are those of gate, then those of up, each padded."""
    interleaved: bool = False
    """Gate and up alternate, 16 rows of each."""

    @property
    def row_unit(self) -> int:
        """Rows that are dequantized at once: all."""
        return self.shape[-2]

    def expert(self, number: int) -> MXFP4:
        return self._plain(self.codes[number], self.scales[number])

    def rows(self, start: int, stop: int) -> MXFP4:
        """All rows of [O, I]."""
        assert (start, stop) == (0, self.shape[0])
        return self._plain(self.codes, self.scales)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers in the plain layout, rounded to `dtype`."""
        return self._plain(self.codes, self.scales).dequantized(dtype)

    def _plain(self, codes: Tensor, scales: Tensor) -> MXFP4:
        inputs = self.shape[-1]
        codes = self._rows(unshuffled(codes.view(torch.uint8)))
        scales = self._rows(_unshuffled_scales(scales.view(torch.uint8)))
        return MXFP4(codes[..., : inputs // 2].contiguous(), scales[..., : inputs // 32].contiguous())

    def _rows(self, padded: Tensor) -> Tensor:
        """Without the rows of padding, in the plain order."""
        outputs = self.shape[-2] // self.parts
        if self.interleaved:
            blocks = padded.unflatten(-2, (-1, self.parts, _ROWS)).transpose(-4, -3)
            return blocks.flatten(-3, -2)[..., :outputs, :].flatten(-3, -2)
        return padded.unflatten(-2, (self.parts, -1))[..., :outputs, :].flatten(-3, -2)


def _unshuffled_scales(scales: Tensor) -> Tensor:
    rows, columns = scales.shape[-2:]
    tiles = scales.reshape(-1, rows // 32, columns // 8, 4, 16, 2, 2)
    return tiles.permute(0, 1, 6, 4, 2, 5, 3).reshape(scales.shape)
