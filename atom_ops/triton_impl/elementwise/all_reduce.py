"""All-reduce, residual and RMS norm in one kernel: ranks write rows into the memory of each other's GPUs.

Each rank has an inbox of [2, sources, rows, width] elements, which the other ranks fill. There are no
flags: a place that holds `EMPTY`, a NaN that is never sent, has not been written yet. So stores may arrive in
any order, and no fence is needed between ranks.

    one shot      every rank sends its partial row to all others, and sums what it gets
    two shots     every rank sends its partial row to the row's owner (row % ranks), which sends back
                  the sum

One shot waits once; two shots send less where there are more than two ranks. The bits are the same: a sum in
float32 in the order of the ranks, plus the residual, rounded once. Every rank computes the norm itself.

A rank empties a place after reading it. It alternates between the halves of its inbox, row by row: a sender
can be one call ahead of a receiver, and not two, because it waits for what the receiver sends in between.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.triton_impl.hardware.pdl import launch_options, pdl_launch_dependents, pdl_wait

EMPTY = -1
"""The bits of every element of an empty inbox."""

# A block is at least as wide as a program's threads, so that one thread reads, and empties, a place.
_LEAST_WIDTH = 128
_MOST_WIDTH = 16384


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """The integer type of an inbox for rows of `dtype`."""
    return torch.int32 if dtype.itemsize == 4 else torch.int16


def supports_width(width: int) -> bool:
    """Whether rows of `width` elements can be reduced."""
    return _LEAST_WIDTH <= width <= _MOST_WIDTH


@triton.jit
def _inbox(inboxes_ptr, rank, BITS: tl.constexpr):
    return tl.multiple_of(tl.load(inboxes_ptr + rank).to(tl.pointer_type(BITS)), 16)


@triton.jit
def _send(place, values, inside, BITS: tl.constexpr, NAN: tl.constexpr):
    bits = values.to(BITS, bitcast=True)
    bits = tl.where(bits == -1, NAN, bits)  # another NaN: -1 says that a place is empty
    tl.store(place, bits, mask=inside, cache_modifier=".wt")


@triton.jit
def _receive(place, inside, DTYPE: tl.constexpr):
    """The row at `place`, once it is there; leaves the place empty."""
    bits = tl.load(place, mask=inside, other=0, volatile=True)
    while tl.max((bits == -1).to(tl.int32), axis=0) > 0:
        bits = tl.load(place, mask=inside, other=0, volatile=True)
    tl.store(place, -1, mask=inside)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def _sum_over_ranks(
    x, inboxes_ptr, half, at, inside, stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    own = _inbox(inboxes_ptr, RANK, BITS)
    total = x.to(tl.float32) * 0
    for source in tl.static_range(RANKS):
        if source == RANK:
            total += x.to(tl.float32)
        else:
            total += _receive(own + (half * RANKS + source) * stride + at, inside, x.dtype).to(tl.float32)
    return total


@triton.jit
def _all_reduce_rows(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, rows, inboxes_ptr, turns_ptr, stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, TWO_SHOTS: tl.constexpr,
    BITS: tl.constexpr, NAN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    pdl_wait(PDL)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * SIZE + column  # an inbox has fewer than 2^31 elements
        turn = tl.load(turns_ptr + row)
        half = turn & 1
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        residual = x.to(tl.float32) * 0
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if TWO_SHOTS:
            owner = row % RANKS
            if owner == RANK:
                total = _sum_over_ranks(x, inboxes_ptr, half, at, inside, stride, RANK, RANKS, BITS)
                total = (total + residual).to(x.dtype)
                for step in tl.static_range(1, RANKS):
                    inbox = _inbox(inboxes_ptr, (RANK + step) % RANKS, BITS)
                    _send(inbox + (half * RANKS + RANK) * stride + at, total, inside, BITS, NAN)
            else:
                inbox = _inbox(inboxes_ptr, owner, BITS)
                _send(inbox + (half * RANKS + RANK) * stride + at, x, inside, BITS, NAN)
                own = _inbox(inboxes_ptr, RANK, BITS)
                total = _receive(own + (half * RANKS + owner) * stride + at, inside, x.dtype)
        else:
            for step in tl.static_range(1, RANKS):
                inbox = _inbox(inboxes_ptr, (RANK + step) % RANKS, BITS)
                _send(inbox + (half * RANKS + RANK) * stride + at, x, inside, BITS, NAN)
            total = _sum_over_ranks(x, inboxes_ptr, half, at, inside, stride, RANK, RANKS, BITS)
            total = (total + residual).to(x.dtype)
        tl.store(turns_ptr + row, turn + 1)
        tl.store(total_ptr + at, total, mask=inside)
        if weight_ptr is not None:
            wide = total.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
            tl.store(out_ptr + at, wide * scale * weight.to(tl.float32), mask=inside)


class Inboxes(NamedTuple):
    """Where the ranks of one host write each other's rows; made once for rows of one width."""

    rank: int
    addresses_N: Tensor
    """int64, on this rank's device: where it sees the inbox of each rank."""
    stride: int
    """Elements of one half for one source: most rows x width."""
    turns_R: Tensor
    """int32, of this rank: how often each row has been used."""


def all_reduce_rows(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor | None,
    eps: float,
    inboxes: Inboxes,
    two_shots: bool,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total), where total is the sum of `x_TD` over the ranks plus the residual.

    Without a weight the first is the total too. All ranks call it with as many rows and the same
    `two_shots`. More rows than those of the inboxes are several kernels.
    """
    x_TD = x_TD.contiguous()
    total_TD = torch.empty_like(x_TD)
    out_TD = total_TD if weight_D is None else torch.empty_like(x_TD)
    most = len(inboxes.turns_R)
    for first in range(0, len(x_TD), most):
        rows = slice(first, first + most)
        residual_RD = None if residual_TD is None else residual_TD[rows]
        _launch(x_TD[rows], residual_RD, weight_D, out_TD[rows], total_TD[rows], eps, inboxes, two_shots)
    return out_TD, total_TD


def _launch(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    weight_D: Tensor | None,
    out_TD: Tensor,
    total_TD: Tensor,
    eps: float,
    inboxes: Inboxes,
    two_shots: bool,
) -> None:
    rows, size = x_TD.shape
    block = triton.next_power_of_2(size)
    warps = min(max(block // 512, 1), 16)
    wide = x_TD.dtype.itemsize == 4
    _all_reduce_rows[(min(rows, programs_at_once(x_TD.device, warps)),)](
        x_TD, residual_TD, weight_D, out_TD, total_TD, eps, rows,
        inboxes.addresses_N, inboxes.turns_R, inboxes.stride,
        RANK=inboxes.rank, RANKS=len(inboxes.addresses_N), TWO_SHOTS=two_shots,
        BITS=tl.int32 if wide else tl.int16, NAN=0x7FFFFFFF if wide else 0x7FFF,
        SIZE=size, BLOCK=block, num_warps=warps, **launch_options(x_TD.device),
    )  # fmt: skip


@cache
def programs_at_once(device: torch.device, warps: int) -> int:
    """Programs that run at once: one that another waits for must not have to wait for a free SM."""
    if device.type != "cuda":
        return 4
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * (2 if warps <= 8 else 1)
