"""Decode inputs of rows with draft tokens: the last sampled id and K drafts of each of R rows.

    position     p          p + 1    …    p + K            p: position of the last sampled id
    id           sampled    draft 1  …    draft K          T = R * (1 + K) tokens, row by row

A row that has fewer drafts is padded: the tokens are computed, and their results are not used. Padding
is written to the cache wherever the row has a block, so attention never reads what no step wrote.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.tolerances import EXACT

NO_DRAFT = -1
"""In place of a draft: it never equals a sampled id."""


@dataclass(frozen=True, slots=True)
class RowState:
    """The state of N rows on the device, all int64; the last row is padding."""

    ids_N: Tensor
    """The id that each row sampled last."""
    positions_N: Tensor
    """The position of this id; -1 for padding."""
    limits_N: Tensor
    """Length of the sequence with all tokens that the row may sample."""
    drafts_NK: Tensor
    """The tokens that may follow; `NO_DRAFT` after the last."""


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """1 + K tokens of each of R rows. A padding row has a context of 0 tokens.

    A row whose last sampled id is the last that it may sample is padding, too.
    """

    ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, at most the row's last; 0 for padding rows."""
    slots_T: Tensor
    """int64: the tokens' slots in the KV cache; -1 without a block."""
    contexts_R: Tensor
    """int32: context length of each row, these tokens included."""
    table_RW: Tensor
    """int32: the rows' block table. 0 after the context; its entries after the row's blocks repeat
    the last."""
    sampled_positions_T: Tensor
    """int64: positions of the tokens sampled by this step; -1 for padding rows."""
    drafts_RK: Tensor
    """int64: the drafts among the tokens; `NO_DRAFT` for padding."""


def state_case(
    stored: int, entries: int, block_size: int, drafts: int, generator: torch.Generator
) -> RowState:
    """The state of random rows whose contexts fit into `entries` blocks; row 0 is at its limit."""
    longest = entries * block_size - drafts
    limits_N = torch.randint(2, longest + 1, (stored,), generator=generator)
    positions_N = (torch.rand(stored, generator=generator) * (limits_N - 1)).long()
    positions_N[0] = limits_N[0] - 1
    positions_N[-1] = -1
    ids_N = torch.randint(0, 5000, (stored,), generator=generator)
    drafts_NK = torch.randint(0, 5000, (stored, drafts), generator=generator)
    counts_N = torch.randint(0, drafts + 1, (stored,), generator=generator)
    drafts_NK.masked_fill_(torch.arange(drafts) >= counts_N[:, None], NO_DRAFT)
    return RowState(ids_N, positions_N, limits_N, drafts_NK)


def _case(rows: int, entries: int, block_size: int, drafts: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, RowState, Tensor, int, int]:
        stored = rows + 7
        state = state_case(stored, entries, block_size, drafts + 1, generator)
        rows_R = torch.randperm(stored, generator=generator)[:rows]
        table_NW = torch.randint(0, 99, (stored, entries), generator=generator, dtype=torch.int32)
        return rows_R, state, table_NW, block_size, drafts

    return Case(f"{rows}x{entries}x{block_size}+{drafts}", make)


@op(
    [_case(1, 3, 4, 2), _case(17, 40, 16, 3), _case(5, 3000, 16, 5), _case(6, 20, 2, 7), _case(4, 9, 4, 0)],
    EXACT,
)
def draft_inputs(
    rows_R: Tensor, state: RowState, table_NW: Tensor, block_size: int, num_drafts: int
) -> DraftInputs:
    """The inputs of rows `rows_R` (int64) with their first `num_drafts` drafts.

    The block table of row n is `table_NW[n]` (int32); it has blocks for all positions below the
    row's limit - 1, and entries for `num_drafts` more positions.
    """
    last_R1 = state.positions_N[rows_R][:, None]
    limit_R1 = state.limits_N[rows_R][:, None]
    padding_R1 = (last_R1 < 0) | (last_R1 >= limit_R1 - 1)
    position_RJ = last_R1.clamp(min=0) + torch.arange(1 + num_drafts, device=rows_R.device)
    drafts_RK = state.drafts_NK[rows_R, :num_drafts]
    ids_RJ = torch.cat((state.ids_N[rows_R][:, None], drafts_RK.clamp(min=0)), 1)

    last_entry_R1 = (limit_R1 - 2).clamp(min=0) // block_size
    entry_W = torch.arange(table_NW.shape[1], device=rows_R.device)
    table_RW = table_NW[rows_R].gather(1, torch.minimum(entry_W, last_entry_R1))
    behind_RW = padding_R1 | (entry_W > (last_R1 + num_drafts) // block_size)
    block_RJ = table_RW.gather(1, (position_RJ // block_size).clamp(max=len(entry_W) - 1)).long()
    without_block_RJ = padding_R1 | (position_RJ // block_size > last_entry_R1)
    slots_RJ = block_RJ * block_size + position_RJ % block_size
    contexts_R1 = (last_R1 + 1 + num_drafts).masked_fill(padding_R1, 0)
    return DraftInputs(
        ids_RJ.flatten(),
        torch.minimum(position_RJ, limit_R1 - 1).masked_fill(padding_R1, 0).flatten(),
        slots_RJ.masked_fill(without_block_RJ, -1).flatten(),
        contexts_R1[:, 0].int(),
        table_RW.masked_fill(behind_RW, 0),
        (position_RJ + 1).masked_fill(padding_R1, -1).flatten(),
        drafts_RK.masked_fill(padding_R1, NO_DRAFT),
    )
