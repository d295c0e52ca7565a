"""Verification of draft tokens: how many of a row's sampled tokens are the plain run's."""

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.sampling.draft_inputs import RowState, state_case
from atom_ops.tolerances import EXACT


def _case(rows: int, drafts: int) -> Case:
    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, RowState]:
        state = state_case(rows + 3, 9, 16, drafts, generator)
        rows_R = torch.randperm(rows + 3, generator=generator)[:rows]
        drafts_RK = state.drafts_NK[rows_R]
        more_R1 = torch.randint(0, 5000, (rows, 1), generator=generator)
        wrong_RJ = torch.rand(rows, drafts + 1, generator=generator) < 0.2
        ids_RJ = torch.cat((drafts_RK, more_R1), 1).clamp_(min=0) + wrong_RJ
        first_R = state.positions_N[rows_R] + 1
        return ids_RJ, drafts_RK, rows_R, first_R.masked_fill(first_R == 0, -1), state

    return Case(f"{rows}+{drafts}", make)


@op([_case(1, 1), _case(17, 3), _case(9, 6), _case(3, 0)], EXACT)
def verify_drafts(
    ids_RJ: Tensor, drafts_RK: Tensor, rows_R: Tensor, first_positions_R: Tensor, state: RowState
) -> Tensor:
    """How many of each row's sampled ids are its next tokens, int64 [R], 1 to 1 + K.

    `ids_RJ` (int64) are sampled after the last token and after each of the K drafts (int64), from
    position `first_positions_R` (int64) on. The tokens up to the first that differs from its draft
    are those that the row would sample without drafts. The last of them becomes the row's last
    sampled id in `state`, in place. With a first position of -1 the row becomes padding.
    """
    drafts = drafts_RK.shape[1]
    counts_R = 1 + (ids_RJ[:, :drafts] == drafts_RK).long().cumprod(1).sum(1)
    padding_R = first_positions_R < 0
    last_R = ids_RJ.gather(1, counts_R[:, None] - 1)[:, 0]
    state.ids_N.index_copy_(0, rows_R, last_R.masked_fill(padding_R, 0))
    state.positions_N.index_copy_(0, rows_R, (first_positions_R + counts_R - 1).masked_fill(padding_R, -1))
    return counts_R
