"""Sorts the (token, expert) pairs by expert on the device, and cuts them into blocks of one expert.

    ids of the pairs     2 0 | 0 1 | 0 2        pair p belongs to token p // J
    sorted: order        1 2 4 | 3 | 0 5        by expert, then by pair
    blocks of 2 pairs    (0, 0, 2) (0, 2, 3) (1, 3, 4) (2, 4, 6)    expert, first and end in `order`

A program sorts the pairs of one expert, or a part of them that it places behind the parts before, so the
order does not depend on timing. Nothing is padded, and the host only knows the greatest possible number of
blocks. Pairs whose id is no expert are left out.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.pdl import launch_options, pdl_begin

_COUNTED_AT_ONCE = 4096
_MOST_PARTS = 8


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
def _counts(
    ids, first_expert, first, pairs,
    EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Pairs of each expert among BLOCK_P pairs; those without an expert are counted at EXPERTS."""
    pair_P = first + tl.arange(0, BLOCK_P)
    id_P = tl.load(ids + pair_P, mask=pair_P < pairs, other=-1) - first_expert
    id_P = tl.where((pair_P < pairs) & (id_P >= 0) & (id_P < EXPERTS), id_P, EXPERTS).to(tl.int32)
    return tl.histogram(id_P, BLOCK_X)


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def _count(
    ids, counts, pairs, first_expert,
    EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of BLOCK_P pairs,)."""
    pdl_begin(PDL)
    chunk = tl.program_id(0)
    count_X = _counts(ids, first_expert, chunk * BLOCK_P, pairs, EXPERTS, BLOCK_X, BLOCK_P)
    tl.store(counts + chunk * BLOCK_X + tl.arange(0, BLOCK_X), count_X)


@triton.jit(do_not_specialize=["pairs", "chunks", "share", "first_expert"])
def _sort(
    ids, counts, order, blocks, pairs, chunks, share, first_expert,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (experts, parts of `share` chunks). COUNTED: `counts` has the pairs of each expert and chunk."""
    pdl_begin(PDL)
    expert, first_chunk = tl.program_id(0), tl.program_id(1) * share
    number_X = tl.arange(0, BLOCK_X)
    before_X = tl.zeros((BLOCK_X,), tl.int32)
    if COUNTED:
        count_X = tl.zeros((BLOCK_X,), tl.int32)
        for chunk in range(chunks):
            of_chunk_X = tl.load(counts + chunk * BLOCK_X + number_X)
            count_X += of_chunk_X
            before_X += tl.where(chunk < first_chunk, of_chunk_X, 0)
    else:
        count_X = _counts(ids, first_expert, 0, pairs, EXPERTS, BLOCK_X, BLOCK_P)
    count_X = tl.where(number_X < EXPERTS, count_X, 0)
    blocks_X = (count_X + ROWS - 1) // ROWS
    first = tl.sum(tl.where(number_X < expert, count_X, 0), 0)
    end = first + tl.sum(tl.where(number_X == expert, count_X, 0), 0)
    block = blocks + 4 + 4 * tl.sum(tl.where(number_X < expert, blocks_X, 0), 0)
    if first_chunk == 0:
        if expert == 0:
            tl.store(blocks, tl.sum(blocks_X, 0))
        for at in range(first, end, ROWS):
            tl.store(block, expert)
            tl.store(block + 1, at)
            tl.store(block + 2, tl.minimum(at + ROWS, end))
            block += 4
    if first < end:
        first += tl.sum(tl.where(number_X == expert, before_X, 0), 0)
        stop = tl.minimum((first_chunk + share) * BLOCK_P, pairs)
        for start in range(first_chunk * BLOCK_P, stop, BLOCK_P):
            pair_P = start + tl.arange(0, BLOCK_P)
            id_P = tl.load(ids + pair_P, mask=pair_P < pairs, other=-1)
            mine_P = (pair_P < pairs) & (id_P == first_expert + expert)
            place_P = first + tl.cumsum(mine_P.to(tl.int32), 0) - 1
            tl.store(order + place_P, pair_P, mask=mine_P)
            first += tl.sum(mine_P.to(tl.int32), 0)


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
    block_p = min(_COUNTED_AT_ONCE, max(128, triton.next_power_of_2(pairs)))
    chunks = triton.cdiv(pairs, block_p)
    options = {"EXPERTS": experts, "BLOCK_X": block_x, "BLOCK_P": block_p, **launch_options(device)}
    options["num_warps"] = 4 if block_p <= 1024 else 8
    counts = order_P  # one chunk: not read
    if chunks > 1:
        counts = torch.empty(chunks, block_x, dtype=torch.int32, device=device)
        _count[(chunks,)](ids_TJ, counts, pairs, first, **options)
    share = triton.cdiv(chunks, _MOST_PARTS)
    _sort[(experts, triton.cdiv(chunks, share))](
        ids_TJ, counts, order_P, blocks, pairs, chunks, share, first,
        ROWS=rows, COUNTED=chunks > 1, **options,
    )  # fmt: skip
    return ExpertBlocks(order_P, blocks)
