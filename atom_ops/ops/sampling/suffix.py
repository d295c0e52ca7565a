"""Suffix proposals: what followed the longest match of a row's last tokens, in its text or in recent outputs.

    number     20   21   22   23   24   25     of each token, in the order in which rows sampled them:
    id          a    x    b    y    c    z     here two rows take turns
    before     18   19   20   21   22   23     of the same output; -1: its first token here
    after      22   23   24   25   -1   -1

Number n is at place n mod O, so that the newest O tokens are kept. All of it is on the device, which knows
the last tokens when it proposes; a host that launches a step before the last one ends does not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atom_ops.op import Case, op
from atom_ops.ops.sampling.draft_inputs import NO_DRAFT, RowState
from atom_ops.ops.sampling.ngram import NgramRule, TokenHistory, history_text, matched_lengths, ngram_case
from atom_ops.tolerances import EXACT

NO_NUMBER = -1
"""In place of a token's number."""
PRIVATE = -2
"""In place of a row's last number: the row neither reads nor adds to the recent outputs."""
_OTHER = -2
"""An id that no token has."""


@dataclass(frozen=True, slots=True)
class RecentOutputs:
    """The newest O tokens that rows have generated."""

    ids_O: Tensor
    """int32."""
    before_O: Tensor
    """int64: the number of the token before, overwritten or not; `NO_NUMBER`: it is the first."""
    after_O: Tensor
    """int64: the number of the token after; `NO_NUMBER`: it is the last so far."""
    total_1: Tensor
    """int64: how many tokens were added so far, which is the next number."""
    last_N: Tensor
    """int64: the number of each row's last token; `NO_NUMBER` before its first one, or `PRIVATE`."""

    @classmethod
    def empty(cls, tokens: int, rows: int, device: torch.device) -> "RecentOutputs":
        """Room for so many tokens, which take 20 bytes each."""
        before_O, after_O = torch.full((2, tokens), NO_NUMBER, dtype=torch.int64, device=device)
        return cls(
            torch.full((tokens,), NO_DRAFT, dtype=torch.int32, device=device),
            before_O,
            after_O,
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.full((rows,), NO_NUMBER, dtype=torch.int64, device=device),
        )

    @staticmethod
    def first(private: bool) -> int:
        """A row's last number before its first token."""
        return PRIVATE if private else NO_NUMBER

    def is_private(self, row: int) -> bool:
        """Whether the row neither reads nor adds; waits for the device."""
        return int(self.last_N[row]) == PRIVATE


