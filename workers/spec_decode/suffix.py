"""Suffix speculation: drafts follow the longest match of a row's last tokens.

    row's text        … a b c d e … x y a b c ▸ d e      looked up in the text itself
    recent outputs    … y a b c f g …                    of all requests, by an index of pairs of tokens

The longer match counts, of up to 32 tokens; the row's own where both are as long. Where several places match
equally well, each draft is the token that most of them have. A match of n tokens gives at most n drafts:
a longer one is more likely to go on.

All of it is on the host, which on a CPU knows the last tokens when it proposes. On a GPU it does not: a step
is launched before the tokens of the one before are known.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from atom.shared.messages.worker import NewRow
from atom_ops import NO_DRAFT, RowState
from workers.batch.block_table import BatchLimits
from workers.batch.group_rows import GroupRows, Rows
from workers.spec_decode.text_history import TextGroup, TextProposer, longest_match, row_text

LONGEST = 32
"""Tokens of the longest match."""
SHORTEST = 2
MOST_PLACES = 16
"""Last places of a match that are compared."""
KEPT_TOKENS = 1 << 16
"""Tokens of recent outputs, which take about 20 MB with their index."""
SEGMENT_TOKENS = 2048
"""Outputs are forgotten in parts of so many tokens."""
_PAIR = 1 << 32


class RecentOutputs:
    """The last outputs of all requests, at most `kept` tokens, and the places of each pair of tokens."""

    def __init__(self, kept: int = KEPT_TOKENS):
        self._kept = kept
        self._size = 0
        self._texts: dict[int, list[int]] = {}
        """Segments of outputs by number, the oldest first."""
        self._places: dict[int, list[tuple[int, int]]] = {}
        """(segment, index of the second token) of each pair, the last ones."""
        self._next = 0

    def __len__(self) -> int:
        return self._size

    def open(self) -> int:
        """The number of a new, empty segment."""
        self._next += 1
        self._texts[self._next] = []
        return self._next

    def close(self, number: int) -> None:
        """Close a segment: no more tokens are added to it."""
        if not self._texts.get(number, True):
            del self._texts[number]

    def add(self, number: int, ids: Sequence[int]) -> int:
        """Append `ids` to a segment; returns the segment to which the next ones belong."""
        text = self._texts.get(number)
        if text is None or len(text) >= SEGMENT_TOKENS:
            context = text[-LONGEST:] if text else []
            number = self.open()
            return self.add(number, [*context, *ids])
        for token in ids:
            if text:
                places = self._places.setdefault(text[-1] * _PAIR + token, [])
                places.append((number, len(text)))
                if len(places) > MOST_PLACES:
                    del places[0]
            text.append(token)
        self._size += len(ids)
        while self._size > self._kept:
            self._forget(next(iter(self._texts)))
        return number

    def longest(self, tail: Sequence[int], most: int) -> tuple[int, list[list[int]]]:
        """The longest match of the end of `tail`, and up to `most` tokens after each of its places."""
        if len(tail) < SHORTEST:
            return 0, []
        best = 0
        found: list[list[int]] = []
        for number, end in self._places.get(tail[-2] * _PAIR + tail[-1], ()):
            text = self._texts[number]
            after = text[end + 1 : end + 1 + most]
            if not after:
                continue
            length = SHORTEST
            while length < len(tail) and length <= end and text[end - length] == tail[-1 - length]:
                length += 1
            if length > best:
                best = length
                found = []
            if length == best:
                found.append(after)
        return best, found

    def _forget(self, number: int) -> None:
        text = self._texts.pop(number)
        self._size -= len(text)
        for index in range(1, len(text)):
            pair = text[index - 1] * _PAIR + text[index]
            kept = [place for place in self._places.get(pair, ()) if place[0] != number]
            if kept:
                self._places[pair] = kept
            else:
                self._places.pop(pair, None)


class SuffixProposer(TextProposer):
    """Looks up the last tokens of each row. The rows' tokens are on the host."""

    records_outputs = True

    def __init__(
        self,
        group: TextGroup,
        table: GroupRows,
        num_blocks: int,
        limits: BatchLimits,
        device: torch.device,
    ):
        """`num_blocks` and `table` are of the KV group `group`. Raises ValueError for a GPU."""
        if device.type != "cpu":
            raise ValueError("--method suffix looks up texts on the host, which has them on a CPU alone")
        super().__init__(group, table, num_blocks, limits, device)
        self._recent = RecentOutputs()
        self._segments: dict[int, int] = {}
        """The segment of each row's output; rows with a private request have none."""

    def add_rows(self, new_rows: Sequence[NewRow]) -> None:
        super().add_rows(new_rows)
        for new in new_rows:
            if (earlier := self._segments.pop(new.row, None)) is not None:
                self._recent.close(earlier)
            if not new.is_private:
                self._segments[new.row] = self._recent.open()

    def record_outputs(self, rows: Rows, ids_RJ: torch.Tensor, counts_R: torch.Tensor) -> None:
        each = zip(rows.tolist(), ids_RJ.tolist(), counts_R.tolist(), strict=True)
        for row, ids, count in each:
            if (segment := self._segments.get(row)) is not None and count:
                self._segments[row] = self._recent.add(segment, ids[:count])

    def propose(
        self,
        rows_R: torch.Tensor,
        state: RowState,
        max_positions: int,
        allowed_R: torch.Tensor | None = None,
    ) -> None:
        if allowed_R is not None:
            rows_R = rows_R[allowed_R > 0]
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
        if length < LONGEST and row in self._segments:
            elsewhere, others = self._recent.longest(text[-LONGEST:].tolist(), most)
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
