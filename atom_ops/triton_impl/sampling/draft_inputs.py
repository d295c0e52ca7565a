"""Inputs of rows with drafts: one program for a chunk of a row's block table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom_ops.ops.sampling.draft_inputs import NO_DRAFT, DraftInputs, RowState, draft_inputs
from atom_ops.triton_impl.hardware.target import NEEDS, runs_on

_BLOCK = 1024
_NONE = tl.constexpr(NO_DRAFT)


@triton.jit
def _gather_rows(
    rows_ptr, ids_ptr, positions_ptr, limits_ptr, drafts_ptr, table_ptr,
    ids_out, positions_out, slots_out, contexts_out, table_out, sampled_out, drafts_out, drafts_stride,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    last = tl.load(positions_ptr + row)
    limit = tl.load(limits_ptr + row)
    padding = (last < 0) | (last >= limit - 1)
    last_entry = tl.maximum(limit - 2, 0) // BLOCK_SIZE
    table = table_ptr + row * WIDTH
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    needed = (entry <= (last + DRAFTS) // BLOCK_SIZE) & (entry < WIDTH) & (padding == 0)
    blocks = tl.load(table + tl.minimum(entry, last_entry), mask=needed, other=0)
    tl.store(table_out + index * WIDTH + entry, blocks, mask=entry < WIDTH)
    if tl.program_id(1) == 0:
        j = tl.arange(0, BLOCK_J)
        position_J = tl.maximum(last, 0) + j
        entry_J = position_J // BLOCK_SIZE
        has_slot_J = (entry_J <= last_entry) & (entry_J < WIDTH) & (j <= DRAFTS) & (padding == 0)
        slot_J = tl.load(table + entry_J, mask=has_slot_J, other=0).to(tl.int64) * BLOCK_SIZE
        slot_J = tl.where(has_slot_J, slot_J + position_J % BLOCK_SIZE, -1)
        is_draft_J = (j >= 1) & (j <= DRAFTS)
        draft_J = tl.load(drafts_ptr + row * drafts_stride + j - 1, mask=is_draft_J, other=0)
        id_J = tl.where(j == 0, tl.load(ids_ptr + row), tl.maximum(draft_J, 0))
        at_J = index * (1 + DRAFTS) + j
        tl.store(ids_out + at_J, id_J, mask=j <= DRAFTS)
        position_J = tl.where(padding, 0, tl.minimum(position_J, limit - 1))
        tl.store(positions_out + at_J, position_J, mask=j <= DRAFTS)
        tl.store(slots_out + at_J, slot_J, mask=j <= DRAFTS)
        tl.store(sampled_out + at_J, tl.where(padding, -1, last + 1 + j), mask=j <= DRAFTS)
        kept_J = tl.where(padding, _NONE, draft_J)
        tl.store(drafts_out + index * DRAFTS + j - 1, kept_J, mask=is_draft_J)
        tl.store(contexts_out + index, tl.where(padding, 0, last + 1 + DRAFTS).to(tl.int32))


@draft_inputs.provider(
    "triton",
    needs=NEEDS,
    supported=runs_on,
    supports=lambda rows_R, state, table_NW, block_size, num_drafts: table_NW.is_contiguous(),
)
def _launch(
    rows_R: Tensor, state: RowState, table_NW: Tensor, block_size: int, num_drafts: int
) -> DraftInputs:
    rows = len(rows_R)
    width = table_NW.shape[1]
    ids_T, positions_T, slots_T, sampled_T = (rows_R.new_empty(rows * (1 + num_drafts)) for _ in range(4))
    contexts_R = torch.empty_like(rows_R, dtype=torch.int32)
    table_RW = table_NW.new_empty(rows, width)
    drafts_RK = rows_R.new_empty(rows, num_drafts)
    block = min(triton.next_power_of_2(width), _BLOCK)
    if rows:
        _gather_rows[(rows, triton.cdiv(width, block))](
            rows_R, state.ids_N, state.positions_N, state.limits_N, state.drafts_NK, table_NW,
            ids_T, positions_T, slots_T, contexts_R, table_RW, sampled_T, drafts_RK,
            state.drafts_NK.stride(0),
            WIDTH=width, BLOCK_SIZE=block_size, DRAFTS=num_drafts, BLOCK=block,
            BLOCK_J=triton.next_power_of_2(1 + num_drafts),
        )  # fmt: skip
    return DraftInputs(ids_T, positions_T, slots_T, contexts_R, table_RW, sampled_T, drafts_RK)
