"""The sampled tokens of a step, and selections of them: without ended requests, or for one frontend."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from atom.shared.messages.engine import LogprobTable, SampledLogprobs
from engine_core.requests.request import Request

_ITEM = 4  # bytes of an int32, and of a float32


@dataclass(slots=True, frozen=True)
class SampledTokens:
    """Columns in batch order."""

    requests: list[Request]
    token_ids: "array[int]"
    """One for each of `requests`, or `counts[i]` for requests[i]."""
    logprobs: SampledLogprobs | None
    """For the requests that want them; `indices` point into `token_ids`. Usually None."""
    counts: Sequence[int] = ()
    """After a step with drafts; at least 1 each."""
    num_proposed: Sequence[int] = ()
    """After a step with drafts: how many it verified for each of `requests`."""

    def select(self, kept: list[int]) -> "SampledTokens":
        """Only the tokens of the requests at these indices."""
        if not self.counts:
            return SampledTokens([self.requests[index] for index in kept], *self._tokens(kept))
        counts = [0] * len(self.requests)
        for index in kept:
            counts[index] = self.counts[index]
        return self.shorten(counts)

    def shorten(self, counts: list[int]) -> "SampledTokens":
        """Only the first `counts[i]` tokens of each request, and the requests for which these are not 0."""
        kept = [index for index, count in enumerate(counts) if count]
        if not self.counts:
            return self.select(kept)
        starts = [0, *accumulate(self.counts)]
        places = [place for index in kept for place in range(starts[index], starts[index] + counts[index])]
        return SampledTokens(
            [self.requests[index] for index in kept],
            *self._tokens(places),
            [counts[index] for index in kept],
            [self.num_proposed[index] for index in kept],
        )

    def _tokens(self, places: list[int]) -> "tuple[array[int], SampledLogprobs | None]":
        logprobs = self.logprobs and _select(self.logprobs, places)
        return array("i", [self.token_ids[place] for place in places]), logprobs


def fits(logprobs: SampledLogprobs, num_sampled: int) -> bool:
    """Whether the table has one row for each index, and the indices are of sampled tokens."""
    return is_consistent(logprobs.table, len(logprobs.indices)) and all(
        0 <= index < num_sampled for index in logprobs.indices
    )


def is_consistent(table: LogprobTable, num_rows: int | None = None) -> bool:
    """Whether all columns have the same number of rows: `num_rows`, if given."""
    rows = len(table.ranks) // _ITEM if num_rows is None else num_rows
    cells = rows * table.width * _ITEM
    return (len(table.ids), len(table.values), len(table.ranks)) == (cells, cells, rows * _ITEM)


def _select(logprobs: SampledLogprobs, kept: list[int]) -> SampledLogprobs | None:
    """The rows of the kept tokens, with their new indices; None where no row is left."""
    new_index = {index: new for new, index in enumerate(kept)}
    rows = [row for row, index in enumerate(logprobs.indices) if index in new_index]
    if not rows:
        return None
    table = logprobs.table
    cells = table.width * _ITEM
    return SampledLogprobs(
        [new_index[logprobs.indices[row]] for row in rows],
        LogprobTable(
            table.width,
            _rows(table.ids, rows, cells),
            _rows(table.values, rows, cells),
            _rows(table.ranks, rows, _ITEM),
        ),
    )


def _rows(column: bytes, rows: list[int], size: int) -> bytes:
    return b"".join([column[row * size : (row + 1) * size] for row in rows])
