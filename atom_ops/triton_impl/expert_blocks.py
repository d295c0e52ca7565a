"""Sorts the (token, expert) pairs by expert on the device, and cuts them into blocks of one expert.

    ids of the pairs     2 0 | 0 1 | 0 2        pair p belongs to token p // J
    sorted: order        1 2 4 | 3 | 0 5        by expert, then by pair
    blocks of 2 pairs    (0, 0, 2) (0, 2, 3) (1, 3, 4) (2, 4, 6)    expert, first and end in `order`

Few pairs: a program places those of one expert. Many: pairs are cut into chunks; one kernel counts the pairs
of each expert in each chunk, and in another a program places a chunk behind the chunks before. So the order
does not depend on timing. Nothing is padded, and the host only knows the greatest possible number of
blocks. Pairs whose id is no expert are left out.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.pdl import launch_options, pdl_begin

_MOST_UNCHUNKED = 4096
"""Pairs up to which a program reads all of them."""
_COUNTED_AT_ONCE = 1024
_PLACED_AT_ONCE = 128
"""Pairs that are compared with each other."""
_MOST_CHUNKS = 256
_CHUNKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """The sorted pairs of a call."""

    order_P: Tensor
    """int32: the pairs in the order of their experts."""
    blocks: Tensor
    """int32 [1 + most, 4]: the number of blocks; then expert, first and end in `order_P` of each block."""

    @property
    def most(self) -> int:
        """Upper bound for the number of blocks."""
        return len(self.blocks) - 1


@triton.jit
def _ids(ids, first_expert, first, pairs, EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Experts of BLOCK_P pairs from `first` on; EXPERTS for those without one."""
    pair_P = first + tl.arange(0, BLOCK_P)
    id_P = tl.load(ids + pair_P, mask=pair_P < pairs, other=-1) - first_expert
    return tl.where((pair_P < pairs) & (id_P >= 0) & (id_P < EXPERTS), id_P, EXPERTS).to(tl.int32)


@triton.jit
def _store_blocks(blocks, expert, number_X, count_X, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The blocks of an expert; of expert 0 also their number. Returns its first pair in the order."""
    blocks_X = (count_X + ROWS - 1) // ROWS
    if expert == 0:
        tl.store(blocks, tl.sum(blocks_X, 0))
    first = tl.sum(tl.where(number_X < expert, count_X, 0), 0)
    end = first + tl.sum(tl.where(number_X == expert, count_X, 0), 0)
    block = blocks + 4 + 4 * tl.sum(tl.where(number_X < expert, blocks_X, 0), 0)
    for at in range(first, end, ROWS):
        tl.store(block, expert)
        tl.store(block + 1, at)
        tl.store(block + 2, tl.minimum(at + ROWS, end))
        block += 4
    return first


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def _sort(
    ids, order, blocks, pairs, first_expert,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (experts,). BLOCK_P: at least all pairs."""
    pdl_begin(PDL)
    expert, number_X, pair_P = tl.program_id(0), tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_P)
    id_P = _ids(ids, first_expert, 0, pairs, EXPERTS, BLOCK_P)
    count_X = tl.where(number_X < EXPERTS, tl.histogram(id_P, BLOCK_X), 0)
    first = _store_blocks(blocks, expert, number_X, count_X, EXPERTS, ROWS)
    mine_P = id_P == expert
    tl.store(order + first + tl.cumsum(mine_P.to(tl.int32), 0) - 1, pair_P, mask=mine_P)


