"""The tiles of queries in a step, listed on the device, so that a captured graph lists those of its replay.

    tiles_N4 [number] = row, first token in the step, queries, position of the first query in its context

Rows of the longest contexts come first, and of a row its last tile: the tiles that take longest begin
first, and tiles that read the same keys and values run at the same time.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.attention.attention_plan import AttentionPlan

_ROWS = 128
_TILES = 64


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Tiles 0 … count - 1 of `tiles_N4`, int32; what follows is not initialised."""

    tiles_N4: Tensor
    count: Tensor
    """int32, [1]."""
    length: int
    """Most queries of a tile."""


@dataclass(frozen=True, slots=True)
class ListTiles:
    """Lists the tiles of a plan, as `AttentionPlan.derived` calls it: once for all layers."""

    length: int
    """Most queries of a tile."""
    min_tokens: int
    """Rows of fewer tokens have no tiles."""

    def __call__(self, plan: AttentionPlan) -> QueryTiles:
        rows = len(plan.context_lens_R)
        device = plan.context_lens_R.device
        tiles_N4 = torch.empty(plan.num_tokens // self.length + rows, 4, dtype=torch.int32, device=device)
        count = torch.empty(1, dtype=torch.int32, device=device)
        _list_tiles[(rows,)](
            plan.query_starts_R1,
            plan.context_lens_R,
            tiles_N4,
            count,
            rows,
            self.min_tokens,
            LENGTH=self.length,
            ROWS=_ROWS,
            TILES=_TILES,
        )
        return QueryTiles(tiles_N4, count, self.length)


@triton.jit
def _tiles_of(length, min_tokens, LENGTH: tl.constexpr):
    return tl.where((length > 0) & (length >= min_tokens), tl.cdiv(length, LENGTH), 0)


@triton.jit(
    do_not_specialize=["rows", "min_tokens"],
    do_not_specialize_on_alignment=["starts", "contexts", "count"],
)
def _list_tiles(
    starts, contexts, tiles, count, rows, min_tokens,
    LENGTH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Grid (rows,)."""
    row = tl.program_id(0)
    first_token = tl.load(starts + row)
    length = tl.load(starts + row + 1) - first_token
    context = tl.load(contexts + row)
    before_R = tl.zeros((ROWS,), tl.int32)
    all_R = tl.zeros((ROWS,), tl.int32)
    for first in range(0, rows, ROWS):
        row_R = first + tl.arange(0, ROWS)
        exists_R = row_R < rows
        start_R = tl.load(starts + row_R, mask=exists_R, other=0)
        end_R = tl.load(starts + row_R + 1, mask=exists_R, other=0)
        context_R = tl.load(contexts + row_R, mask=exists_R, other=0)
        tiles_R = _tiles_of(end_R - start_R, min_tokens, LENGTH)
        earlier_R = (context_R > context) | ((context_R == context) & (row_R < row))
        before_R += tl.where(earlier_R, tiles_R, 0)
        all_R += tiles_R
    if row == 0:
        tl.store(count, tl.sum(all_R, 0))

    own = _tiles_of(length, min_tokens, LENGTH)
    place = tiles + tl.sum(before_R, 0) * 4
    for first in range(0, own, TILES):
        place_N = first + tl.arange(0, TILES)
        exists_N = place_N < own
        offset_N = (own - 1 - place_N) * LENGTH
        to_N = place + place_N * 4
        tl.store(to_N, row + tl.zeros_like(place_N), mask=exists_N)
        tl.store(to_N + 1, first_token + offset_N, mask=exists_N)
        tl.store(to_N + 2, tl.minimum(length - offset_N, LENGTH), mask=exists_N)
        tl.store(to_N + 3, context - length + offset_N, mask=exists_N)
