"""Attention metadata of one step: block tables, context lengths and query ranges of its rows.

`AttentionPlan` holds them on the device; that is all a paged kernel needs. torch's batched
attention needs equal shapes, so for it a row's new tokens are cut into tiles of L queries and its
context into chunks of C tokens. One (tile, chunk) pair is a work item:

              chunk 0   chunk 1   chunk 2
    tile 0    item 0
    tile 1    item 1    item 2                  a chunk after all of a tile's
    tile 2    item 3    item 4    item 5        queries makes no item

With a sliding window a tile's chunks begin at the first token that one of its queries sees.

All items of a group have one shape and run as one batched attention; items of one tile are merged
by their log-sum-exp. Decodes (L = 1) and prefill chunks are in different groups. Items are made on
the host with numpy, once for each step that uses them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from atom_ops.ops.sampling.token_shard import ALL_TOKENS, TokenShard
from atom_ops.transfer import to_device

BATCH_INVARIANT_SPLIT = 512
"""`split_tokens` of every plan with `--batch-invariant`."""

Ints = NDArray[np.int64]
M = TypeVar("M")

_TILES = np.array([16, 32, 64, 128])
_CHUNKS = np.arange(32, 1025, 32)
_PREFILL_CHUNKS = np.array([32, 64, 128, 256])
# The fixed cost of an item, in tokens of padding.
_TILE_COST = 16
_CHUNK_COST = 32
_OWN_TOKENS = 0
"""In place of a block size: keys are in the order of the step's tokens, without a block table."""
# The fixed cost of a merge, where a context has several chunks.
_MERGE_COST = 512
# Heads x tokens of a group: bounds the memory of gathered keys and values, 1 KiB each for 128
# float32 features. Splitting prefills early costs nothing; decodes gather little more than one
# layer of the cache holds, unless many share a prefix. A tile is never split over groups.
_PREFILL_LIMIT = 1 << 18
_DECODE_LIMIT = 1 << 20


class NoHostRowsError(ValueError):
    """The attention plan of a captured step was given to a function that needs the rows on the host."""


