"""Which row of a step a tile of queries belongs to.

Tiles are numbered over all rows, so that the grid's size follows from the number of tokens alone. Tiles of 4,
rows of 5, 2 and 4 tokens:

    starts     0           5       7       11
    numbers    0    1      2       3    4          4 has no queries: its program ends at once

After the R rows of a step there may be padding rows without tokens, up to the rows of a captured graph.
"""

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


@triton.jit
def is_padding(number, starts, rows, TILE: tl.constexpr):
    """Whether tile `number`, as `row_of_tile` counts, belongs to a padding row or none; starts[0] is 0.

    The search for its row takes a load for each bit of `rows`, one after another, and this takes two. A
    tile of row r that has queries has a number of at most starts[rows] // TILE + r.
    """
    tokens = tl.load(starts + rows)
    row = tl.minimum(tl.maximum(number - tokens // TILE, 0), rows)
    return tl.load(starts + row) == tokens
