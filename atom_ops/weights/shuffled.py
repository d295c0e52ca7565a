"""Matrices in tiles, as AMD's matrix instructions read them."""

from dataclasses import dataclass

from torch import Tensor

_ROWS, _COLUMNS = 16, 32
"""Of a tile."""
_LANE_BYTES = 16
"""Of a row, read by one lane."""


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
        outputs, inputs = self.shape[1:]
        lane = _LANE_BYTES // self.tensor.element_size()
        shape = (outputs // _ROWS, inputs // _COLUMNS, _COLUMNS // lane, _ROWS, lane)
        return self.tensor[number].view(shape).permute(0, 3, 1, 2, 4).reshape(outputs, inputs)


def can_shuffle(weight_XOI: Tensor) -> bool:
    """Whether these matrices, and those of the other of an expert's two GEMMs, consist of whole tiles.

    The first has twice as many rows as the second has columns; of the hidden size the caller knows that it is
    a multiple of 64.
    """
    outputs, inputs = weight_XOI.shape[1:]
    return outputs % (2 * _COLUMNS) == 0 and inputs % _COLUMNS == 0