def _steps(stored: int, most: int, ids: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens of all rows but the last: ids, counts and rows of a step."""
    rows_R = torch.randperm(stored - 1, generator=generator)
    ids_RJ = torch.randint(0, ids, (len(rows_R), most), generator=generator)
    return ids_RJ, torch.randint(0, most + 1, rows_R.shape, generator=generator), rows_R


def _recent_case(tokens: int, stored: int, steps: int, generator: torch.Generator) -> RecentOutputs:
    """What rows have sampled in so many steps; row 0 is private, and the last one padding."""
    recent = RecentOutputs.empty(tokens, stored, torch.device("cpu"))
    recent.last_N[0] = PRIVATE
    for step in range(steps):
        record_outputs.reference(*_steps(stored, 4, 3, generator), recent)
        recent.last_N[1 + step % (stored - 2)] = NO_NUMBER  # the row has another request
    return recent


def _record_case(rows: int, most: int, tokens: int, steps: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, RecentOutputs]:
        recent = _recent_case(tokens, rows + 1, steps, generator)
        ids_RJ, counts_R, rows_R = _steps(rows + 1, most, 5000, generator)
        padding_P = torch.tensor([rows, rows])
        ids_RJ = torch.cat((ids_RJ, ids_RJ[:1].expand(2, -1)))
        return ids_RJ, torch.cat((counts_R, 0 * padding_P)), torch.cat((rows_R, padding_P)), recent

    return Case(f"{rows}x{most}-{tokens}-{steps}", make)


@op(
    [
        _record_case(3, 1, 64, 0),
        _record_case(9, 4, 64, 9),
        _record_case(70, 6, 512, 3),
        _record_case(5, 33, 256, 9),
    ],
    EXACT,
)
def record_outputs(ids_RJ: Tensor, counts_R: Tensor, rows_R: Tensor, recent: RecentOutputs) -> Tensor:
    """Append the first `counts_R` of the `ids_RJ` that rows `rows_R` have sampled (int64); returns the total.

    Private rows add nothing. A row with a count of 0 may be there several times. R * J is at most O.
    """
    if not len(rows_R):
        return recent.total_1
    size = len(recent.ids_O)
    last_R = recent.last_N[rows_R]
    counts_R = counts_R.masked_fill(last_R == PRIVATE, 0)
    ends_R = recent.total_1 + counts_R.cumsum(0)
    starts_R = ends_R - counts_R
    number_T = recent.total_1 + torch.arange(ids_RJ.numel(), device=rows_R.device)
    row_T = torch.searchsorted(ends_R, number_T, right=True).clamp(max=len(rows_R) - 1)
    index_T = number_T - starts_R[row_T]
    place_T = number_T % size
    columns = (
        (recent.ids_O, ids_RJ[row_T, index_T.clamp(max=ids_RJ.shape[1] - 1)].int()),
        (recent.before_O, torch.where(index_T == 0, last_R[row_T], number_T - 1)),
        (recent.after_O, torch.where(index_T + 1 < counts_R[row_T], number_T + 1, NO_NUMBER)),
    )
    is_added_T = number_T < ends_R[-1]
    for column_O, values_T in columns:
        column_O[place_T] = torch.where(is_added_T, values_T, column_O[place_T])
    is_kept_R = (counts_R > 0) & (last_R >= (ends_R[-1] - size).clamp(min=0))
    # A row whose last token is overwritten, or that adds none, changes nothing: NO_NUMBER is the least value.
    after_R = starts_R.masked_fill(~is_kept_R, NO_NUMBER)
    recent.after_O.scatter_reduce_(0, last_R.clamp(min=0) % size, after_R, "amax")
    recent.last_N.index_copy_(0, rows_R, torch.where(counts_R > 0, ends_R - 1, last_R))
    return recent.total_1.copy_(ends_R[-1:])


def _propose_case(
    rows: int, entries: int, prediction: int, drafts: int, rule: NgramRule, steps: int, reach: int = 0
) -> Case:
    of_text = ngram_case(rows, entries, prediction, drafts, rule, reach)

    def make(
        dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, RowState, TokenHistory, RecentOutputs, NgramRule, int]:
        rows_R, state, history, _, most = of_text.make(dtype, generator)
        recent = _recent_case(256, len(state.ids_N), steps, generator)
        return rows_R, state, history, recent, rule, most

    return Case(f"{of_text.label}-{steps}", make)


@op(
    [
        _propose_case(1, 5, 0, 3, NgramRule(8, 2), 9),
        _propose_case(19, 12, 0, 4, NgramRule(32, 2), 0),
        _propose_case(19, 9, 25, 5, NgramRule(8, 3), 12),
        _propose_case(13, 9, 0, 4, NgramRule(6, 2), 20, reach=12),
        _propose_case(3, 700, 40, 7, NgramRule(32, 2), 30),
    ],
    EXACT,
)
def propose_suffixes(
    rows_R: Tensor,
    state: RowState,
    history: TokenHistory,
    recent: RecentOutputs,
    rule: NgramRule,
    max_positions: int,
) -> Tensor:
    """Write the drafts of rows `rows_R` (int64) to `state.drafts_NK`, which is returned.

    The longest match of the last `rule.longest` tokens or fewer, down to `rule.shortest`, counts; of several
    that are as long the one in the row's own text, and in each text the latest. A match of n tokens gives at
    most n drafts, and no more than the row can use before its limit. `max_positions` is more than any row's
    position.
    """
    text_RL, end_R1 = history_text(rows_R, state, history, max_positions)
    matched_RL = matched_lengths(text_RL, end_R1, rule.longest)
    own_R1, at_R1 = _latest(matched_RL, torch.arange(text_RL.shape[1], device=rows_R.device))
    back_T = torch.arange(min(rule.longest, text_RL.shape[1]), device=rows_R.device)
    tails_RT = text_RL.gather(1, (end_R1 - back_T).clamp(min=0)).masked_fill(end_R1 < back_T, _OTHER)
    private_R1 = recent.last_N[rows_R][:, None] == PRIVATE
    other_R1, number_R1 = _longest_output(tails_RT.masked_fill(private_R1, _OTHER), recent)
    length_R1 = torch.maximum(own_R1, other_R1)

    last_R1 = state.positions_N[rows_R][:, None]
    room_R1 = state.limits_N[rows_R][:, None] - 2 - last_R1
    draft_K = torch.arange(state.drafts_NK.shape[1], device=rows_R.device)
    at_RK = at_R1 + 1 + draft_K
    own_RK = text_RL.gather(1, at_RK.clamp(max=text_RL.shape[1] - 1)).masked_fill(at_RK > end_R1, NO_DRAFT)
    drafts_RK = torch.where(own_R1 >= other_R1, own_RK, _following(number_R1, len(draft_K), recent)).long()
    unused_RK = (draft_K >= torch.minimum(room_R1, length_R1)) | (last_R1 < 0) | (length_R1 < rule.shortest)
    unused_RK |= (drafts_RK < 0).cumsum(1) > 0
    state.drafts_NK.index_copy_(0, rows_R, drafts_RK.masked_fill(unused_RK, NO_DRAFT))
    return state.drafts_NK


def _latest(matched_RM: Tensor, place_M: Tensor) -> tuple[Tensor, Tensor]:
    """The most matched tokens of each row, and the last of the places with so many, [R, 1] each."""
    best_R1 = matched_RM.amax(1, keepdim=True)
    return best_R1, torch.where(matched_RM == best_R1, place_M, NO_NUMBER).amax(1, keepdim=True)


def _longest_output(tails_RT: Tensor, recent: RecentOutputs) -> tuple[Tensor, Tensor]:
    """The latest of the longest matches that something follows: its length, and the number of its last token.

    `tails_RT` are each row's last tokens, from the last one backwards.
    """
    size = len(recent.ids_O)
    newest_1 = recent.total_1 - 1
    oldest_1 = (recent.total_1 - size).clamp(min=0)
    number_O = newest_1 - (newest_1 - torch.arange(size, device=tails_RT.device)) % size
    at_RO = number_O.expand(len(tails_RT), size)
    same_RO = (number_O >= 0) & (recent.after_O >= 0)
    matched_RO = torch.zeros_like(at_RO)
    for token_R in tails_RT.unbind(1):
        place_RO = at_RO.clamp(min=0) % size
        same_RO = same_RO & (at_RO >= oldest_1) & (recent.ids_O[place_RO] == token_R[:, None])
        matched_RO += same_RO
        at_RO = torch.where(same_RO, recent.before_O[place_RO], NO_NUMBER)
    return _latest(matched_RO, number_O)


def _following(number_R1: Tensor, count: int, recent: RecentOutputs) -> Tensor:
    """The tokens after these numbers, int32 [R, count]; `NO_DRAFT` after the last."""
    drafts = []
    for _ in range(count):
        number_R1 = recent.after_O[number_R1.clamp(min=0) % len(recent.ids_O)].masked_fill(
            number_R1 < 0, NO_NUMBER
        )
        ids_R1 = recent.ids_O[number_R1.clamp(min=0) % len(recent.ids_O)]
        drafts.append(ids_R1.masked_fill(number_R1 < 0, NO_DRAFT))
    return torch.cat(drafts, 1)
