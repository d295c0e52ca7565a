"""Suffix speculation: drafts follow the longest match of a row's last tokens.

    row's text        … a b c d e … x y a b c ▸ d e      looked up in the text itself
    recent outputs    … y a b c f g …                    of all requests

The longer match counts, of up to 32 tokens; the row's own where both are as long. A match of n tokens gives
at most n drafts: a longer one is more likely to go on.

Texts and recent outputs are on the device. A GPU looks them up there, as part of the step that samples
(`propose_suffixes`), and takes the latest of the places that match equally well. On a CPU each draft is the
token that most of these places have.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.worker import NewRow
from atom_ops import (
    NO_DRAFT,
    NgramRule,
    RecentOutputs,
    RowState,
    propose_suffixes,
    record_outputs,
    to_device,
)
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import GroupRows
from workers.spec_decode.text_history import TextGroup, TextProposer, longest_match, row_text

LONGEST = 32
"""Tokens of the longest match."""
SHORTEST = 2
MOST_PLACES = 16
"""Last places of a match that are compared on a CPU."""
KEPT_TOKENS = 1 << 16
"""Tokens of recent outputs, which take 1.3 MB; more if two steps can sample more."""


class SuffixProposer(TextProposer):
    """Looks up the last tokens of each row."""

    records_outputs = True

    def __init__(
        self,
        group: TextGroup,
        table: GroupRows,
        num_blocks: int,
        limits: BatchLimits,
        device: torch.device,
        exact: bool | None = None,
    ):
        """`num_blocks` and `table` are of the KV group `group`.

        `exact`: whether the host has the tokens, and looks them up; None: as the device requires.
        """
        super().__init__(group, table, num_blocks, limits, device)
        self._exact = device.type == "cpu" if exact is None else exact
        rows = limits.max_rows + 1
        kept = max(KEPT_TOKENS, 2 * rows * (1 + limits.num_drafts))
        self._recent = RecentOutputs.empty(kept, rows, device)
        self._rule = NgramRule(LONGEST, SHORTEST)

    def add_rows(self, new_rows: Sequence[NewRow]) -> None:
        super().add_rows(new_rows)
        if not new_rows:
            return
        first = [(new.row, RecentOutputs.first(new.is_private)) for new in new_rows]
        rows_R, first_R = to_device(np.array(first, np.int64).T.copy(), self._device)
        self._recent.last_N.index_copy_(0, rows_R, first_R)

    def record_outputs(self, rows_R: torch.Tensor, ids_RJ: torch.Tensor, counts_R: torch.Tensor) -> None:
        record_outputs(ids_RJ, counts_R, rows_R, self._recent)

    def propose(
        self,
        rows_R: torch.Tensor,
        state: RowState,
        max_positions: int,
        allowed_R: torch.Tensor | None = None,
    ) -> None:
        if allowed_R is not None:
            rows_R = rows_R[allowed_R > 0]
        if not self._exact:
            propose_suffixes(rows_R, state, self._history, self._recent, self._rule, max_positions)
            return
        drafts_NK = state.drafts_NK.numpy()
        for row in rows_R.tolist():
            drafts = self._drafts(row, state)
            drafts_NK[row] = NO_DRAFT
            drafts_NK[row, : len(drafts)] = drafts

    def _drafts(self, row: int, state: RowState) -> list[int]:
        last = int(state.positions_N[row])
        most = min(int(state.limits_N[row]) - 2 - last, state.drafts_NK.shape[1])
        if last < 0 or most <= 0:
            return []
        text = row_text(row, last, int(state.ids_N[row]), self._history)
        length, places = own_places(text, most)
        if length < LONGEST and not self._recent.is_private(row):
            elsewhere, others = recent_places(text[-LONGEST:], self._recent, most)
            if elsewhere > length:
                length = elsewhere
                places = others
        return most_common(places, min(length, most))


def own_places(text: NDArray[np.int32], most: int) -> tuple[int, list[list[int]]]:
    """The longest earlier match of the end of `text`, and up to `most` tokens after each of its last places.

    The match is shorter than `SHORTEST` tokens: (0, []).
    """
    length, found = longest_match(text, LONGEST)
    if length < SHORTEST:
        return 0, []
    return length, [text[at + 1 : at + 1 + most].tolist() for at in found[-MOST_PLACES:].tolist()]


def recent_places(tail: NDArray[np.int32], recent: RecentOutputs, most: int) -> tuple[int, list[list[int]]]:
    """As `own_places`, of the longest match of `tail` in recent outputs on the host; -1 matches nothing."""
    ids = recent.ids_O.numpy()
    before = recent.before_O.numpy()
    after = recent.after_O.numpy()
    size = len(ids)
    total = int(recent.total_1)
    oldest = max(total - size, 0)
    found = np.flatnonzero(ids == tail[-1]) if tail[-1] >= 0 else np.empty(0, np.int64)
    found = found[after[found] >= 0]
    begins = found  # where each match begins, as far as it is compared
    length = min(len(found), 1)
    while length and length < len(tail) and tail[-1 - length] >= 0:
        numbers = before[begins]
        longer = (numbers >= oldest) & (ids[numbers % size] == tail[-1 - length])
        if not longer.any():
            break
        found = found[longer]
        begins = numbers[longer] % size
        length += 1
    if length < SHORTEST:
        return 0, []
    newest_last = found[np.argsort((found - total) % size)][-MOST_PLACES:]
    return length, [_following(int(place), ids, after, most) for place in newest_last]


def _following(place: int, ids: NDArray[np.int32], after: NDArray[np.int64], most: int) -> list[int]:
    """Up to `most` tokens after a place of the recent outputs."""
    tokens: list[int] = []
    while len(tokens) < most and (number := int(after[place])) >= 0:
        place = number % len(ids)
        tokens.append(int(ids[place]))
    return tokens


def most_common(places: list[list[int]], most: int) -> list[int]:
    """Up to `most` tokens: each is the commonest next one of the places that agree so far.

    The last place decides a tie.
    """
    drafts: list[int] = []
    while len(drafts) < most:
        number = len(drafts)
        places = [place for place in places if len(place) > number and place[number] >= 0]
        if not places:
            break
        counts = Counter(place[number] for place in reversed(places))
        best = counts.most_common(1)[0][0]
        drafts.append(best)
        places = [place for place in places if place[number] == best]
    return drafts
