"""How one step's attention is cut into pieces of equal size.

Rows of a batch bring any number of new tokens and any context. A row's new tokens are cut into
tiles of L queries and its context into chunks of C tokens; one (tile, chunk) pair is an item:

              chunk 0   chunk 1   chunk 2
    tile 0    item 0
    tile 1    item 1    item 2                  a chunk that lies behind all of a
    tile 2    item 3    item 4    item 5        tile's queries makes no item

All items have one shape, so a group of them is one batched attention, whatever the rows were;
items of one tile are merged by their log-sum-exp. Decodes (L = 1) and longer pieces are apart.
This is host work on numpy arrays, once a step. It knows block tables, but no cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

_TILES = (16, 32, 64, 128)
_CHUNKS = (32, 64, 128, 256, 512)
_LARGEST_PREFILL_CHUNK = 256
# Work that comes with each item whatever its size, in tokens of padding it is worth.
_TILE_COST = 16
_CHUNK_COST = 32
# Numbers a group may touch, in heads x tokens: bounds the memory of the gathered keys and values
# to 256 MiB at 128 float32 numbers a head. A tile with a longer context is still one group.
_GROUP_LIMIT = 1 << 18


@dataclass(frozen=True, slots=True)
class WorkItems:
    """N items of M tiles, computed by one attention call."""

    queries_ML: Tensor
    """int64: token of the step that each query of a tile is; padding repeats a tile's first."""
    tile_N: Tensor
    """int64: the tile of each item."""
    slots_NC: Tensor
    """int64: cache slots of an item's chunk. Padding repeats the row's first token, so that no
    item ever reads what another request left in a block."""
    mask_N1LC: Tensor
    """Added to the scores: 0, or a finite number that hides the token from the query."""
    filled: Tensor | None
    """int64: which of the M x L queries are no padding; None when all are."""
    one_chunk: bool
    """Item i is the whole of tile i: there is nothing to merge."""
    in_order: bool
    """The queries are the tokens of the step, all of them, in order."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one step attends to; the same for every layer. Made by `plan_attention`."""

    groups: tuple[WorkItems, ...]
    """Each token of the step is a query of exactly one group."""


@dataclass(frozen=True, slots=True)
class _Tiles:
    """M tiles of one length, as columns."""

    length: int
    row: Ints
    first_token: Ints
    """Of the step."""
    first_position: Ints
    """In its row's context."""
    queries: Ints
    """Real ones, 1 … length."""

    @property
    def context(self) -> Ints:
        """Tokens that the last query of each tile sees."""
        return self.first_position + self.queries

    def part(self, where: slice) -> "_Tiles":
        return _Tiles(
            self.length,
            self.row[where],
            self.first_token[where],
            self.first_position[where],
            self.queries[where],
        )


