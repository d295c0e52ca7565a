"""Which row of a step a tile of queries belongs to."""

import triton
import triton.language as tl


@triton.jit
def row_of_tile(number, starts, begin, rows, TILE: tl.constexpr):
    """The row of tile `number`; `begin` is starts[0].

    Row r's first tile has number (starts[r] - begin) // TILE + r. So every row has at least as many
    numbers as tiles, and the grid's size follows from the total of tokens alone.
    """
    row = tl.full((), 0, tl.int32)
    end = rows
    while end - row > 1:
        middle = (row + end) // 2
        reached = (tl.load(starts + middle) - begin) // TILE + middle <= number
        row = tl.where(reached, middle, row)
        end = tl.where(reached, end, middle)
    return row
