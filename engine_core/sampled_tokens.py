"""The sampled tokens of a step, and parts of them: without ended requests, or for one frontend."""

from array import array
from dataclasses import dataclass

from atom.messages.engine import LogprobTable, SampledLogprobs
from engine_core.request import Request

_ITEM = 4  # bytes of an int32, and of a float32


@dataclass(slots=True, frozen=True)
class SampledTokens:
    """Columns in batch order."""

    requests: list[Request]
    token_ids: "array[int]"
    """One for each of `requests`."""
    logprobs: SampledLogprobs | None
    """For the requests that want them; `indices` point into `token_ids`. Usually None."""

    def select(self, kept: list[int]) -> "SampledTokens":
        """Only the tokens at these places."""
        logprobs = self.logprobs and _select(self.logprobs, kept)
        ids = array("i", [self.token_ids[place] for place in kept])
        return SampledTokens([self.requests[place] for place in kept], ids, logprobs)


def fits(logprobs: SampledLogprobs, num_sampled: int) -> bool:
    """Whether the table has one row for each index, and the indices are of sampled tokens."""
    return is_whole(logprobs.table, len(logprobs.indices)) and all(
        0 <= index < num_sampled for index in logprobs.indices
    )


def is_whole(table: LogprobTable, num_rows: int | None = None) -> bool:
    """Whether the columns have one length, of `num_rows` if given."""
    rows = len(table.ranks) // _ITEM if num_rows is None else num_rows
    cells = rows * table.width * _ITEM
    return (len(table.ids), len(table.values), len(table.ranks)) == (cells, cells, rows * _ITEM)


def _select(logprobs: SampledLogprobs, kept: list[int]) -> SampledLogprobs | None:
    """The rows of the kept tokens, with their new indices; None where no row is left."""
    index_of = {place: index for index, place in enumerate(kept)}
    rows = [row for row, place in enumerate(logprobs.indices) if place in index_of]
    if not rows:
        return None
    table = logprobs.table
    cells = table.width * _ITEM
    return SampledLogprobs(
        [index_of[logprobs.indices[row]] for row in rows],
        LogprobTable(
            table.width,
            _rows(table.ids, rows, cells),
            _rows(table.values, rows, cells),
            _rows(table.ranks, rows, _ITEM),
        ),
    )


def _rows(column: bytes, rows: list[int], size: int) -> bytes:
    return b"".join([column[row * size : (row + 1) * size] for row in rows])
