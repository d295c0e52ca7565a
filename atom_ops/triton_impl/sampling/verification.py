"""Verification of drafts: one program for a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling.draft_inputs import RowState
from atom_ops.ops.sampling.verification import verify_drafts
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on


@triton.jit
def _verify(
    sampled_ptr, drafts_ptr, rows_ptr, first_ptr, ids_ptr, positions_ptr, counts_out,
    first_stride, DRAFTS: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    first = tl.load(first_ptr + index * first_stride)
    j = tl.arange(0, BLOCK_J)
    sampled_J = tl.load(sampled_ptr + index * (1 + DRAFTS) + j, mask=j <= DRAFTS, other=0)
    draft_J = tl.load(drafts_ptr + index * DRAFTS + j, mask=j < DRAFTS, other=0)
    differs_J = (j >= DRAFTS) | (sampled_J != draft_J)
    last = tl.min(tl.where(differs_J, j, DRAFTS), 0)
    new_id = tl.sum(tl.where(j == last, sampled_J, 0), 0)
    tl.store(ids_ptr + row, tl.where(first < 0, 0, new_id))
    tl.store(positions_ptr + row, tl.where(first < 0, -1, first + last))
    tl.store(counts_out + index, (last + 1).to(tl.int64))


@verify_drafts.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda ids_RJ, drafts_RK, rows_R, first_positions_R, state: (
        ids_RJ.is_contiguous() and drafts_RK.is_contiguous()
    ),
)
def _launch(
    ids_RJ: Tensor, drafts_RK: Tensor, rows_R: Tensor, first_positions_R: Tensor, state: RowState
) -> Tensor:
    rows, drafts = drafts_RK.shape
    counts_R = torch.empty_like(rows_R)
    if rows:
        _verify[(rows,)](
            ids_RJ, drafts_RK, rows_R, first_positions_R, state.ids_N, state.positions_N, counts_R,
            first_positions_R.stride(0), DRAFTS=drafts, BLOCK_J=triton.next_power_of_2(1 + drafts),
            num_warps=1,
        )  # fmt: skip
    return counts_R