@dataclass(frozen=True, slots=True)
class WorkItems:
    """N items of M tiles, computed by one attention call.

    Padding repeats the tile's first query and the first token it sees, so that no item reads
    another request's tokens.
    """

    tiles: int
    """M."""
    slots: Tensor
    """int64 [N * C]: cache slots of the items' chunks."""
    mask_N1LC: Tensor
    """Added to the scores: 0, or a large negative finite number where the query must not see the token."""
    queries: Tensor | None
    """int64 [N * L]: the items' queries as indices of the step's tokens; None: all tokens in order."""
    tile_N: Tensor | None
    """int64: each item's tile; None: item i is all of tile i, without a merge."""
    filled: Tensor | None
    """int64: indices of the M * L queries that are not padding; None: all."""
    tokens: Tensor | None
    """int64: the tokens of those queries; None: the step's tokens in order."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """The R rows of a step as int32 arrays on the host."""

    query_lens: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    exact: bool = True
    """False: contexts of rows with drafts are upper bounds, which the tensors correct."""
    ahead: NDArray[np.int32] | None = None
    """As `AttentionPlan.ahead_T`."""


@dataclass(frozen=True, slots=True)
class _WorkKey:
    """What the items depend on besides the step."""

    num_heads: int
    num_kv_heads: int
    block_size: int
    dtype: torch.dtype
    window: int
    shard: TokenShard = ALL_TOKENS
    chunked: bool = False

    def first_seen(self, positions: Ints) -> Ints:
        """The first token that the query at each position sees."""
        if not self.window:
            return np.zeros_like(positions)
        if self.chunked:
            return positions // self.window * self.window
        return (positions - self.window + 1).clip(min=0)


@dataclass(frozen=True)
class AttentionPlan:
    """Attention metadata of R rows in one step, shared by all layers of one block table.

    Row r's queries are tokens `query_starts_R1[r]` … `query_starts_R1[r + 1]` - 1 of the step, the
    last of its `context_lens_R[r]` tokens. A row without queries is skipped; one without context is
    padding, with any result. So a captured graph can be replayed with fewer rows, as long as the
    numbers below, which decide the launches, still bound the tensors' values.
    """

    block_table_RW: Tensor
    """int32: token t of row r is in block `block_table_RW[r, t // block_size]`; entries of tokens that
    no query sees are ignored."""
    context_lens_R: Tensor
    """int32."""
    query_starts_R1: Tensor
    """int32."""
    num_tokens: int
    """Tokens of the step: at least `query_starts_R1[R]`."""
    min_query_len: int
    """Fewest queries of a row that has any."""
    max_query_len: int
    max_context_len: int
    split_tokens: int = 0
    """Fixed split size of contexts in tokens, a multiple of 256, for batch invariance;
    0: the size depends on device and batch."""
    host: HostRows | None = None
    """The tensors' values on the host, for `work_items`."""
    decode_query_len: int = 1
    """Queries of a row that decodes, drafts included: kernels choose their tiles by it."""
    is_step_input: bool = True
    """Whether the tensors were complete before the step's first layer, so that kernels may read them before
    their predecessor ends. False: kernels of the layer itself have written them, as its top-k tokens."""
    ahead_T: Tensor | None = None
    """int32, of the rows' tokens: how many tokens after its own each query sees, as those of an image see
    each other. All of them are in the step. None: attention is causal, and kernels load nothing."""

    def __post_init__(self) -> None:
        # Kernels count elements of these; an expanded view of one row has a stride of 0.
        for tensor in (self.context_lens_R, self.query_starts_R1, self.ahead_T):
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError("attention plan: contexts, starts and ahead must be contiguous tensors")

    def work_items(
        self,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        dtype: torch.dtype,
        window: int = 0,
        shard: TokenShard = ALL_TOKENS,
        chunked: bool = False,
    ) -> tuple[WorkItems, ...]:
        """Groups of items; each token of a row is a query of exactly one group.

        Cached after the first call. `dtype` is the queries', `window` and `chunked` the layer's (see
        `AttentionRule`). Contexts are the tokens of `shard`; `block_size` counts those in a block. Raises
        ValueError for a plan without host rows.
        """
        return self._made(_WorkKey(num_heads, num_kv_heads, block_size, dtype, window, shard, chunked))

    def prompt_items(self, num_heads: int, dtype: torch.dtype) -> tuple[WorkItems, ...]:
        """Like `work_items` for a step of `whole_prompts`: slots are indices of the step's tokens."""
        return self._made(_WorkKey(num_heads, num_heads, _OWN_TOKENS, dtype, 0))

    def padded(self, num_tokens: int, num_rows: int) -> "AttentionPlan":
        """The plan of the same rows, then padding rows; `num_tokens` and `num_rows` count both."""
        more = num_rows - len(self.context_lens_R)
        host = self.host
        if host is not None:
            host = HostRows(
                np.pad(host.query_lens, (0, more)),
                np.pad(host.context_lens, (0, more)),
                np.pad(host.block_table, ((0, more), (0, 0))),
                host.exact,
                host.ahead,
            )
        return replace(
            self,
            block_table_RW=functional.pad(self.block_table_RW, (0, 0, 0, more)),
            context_lens_R=functional.pad(self.context_lens_R, (0, more)),
            query_starts_R1=functional.pad(self.query_starts_R1, (0, more), value=self.num_tokens),
            num_tokens=num_tokens,
            host=host,
        )

    def derived(self, make: "Callable[[AttentionPlan], M]") -> "M":
        """`make(self)`, computed for the first layer of a step that needs it.

        What it makes must not reference this plan; it may be the plan.
        """
        if make in self._derived:
            found: M = self._derived[make]
            return found
        made = make(self)
        # A plan that references itself is freed by the garbage collector alone, and a worker's collects old
        # objects once in thousands of steps.
        if made is not self:
            self._derived[make] = made
        return made

    @cached_property
    def _derived(self) -> dict[Callable[..., Any], Any]:
        return {}

    @cached_property
    def has_padding_tokens(self) -> bool:
        """Whether the host knows that some of the step's tokens are not a row's."""
        return self.host is not None and int(self.host.query_lens.sum()) < self.num_tokens

    @cached_property
    def whole_prompts(self) -> bool:
        """Whether the host knows that every row's context consists of its new tokens."""
        return self.host is not None and np.array_equal(self.host.query_lens, self.host.context_lens)

    def _made(self, key: _WorkKey) -> tuple[WorkItems, ...]:
        if key not in self._work:
            if self.host is None or not self.host.exact:
                raise NoHostRowsError("this attention plan has no host rows: only a paged kernel can run it")
            device = self.context_lens_R.device
            self._work[key] = _work_items(self.host, key, self.num_tokens, device)
        return self._work[key]

    @cached_property
    def _work(self) -> dict[_WorkKey, tuple[WorkItems, ...]]:
        return {}