@triton.jit(do_not_specialize=["pairs", "chunk_pairs", "first_expert"])
def _count(
    ids, counts, pairs, chunk_pairs, first_expert,
    EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks,): the pairs of each expert in the chunk, [chunks, BLOCK_X]."""
    pdl_begin(PDL)
    count_X = tl.zeros((BLOCK_X,), tl.int32)
    first = tl.program_id(0) * chunk_pairs
    for start in range(first, first + chunk_pairs, BLOCK_P):
        count_X += tl.histogram(_ids(ids, first_expert, start, pairs, EXPERTS, BLOCK_P), BLOCK_X)
    tl.store(counts + tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X), count_X)


@triton.jit(do_not_specialize=["pairs", "chunk_pairs", "first_expert"])
def _place(
    ids, counts, order, blocks, pairs, chunk_pairs, first_expert,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr,
    AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks,). The programs share the experts to store their blocks."""
    pdl_begin(PDL)
    chunk, chunks, number_X = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK_X)
    count_X, before_X = tl.zeros((BLOCK_X,), tl.int32), tl.zeros((BLOCK_X,), tl.int32)
    for first in range(0, chunks, AT_ONCE):
        chunk_A = first + tl.arange(0, AT_ONCE)
        at_AX = chunk_A[:, None] * BLOCK_X + number_X[None, :]
        count_AX = tl.load(counts + at_AX, mask=(chunk_A < chunks)[:, None], other=0)
        count_X += tl.sum(count_AX, 0)
        before_X += tl.sum(tl.where((chunk_A < chunk)[:, None], count_AX, 0), 0)
    count_X = tl.where(number_X < EXPERTS, count_X, 0)
    for expert in range(chunk, EXPERTS, chunks):
        _store_blocks(blocks, expert, number_X, count_X, EXPERTS, ROWS)

    next_X = tl.cumsum(count_X, 0) - count_X + before_X
    place_P = tl.arange(0, BLOCK_P)
    for start in range(chunk * chunk_pairs, tl.minimum((chunk + 1) * chunk_pairs, pairs), BLOCK_P):
        id_P = _ids(ids, first_expert, start, pairs, EXPERTS, BLOCK_P)
        earlier_PQ = (id_P[:, None] == id_P[None, :]) & (place_P[None, :] < place_P[:, None])
        target_P = tl.gather(next_X, id_P, 0) + tl.sum(earlier_PQ.to(tl.int32), 1)
        tl.store(order + target_P, start + place_P, mask=id_P < EXPERTS)
        next_X += tl.histogram(id_P, BLOCK_X)


def sort_by_expert(ids_TJ: Tensor, experts: int, rows: int, first: int = 0) -> ExpertBlocks:
    """The pairs of `ids_TJ` (int64) sorted by expert, in blocks of at most `rows`; does not synchronise.

    Only those of the `experts` experts from id `first` on; `blocks` numbers these from 0.
    """
    ids_TJ = ids_TJ.contiguous()
    pairs, device = ids_TJ.numel(), ids_TJ.device
    # Each expert with a pair may have one block that is not full.
    most = (pairs + min(pairs, experts) * (rows - 1)) // rows
    order_P = torch.empty(pairs, dtype=torch.int32, device=device)
    blocks = torch.empty(1 + most, 4, dtype=torch.int32, device=device)
    block_x = triton.next_power_of_2(experts + 1)
    options = {"EXPERTS": experts, "BLOCK_X": block_x, **launch_options(device)}
    if pairs <= _MOST_UNCHUNKED:
        block_p = max(128, triton.next_power_of_2(pairs))
        _sort[(experts,)](
            ids_TJ, order_P, blocks, pairs, first, ROWS=rows, BLOCK_P=block_p,
            num_warps=4 if block_p <= 1024 else 8, **options,
        )  # fmt: skip
        return ExpertBlocks(order_P, blocks)
    chunk = triton.cdiv(pairs, _COUNTED_AT_ONCE * _MOST_CHUNKS) * _COUNTED_AT_ONCE
    chunks = triton.cdiv(pairs, chunk)
    counts = torch.empty(chunks, block_x, dtype=torch.int32, device=device)
    _count[(chunks,)](ids_TJ, counts, pairs, chunk, first, BLOCK_P=_COUNTED_AT_ONCE, num_warps=4, **options)
    _place[(chunks,)](
        ids_TJ, counts, order_P, blocks, pairs, chunk, first,
        ROWS=rows, BLOCK_P=_PLACED_AT_ONCE, AT_ONCE=_CHUNKS_AT_ONCE, num_warps=4, **options,
    )  # fmt: skip
    return ExpertBlocks(order_P, blocks)
