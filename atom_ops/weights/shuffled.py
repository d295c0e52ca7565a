"""Matrices in tiles, as AMD's matrix instructions read them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atom_ops.weights.block_fp8 import BlockFP8
from atom_ops.weights.channel_fp8 import ChannelFP8

TILE = _ROWS, _COLUMNS = 16, 32
_LANE_BYTES = 16
"""Bytes of a row that one lane reads."""


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A stack of matrices [X, O, I], each in tiles of 16 rows and 32 columns (AITER's layout (16, 16)).

    plain      row tile, row, column tile, lane, numbers of a lane
    shuffled   row tile, column tile, lane, row, numbers of a lane
    """

    tensor: Tensor
    """[X, O, I] in name only. AITER marks it by an attribute, so that it must stay this very object."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def expert(self, number: int) -> Tensor:
        """One matrix [O, I] in the plain layout, a copy."""
        return unshuffled(self.tensor[number])


@dataclass(frozen=True, slots=True)
class ShuffledFP8:
    """FP8, a matrix [O, I] or a stack [X, O, I], whose values are in tiles and whose scales are not."""

    weight: BlockFP8 | ChannelFP8
    """With `values` in tiles, e4m3fnuz for an MI300."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def row_unit(self) -> int:
        """Rows of whole tiles and blocks."""
        return max(self.weight.row_unit, _ROWS)

    def expert(self, number: int) -> BlockFP8 | ChannelFP8:
        return _plain(self.weight.expert(number))

    def rows(self, start: int, stop: int) -> BlockFP8 | ChannelFP8:
        """Rows of [O, I]; `start` is a multiple of `row_unit`."""
        return _plain(self.weight.rows(start, stop))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers in the plain layout, rounded to `dtype`."""
        return _plain(self.weight).dequantized(dtype)


def _plain(weight: BlockFP8 | ChannelFP8) -> BlockFP8 | ChannelFP8:
    return replace(weight, values=unshuffled(weight.values))


def unshuffled(tensor: Tensor) -> Tensor:
    """A copy in the plain layout of matrices [..., O, I] in tiles."""
    lane = _LANE_BYTES // tensor.element_size()
    outputs, inputs = tensor.shape[-2:]
    shape = (-1, outputs // _ROWS, inputs // _COLUMNS, _COLUMNS // lane, _ROWS, lane)
    return tensor.view(shape).permute(0, 1, 4, 2, 3, 5).reshape(tensor.shape)


def can_shuffle(hidden: int, features: int) -> bool:
    """Whether both matrices of experts of this size consist of whole tiles."""
    return hidden % (2 * _COLUMNS) == 0 and features % _COLUMNS == 0