@dataclass(frozen=True, slots=True)
class _Tiles:
    """M tiles of one length, as columns."""

    length: int
    row: Ints
    first_token: Ints
    """Index in the step."""
    first_position: Ints
    """Index in the row's context."""
    first_seen: Ints
    """Index in the shard of the first token that its first query sees."""
    queries: Ints
    """Queries without padding, 1 … length."""
    ahead: Ints
    """Tokens after the last query that it sees."""
    shard: TokenShard

    @property
    def context(self) -> Ints:
        """Tokens of the shard up to the last one that a query of each tile sees."""
        return self.shard.count(self.first_position + self.queries + self.ahead)

    @property
    def seen(self) -> Ints:
        """Tokens of the context that at least one query sees."""
        return self.context - self.first_seen

    def part(self, where: slice) -> "_Tiles":
        return _Tiles(
            self.length,
            self.row[where],
            self.first_token[where],
            self.first_position[where],
            self.first_seen[where],
            self.queries[where],
            self.ahead[where],
            self.shard,
        )


def plan_attention(
    query_lens: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    block_table: NDArray[np.int32],
    device: torch.device,
    split_tokens: int = 0,
    decode_query_len: int = 1,
    ahead: NDArray[np.int32] | None = None,
) -> AttentionPlan:
    """The plan of one step from host arrays, which must not change afterwards.

    Row i has `query_lens[i]` new tokens (at least 1), the last of its `context_lens[i]` tokens.
    Keys and values of all of them are in the blocks `block_table[i]` ([rows, max_blocks]; entries
    past the context are never read). Queries of row i follow those of row i - 1. `ahead` as `ahead_T`.
    """
    starts = np.zeros(len(query_lens) + 1, np.int32)
    query_lens.cumsum(out=starts[1:])
    more = () if ahead is None else (ahead,)
    table_RW, contexts_R, starts_R1, *ahead_T = _upload((block_table, context_lens, starts, *more), device)
    return AttentionPlan(
        block_table_RW=table_RW,
        context_lens_R=contexts_R,
        query_starts_R1=starts_R1,
        num_tokens=int(starts[-1]),
        min_query_len=int(query_lens.min()),
        max_query_len=int(query_lens.max()),
        max_context_len=int(context_lens.max()),
        split_tokens=split_tokens,
        host=HostRows(query_lens, context_lens, block_table, ahead=ahead),
        decode_query_len=decode_query_len,
        ahead_T=ahead_T[0] if ahead_T else None,
    )


def empty_attention(device: torch.device, split_tokens: int = 0) -> AttentionPlan:
    """The plan of a step without rows; pad it before use."""
    none = np.empty(0, np.int32)
    return AttentionPlan(
        block_table_RW=torch.zeros(0, 1, dtype=torch.int32, device=device),
        context_lens_R=torch.zeros(0, dtype=torch.int32, device=device),
        query_starts_R1=torch.zeros(1, dtype=torch.int32, device=device),
        num_tokens=0,
        min_query_len=1,
        max_query_len=1,
        max_context_len=1,
        split_tokens=split_tokens,
        host=HostRows(none, none, np.empty((0, 1), np.int32)),
    )


def _upload(arrays: tuple[NDArray[np.int32], ...], device: torch.device) -> list[Tensor]:
    """The arrays on the device, copied at once."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    together = to_device(np.concatenate([array.ravel() for array in arrays]), device)
    parts = together.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _work_items(
    rows: HostRows, key: _WorkKey, num_tokens: int, device: torch.device
) -> tuple[WorkItems, ...]:
    queries = rows.query_lens.astype(np.int64)
    ends = queries.cumsum()
    groups = []
    for chosen in (np.flatnonzero(queries == 1), np.flatnonzero(queries > 1)):
        if not len(chosen):
            continue
        tiles = _cut(chosen, rows, ends - queries, key)
        chunk = _chunk_length(tiles)
        for part in _bounded(tiles, chunk, key):
            groups.append(_items(part, chunk, rows, key, num_tokens, device))
    return tuple(groups)


def _cut(chosen: Ints, rows: HostRows, first_tokens: Ints, key: _WorkKey) -> _Tiles:
    """The tiles of the chosen rows; `first_tokens` are those of all rows."""
    query_lens, context_lens = (
        lens[chosen].astype(np.int64) for lens in (rows.query_lens, rows.context_lens)
    )
    length = _tile_length(query_lens)
    counts = -(-query_lens // length)
    offset = _counting(counts) * length
    owner = np.repeat(np.arange(len(chosen)), counts)
    first_token = first_tokens[chosen][owner] + offset
    first_position = (context_lens - query_lens)[owner] + offset
    queries = np.minimum(query_lens[owner] - offset, length)
    return _Tiles(
        length,
        chosen[owner],
        first_token,
        first_position,
        key.shard.count(key.first_seen(first_position)),
        queries,
        _ahead(rows, first_token + queries - 1),
        key.shard,
    )


def _ahead(rows: HostRows, tokens: Ints) -> Ints:
    """How many tokens after its own each of the step's `tokens` sees."""
    return np.zeros_like(tokens) if rows.ahead is None else rows.ahead[tokens].astype(np.int64)


