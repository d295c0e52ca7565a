"""Sorts the token-expert pairs by expert on the device, and cuts them into blocks of one expert.

    ids of the pairs     2 0 | 0 1 | 0 2        pair p belongs to token p // J
    sorted: order        1 2 4 | 3 | 0 5        by expert, then by pair
    blocks of 2 pairs    (0, 0, 2) (0, 2, 3) (1, 3, 4) (2, 4, 6)    expert, first and end in `order`

Few pairs: a program places those of one expert. Many: one kernel counts the pairs of each expert in each
chunk, the next adds these up over the chunks, and in a third a program places the pairs of a chunk. So the
order does not depend on timing. Nothing is padded, and the host only knows the greatest possible number of
blocks. Pairs whose id is no expert are left out.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_begin

_MOST_UNCHUNKED = 2048
"""Pairs up to which a program reads all of them."""
_CHUNK = 128
"""Pairs that a program compares with each other."""
_COMPARED_AT_ONCE = 32
_ADDED_AT_ONCE = 1024


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
def _ids(topk_ids, first_expert, first, pairs, EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Experts of BLOCK_P pairs from `first` on; EXPERTS for those without one."""
    pair_P = first + tl.arange(0, BLOCK_P)
    id_P = tl.load(topk_ids + pair_P, mask=pair_P < pairs, other=-1) - first_expert
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
    topk_ids, order, blocks, pairs, first_expert,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (experts,). BLOCK_P: at least all pairs."""
    pdl_begin(PDL)
    expert = tl.program_id(0)
    number_X = tl.arange(0, BLOCK_X)
    pair_P = tl.arange(0, BLOCK_P)
    id_P = _ids(topk_ids, first_expert, 0, pairs, EXPERTS, BLOCK_P)
    count_X = tl.where(number_X < EXPERTS, tl.histogram(id_P, BLOCK_X), 0)
    first = _store_blocks(blocks, expert, number_X, count_X, EXPERTS, ROWS)
    mine_P = id_P == expert
    tl.store(order + first + tl.cumsum(mine_P.to(tl.int32), 0) - 1, pair_P, mask=mine_P)


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def _count(
    topk_ids, counts, pairs, first_expert,
    EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks,). counts [BLOCK_X, chunks + 1]: the pairs of each expert in each chunk."""
    pdl_begin(PDL)
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    count_X = tl.histogram(_ids(topk_ids, first_expert, chunk * BLOCK_P, pairs, EXPERTS, BLOCK_P), BLOCK_X)
    tl.store(counts + tl.arange(0, BLOCK_X) * (chunks + 1) + chunk, count_X)


@triton.jit(do_not_specialize=["chunks"])
def _add_up(counts, chunks, AT_ONCE: tl.constexpr, PDL: tl.constexpr):
    """Grid (experts,). A chunk's count becomes that of all chunks before it; the last entry that of all."""
    pdl_begin(PDL)
    counts += tl.program_id(0) * (chunks + 1)
    before = 0
    for first in range(0, chunks, AT_ONCE):
        chunk_C = first + tl.arange(0, AT_ONCE)
        count_C = tl.load(counts + chunk_C, mask=chunk_C < chunks, other=0)
        tl.store(counts + chunk_C, before + tl.cumsum(count_C, 0) - count_C, mask=chunk_C < chunks)
        before += tl.sum(count_C, 0)
    tl.store(counts + chunks, before)


@triton.jit(do_not_specialize=["pairs", "first_expert"])
def _place(
    topk_ids, counts, order, blocks, pairs, first_expert,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks,). The programs share the experts whose blocks are stored."""
    pdl_begin(PDL)
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    number_X = tl.arange(0, BLOCK_X)
    counts_X = counts + number_X * (chunks + 1)
    count_X = tl.load(counts_X + chunks, mask=number_X < EXPERTS, other=0)
    before_X = tl.load(counts_X + chunk, mask=number_X < EXPERTS, other=0)
    for expert in range(chunk, EXPERTS, chunks):
        _store_blocks(blocks, expert, number_X, count_X, EXPERTS, ROWS)
    id_P = _ids(topk_ids, first_expert, chunk * BLOCK_P, pairs, EXPERTS, BLOCK_P)
    pair_P = chunk * BLOCK_P + tl.arange(0, BLOCK_P)
    target_P = tl.gather(tl.cumsum(count_X, 0) - count_X + before_X, id_P, 0)
    for start in range(chunk * BLOCK_P, (chunk + 1) * BLOCK_P, BLOCK_Q):
        id_Q = _ids(topk_ids, first_expert, start, pairs, EXPERTS, BLOCK_Q)
        earlier_PQ = (start + tl.arange(0, BLOCK_Q))[None, :] < pair_P[:, None]
        target_P += tl.sum(((id_P[:, None] == id_Q[None, :]) & earlier_PQ).to(tl.int32), 1)
    tl.store(order + target_P, pair_P, mask=id_P < EXPERTS)


def sort_by_expert(topk_ids_TJ: Tensor, experts: int, rows: int, first: int = 0) -> ExpertBlocks:
    """The pairs of `topk_ids_TJ` (int64) sorted by expert, in blocks of at most `rows`; does not synchronise.

    Only those of the `experts` experts from id `first` on; `blocks` numbers these from 0.
    """
    topk_ids_TJ = topk_ids_TJ.contiguous()
    pairs = topk_ids_TJ.numel()
    device = topk_ids_TJ.device
    # Each expert with a pair may have one block that is not full.
    most = (pairs + min(pairs, experts) * (rows - 1)) // rows
    order_P = torch.empty(pairs, dtype=torch.int32, device=device)
    blocks = torch.empty(1 + most, 4, dtype=torch.int32, device=device)
    block_x = triton.next_power_of_2(experts + 1)
    options = {"EXPERTS": experts, "BLOCK_X": block_x, **launch_options(device)}
    if pairs <= _MOST_UNCHUNKED:
        block_p = max(128, triton.next_power_of_2(pairs))
        _sort[(experts,)](
            topk_ids_TJ, order_P, blocks, pairs, first, ROWS=rows, BLOCK_P=block_p,
            num_warps=4 if block_p <= 1024 else 8, **options,
        )  # fmt: skip
        return ExpertBlocks(order_P, blocks)
    chunks = triton.cdiv(pairs, _CHUNK)
    counts = torch.empty(block_x, chunks + 1, dtype=torch.int32, device=device)
    chunked = options | {"BLOCK_P": _CHUNK, "num_warps": 8}
    _count[(chunks,)](topk_ids_TJ, counts, pairs, first, **chunked)
    _add_up[(experts,)](counts, chunks, AT_ONCE=_ADDED_AT_ONCE, num_warps=4, **launch_options(device))
    _place[(chunks,)](
        topk_ids_TJ, counts, order_P, blocks, pairs, first, ROWS=rows, BLOCK_Q=_COMPARED_AT_ONCE, **chunked
    )
    return ExpertBlocks(order_P, blocks)
