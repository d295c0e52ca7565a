"""N-gram proposals (prompt lookup): the tokens that followed an earlier occurrence of the last ones.

    text of a row     prediction | prompt | output        found: n last tokens
                      … a b c d e …      … x b c          drafts: d e …

The prediction is text that the client expects. Prompt and output are read through the row's block
table: each slot of the KV cache has the id of its token, also where another request computed it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.sampling.draft_inputs import NO_DRAFT, RowState, state_case
from atom_ops.tolerances import EXACT

_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The text of N rows."""

    ids_S: Tensor
    """int32: the id of the token in each slot."""
    table_NW: Tensor
    """int32: the rows' block tables."""
    predictions_NP: Tensor
    """int32; rows may be strided."""
    prediction_lens_N: Tensor
    """int64: at most P."""
    block_size: int
    reach: int = 0
    """Last tokens of a sequence whose blocks it still has (a sliding window); 0: all."""


@dataclass(frozen=True, slots=True)
class NgramRule:
    """Lengths of the n-grams to find."""

    longest: int
    shortest: int


def ngram_case(
    rows: int, entries: int, prediction: int, drafts: int, rule: NgramRule, reach: int = 0
) -> Case:
    """Random rows with a text of three different tokens."""

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, RowState, TokenHistory, NgramRule, int]:
        stored = rows + 2
        block_size = 4
        state = state_case(stored, entries, block_size, drafts, generator)
        state.ids_N.remainder_(3)
        blocks = torch.randperm(stored * entries, generator=generator, dtype=torch.int32)
        history = TokenHistory(
            torch.randint(0, 3, (stored * entries * block_size,), generator=generator, dtype=torch.int32),
            blocks.view(stored, entries),
            torch.randint(0, 3, (stored, prediction + 2), generator=generator, dtype=torch.int32)[
                :, :prediction
            ],
            torch.randint(0, prediction + 1, (stored,), generator=generator),
            block_size,
            reach,
        )
        rows_R = torch.randperm(stored, generator=generator)[:rows]
        return rows_R, state, history, rule, entries * block_size

    label = f"{rows}x{entries}x{prediction}+{drafts}-{rule.longest}-{rule.shortest}"
    return Case(f"{label}{f'-reach{reach}' if reach else ''}", make)


@op(
    [
        ngram_case(1, 5, 0, 3, NgramRule(3, 1)),
        ngram_case(19, 12, 0, 4, NgramRule(5, 2)),
        ngram_case(19, 9, 25, 5, NgramRule(4, 3)),
        ngram_case(13, 9, 0, 2, NgramRule(2, 2), reach=12),
        ngram_case(3, 700, 40, 7, NgramRule(12, 10)),
    ],
    EXACT,
)
def propose_ngrams(
    rows_R: Tensor, state: RowState, history: TokenHistory, rule: NgramRule, max_positions: int
) -> Tensor:
    """Write the drafts of rows `rows_R` (int64) to `state.drafts_NK`, which is returned.

    The text is searched for its last `rule.longest` tokens, then for fewer, down to
    `rule.shortest`; the earliest occurrence counts. The drafts are the tokens after it, at most as
    many as the row can use before its limit. `max_positions` is more than any row's position.
    """
    text_RL, end_R1 = history_text(rows_R, state, history, max_positions)
    at_L = torch.arange(text_RL.shape[1], device=rows_R.device)
    matched_RL = matched_lengths(text_RL, end_R1, rule.longest)
    best_R1 = matched_RL.amax(1, keepdim=True)
    found_R1 = torch.where(matched_RL == best_R1, at_L, len(at_L)).amin(1, keepdim=True)
    found_R1 = torch.where(best_R1 >= rule.shortest, found_R1, end_R1)

    last_R1 = state.positions_N[rows_R][:, None]
    limit_R1 = state.limits_N[rows_R][:, None]
    draft_K = torch.arange(state.drafts_NK.shape[1], device=rows_R.device)
    at_RK = found_R1 + 1 + draft_K
    drafts_RK = text_RL.gather(1, at_RK.clamp(max=len(at_L) - 1)).long()
    unused_RK = (at_RK > end_R1) | (draft_K >= limit_R1 - 2 - last_R1) | (last_R1 < 0)
    state.drafts_NK.index_copy_(0, rows_R, drafts_RK.masked_fill(unused_RK, NO_DRAFT))
    return state.drafts_NK


def matched_lengths(text_RL: Tensor, end_R1: Tensor, longest: int) -> Tensor:
    """How many tokens, up to `longest`, end at each earlier place as they end the text: int32 [R, L]."""
    at_L = torch.arange(text_RL.shape[1], device=text_RL.device)
    matched_RL = torch.zeros_like(text_RL)
    same_RL = at_L < end_R1
    for back in range(min(longest, len(at_L))):
        token_R1 = text_RL.gather(1, (end_R1 - back).clamp(min=0))
        token_R1 = token_R1.masked_fill((token_R1 < 0) | (end_R1 < back), _NO_TOKEN - 1)
        earlier_RL = torch.nn.functional.pad(text_RL[:, : len(at_L) - back], (back, 0), value=_NO_TOKEN)
        same_RL = same_RL & (earlier_RL == token_R1)
        matched_RL += same_RL
    return matched_RL


def history_text(
    rows_R: Tensor, state: RowState, history: TokenHistory, max_positions: int
) -> tuple[Tensor, Tensor]:
    """The rows' texts [R, L], int32, -1 where there is no token, and the index of the last token [R, 1]."""
    last_R1 = state.positions_N[rows_R][:, None]
    length_R1 = history.prediction_lens_N[rows_R][:, None]
    predictions_RP = history.predictions_NP[rows_R]
    at_L = torch.arange(predictions_RP.shape[1] + max_positions, device=rows_R.device)
    position_RL = at_L - length_R1
    table_RW = history.table_NW[rows_R]
    inside_RL = position_RL.clamp(0, table_RW.shape[1] * history.block_size - 1)
    block_RL = table_RW.gather(1, inside_RL // history.block_size).long()
    text_RL = history.ids_S[block_RL * history.block_size + inside_RL % history.block_size]
    text_RL = torch.where(position_RL == last_R1, state.ids_N[rows_R][:, None].int(), text_RL)
    unknown_RL = position_RL > last_R1
    if history.reach:
        unknown_RL |= (position_RL >= 0) & (position_RL <= last_R1 - history.reach)
    text_RL.masked_fill_(unknown_RL, _NO_TOKEN)
    width = predictions_RP.shape[1]
    if width:
        text_RL[:, :width] = torch.where(at_L[:width] < length_R1, predictions_RP, text_RL[:, :width])
    return text_RL, length_R1 + last_R1