def _tile_length(query_lens: Ints) -> int:
    return 1 if query_lens.max() == 1 else _cheapest(query_lens, _TILES, _TILE_COST)


def _chunk_length(tiles: _Tiles) -> int:
    if tiles.length > 1:
        return _cheapest(tiles.seen, _PREFILL_CHUNKS, _CHUNK_COST)
    merging = np.where(tiles.seen.max() > _CHUNKS, _MERGE_COST, 0)
    return _cheapest(tiles.seen, _CHUNKS, _CHUNK_COST, merging)


def _cheapest(lens: Ints, sizes: Ints, chunk_cost: int, fixed_cost: Ints | int = 0) -> int:
    """The chunk size with the least work for these lengths, padding included."""
    chunks = -(-lens[:, None] // sizes)
    return int(sizes[(chunks.sum(0) * (sizes + chunk_cost) + fixed_cost).argmin()])


def _bounded(tiles: _Tiles, chunk: int, key: _WorkKey) -> Iterator[_Tiles]:
    """Runs of consecutive tiles whose items stay within the limit together."""
    item_cost = key.num_kv_heads * chunk + key.num_heads * tiles.length
    cost = _chunks(tiles, chunk) * item_cost
    total = cost.cumsum()
    limit = _DECODE_LIMIT if tiles.length == 1 else _PREFILL_LIMIT
    start = 0
    while start < len(cost):
        before = total[start] - cost[start]
        stop = max(int(np.searchsorted(total, before + limit, side="right")), start + 1)
        yield tiles.part(slice(start, stop))
        start = stop


def _items(
    tiles: _Tiles,
    chunk: int,
    rows: HostRows,
    key: _WorkKey,
    num_tokens: int,
    device: torch.device,
) -> WorkItems:
    def tensor(array: Ints | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(device)

    chunks = _chunks(tiles, chunk)
    one_chunk = len(chunks) == chunks.sum()
    tile_N = np.repeat(np.arange(len(chunks)), chunks)
    index_NC = (tiles.first_seen[tile_N] + _counting(chunks) * chunk)[:, None] + np.arange(chunk)
    position_NC = tiles.shard.position(index_NC)

    within_L = np.arange(tiles.length)
    filled_ML = within_L < tiles.queries[:, None]
    queries_ML = tiles.first_token[:, None] + within_L * filled_ML
    own_NL = tiles.first_position[tile_N][:, None] + within_L
    seen_NL = own_NL + _ahead(rows, queries_ML)[tile_N]
    hidden_NLC = position_NC[:, None, :] > seen_NL[:, :, None]
    if key.window:
        hidden_NLC |= position_NC[:, None, :] < key.first_seen(own_NL)[:, :, None]
    mask = torch.zeros(hidden_NLC.shape, dtype=key.dtype, device=device)
    # Finite: a query that sees nothing of an item must get weight 0 in the merge, not NaN.
    mask.masked_fill_(tensor(hidden_NLC), torch.finfo(key.dtype).min / 2)

    all_filled = bool(filled_ML.all())
    in_order = int(tiles.queries.sum()) == num_tokens
    as_they_are = in_order and all_filled and one_chunk
    return WorkItems(
        tiles=len(chunks),
        slots=tensor(_slots(tiles, tile_N, index_NC, rows.block_table, key.block_size).ravel()),
        mask_N1LC=mask.unsqueeze(1),
        queries=None if as_they_are else tensor(queries_ML[tile_N].ravel()),
        tile_N=None if one_chunk else tensor(tile_N),
        filled=None if all_filled else tensor(np.flatnonzero(filled_ML)),
        tokens=None if in_order else tensor(queries_ML[filled_ML]),
    )


def _chunks(tiles: _Tiles, chunk: int) -> Ints:
    """Items of each tile: one even if the shard has no token that it sees."""
    return np.maximum(-(-tiles.seen // chunk), 1)


def _slots(
    tiles: _Tiles, tile_N: Ints, index_NC: Ints, block_table: NDArray[np.int32], block_size: int
) -> Ints:
    exists_NC = index_NC < tiles.context[tile_N][:, None]
    own_NC = np.where(exists_NC, index_NC, tiles.first_seen[tile_N][:, None])
    if block_size == _OWN_TOKENS:
        return (tiles.first_token - tiles.first_position)[tile_N][:, None] + own_NC
    entry_NC = own_NC // block_size
    first_entry_N = tiles.row[tile_N] * block_table.shape[1]
    block_NC = block_table.ravel().take(first_entry_N[:, None] + entry_NC)
    # block * block_size + own % block_size
    return (block_NC - entry_NC) * block_size + own_NC


def _counting(counts: Ints) -> Ints:
    """0 … counts[0]-1, 0 … counts[1]-1, and so on."""
    ends = counts.cumsum()
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)