def plan_attention(
    query_lens: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    block_table: NDArray[np.int32],
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Plan one step from host arrays.

    Row i brings `query_lens[i]` new tokens (at least 1), the last of its `context_lens[i]`
    tokens; all of these have their keys and values in the blocks `block_table[i]`
    ([rows, max_blocks]; entries past the context are never read). Queries of row i follow
    those of row i - 1. `num_heads` and `num_kv_heads` are this rank's; `dtype` is the queries'.
    """
    query_lens, context_lens = query_lens.astype(np.int64), context_lens.astype(np.int64)
    ends = query_lens.cumsum()
    groups = []
    for rows in (np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)):
        if not len(rows):
            continue
        tiles = _cut(rows, query_lens[rows], (ends - query_lens)[rows], context_lens[rows])
        chunk = _chunk_length(tiles)
        for part in _bounded(tiles, chunk, num_heads, num_kv_heads):
            items = _items(part, chunk, block_table, block_size, int(ends[-1]))
            groups.append(_to_device(*items, dtype=dtype, device=device))
    return AttentionPlan(tuple(groups))


def _cut(rows: Ints, query_lens: Ints, first_tokens: Ints, context_lens: Ints) -> _Tiles:
    length = _tile_length(query_lens)
    counts = -(-query_lens // length)
    offset = _counting(counts) * length
    owner = np.repeat(np.arange(len(rows)), counts)
    return _Tiles(
        length,
        rows[owner],
        first_tokens[owner] + offset,
        (context_lens - query_lens)[owner] + offset,
        np.minimum(query_lens[owner] - offset, length),
    )


def _tile_length(query_lens: Ints) -> int:
    if query_lens.max() == 1:
        return 1
    return min(_TILES, key=lambda size: int((-(-query_lens // size)).sum()) * (size + _TILE_COST))


def _chunk_length(tiles: _Tiles) -> int:
    context = tiles.context
    sizes = [size for size in _CHUNKS if tiles.length == 1 or size <= _LARGEST_PREFILL_CHUNK]
    return min(sizes, key=lambda size: int((-(-context // size)).sum()) * (size + _CHUNK_COST))


def _bounded(tiles: _Tiles, chunk: int, num_heads: int, num_kv_heads: int) -> Iterator[_Tiles]:
    """Runs of tiles whose items together stay within the limit."""
    item_cost = num_kv_heads * chunk + num_heads * tiles.length
    cost = -(-tiles.context // chunk) * item_cost
    total = cost.cumsum()
    start = 0
    while start < len(cost):
        before = total[start] - cost[start]
        stop = max(int(np.searchsorted(total, before + _GROUP_LIMIT, side="right")), start + 1)
        yield tiles.part(slice(start, stop))
        start = stop


def _items(
    tiles: _Tiles, chunk: int, block_table: NDArray[np.int32], block_size: int, num_tokens: int
) -> tuple[Ints, Ints, Ints, NDArray[np.bool_], Ints | None, bool]:
    """Columns of `WorkItems`; the mask as what is hidden, and `in_order` last."""
    context = tiles.context
    chunks = -(-context // chunk)
    tile_N = np.repeat(np.arange(len(context)), chunks)
    position_NC = (_counting(chunks) * chunk)[:, None] + np.arange(chunk)

    within_L = np.arange(tiles.length)
    filled_ML = within_L < tiles.queries[:, None]
    queries_ML = tiles.first_token[:, None] + np.where(filled_ML, within_L, 0)
    seen_NL = (tiles.first_position[:, None] + within_L)[tile_N]
    hidden_NLC = position_NC[:, None, :] > seen_NL[:, :, None]

    own_NC = np.where(position_NC < context[tile_N][:, None], position_NC, 0)
    block_NC = block_table[tiles.row[tile_N][:, None], own_NC // block_size].astype(np.int64)
    slots_NC = block_NC * block_size + own_NC % block_size

    filled = None if filled_ML.all() else np.flatnonzero(filled_ML)
    in_order = int(tiles.queries.sum()) == num_tokens
    return queries_ML, tile_N, slots_NC, hidden_NLC, filled, in_order


def _to_device(
    queries_ML: Ints,
    tile_N: Ints,
    slots_NC: Ints,
    hidden_NLC: NDArray[np.bool_],
    filled: Ints | None,
    in_order: bool,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> WorkItems:
    def tensor(array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(device)

    # Finite: a query that an item hides entirely must get weight 0 in the merge, not NaN.
    hide = torch.finfo(dtype).min / 2
    mask = torch.zeros(hidden_NLC.shape, dtype=dtype, device=device)
    return WorkItems(
        queries_ML=tensor(queries_ML),
        tile_N=tensor(tile_N),
        slots_NC=tensor(slots_NC),
        mask_N1LC=mask.masked_fill_(tensor(hidden_NLC), hide).unsqueeze(1),
        filled=None if filled is None else tensor(filled),
        one_chunk=len(tile_N) == len(queries_ML),
        in_order=in_order,
    )


def _counting(counts: Ints) -> Ints:
    """0 … counts[0]-1, 0 … counts[1]-1, and so on."""
    ends = counts.cumsum()
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)
