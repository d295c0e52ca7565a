"""Log probabilities of tokens, released together with the tokens' text.

Each chunk of a stream has the text and the log probabilities of the same tokens.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from atom.shared.messages.engine import LogprobTable, PromptLogprobs

__all__ = [
    "LogprobColumns",
    "LogprobRow",
    "LogprobTrack",
    "PackedLogprobs",
    "PromptLogprobTrack",
    "TokenLogprob",
]

_RANK_BYTES = 4
# Tokens that wait for text; more are released without: a model may generate special tokens forever.
_MAX_WAITING = 256


class TokenLogprob(NamedTuple):
    """One token with its log probability and the top tokens at its position."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """(id, log probability), most likely first."""
    offset: int = 0
    """Where the token's text begins in the generated text, in characters."""


class LogprobColumns:
    """Reads rows of a LogprobTable."""

    def __init__(self, table: LogprobTable):
        self.width = table.width
        self.ids = array("i")
        self.values = array("f")
        self.ranks = array("i")
        self.ids.frombytes(table.ids)
        self.values.frombytes(table.values)
        self.ranks.frombytes(table.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def row(self, index: int, top: int) -> TokenLogprob:
        """Row `index` with `top` top tokens."""
        start = index * self.width
        stop = start + min(1 + top, self.width)
        ids = self.ids[start:stop]
        values = self.values[start:stop]
        others = list(zip(ids[1:], values[1:], strict=True))
        return TokenLogprob(ids[0], values[0], self.ranks[index], others)


LogprobRow = tuple[LogprobColumns, int]
"""The columns of a step and the row of one token in them."""


class PackedLogprobs(Sequence[TokenLogprob]):
    """The log probabilities of some tokens of one sequence, in 16 + 8 * top bytes a token."""

    __slots__ = ("_ids", "_offsets", "_ranks", "_values", "_width")

    def __init__(self, width: int):
        """`width` is 1 + top."""
        self._width = width
        self._ids = array("i")
        self._values = array("f")
        self._ranks = array("i")
        self._offsets = array("i")

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob]:
        if isinstance(index, slice):
            return [self._row(row) for row in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index])

    def __iter__(self) -> Iterator[TokenLogprob]:
        return map(self._row, range(len(self)))

    def add(self, columns: LogprobColumns, row: int, offset: int) -> None:
        """Append a token whose text begins at `offset`.

        Raises IndexError for a row that is not there, ValueError for a table with fewer top tokens.
        """
        if columns.width < self._width:
            raise ValueError(f"{columns.width} log probabilities instead of {self._width}")
        rank = columns.ranks[row]
        start = row * columns.width
        stop = start + self._width
        self._ids += columns.ids[start:stop]
        self._values += columns.values[start:stop]
        self._ranks.append(rank)
        self._offsets.append(offset)

    def extend(self, later: "PackedLogprobs") -> None:
        """Append the following tokens."""
        self._ids += later._ids
        self._values += later._values
        self._ranks += later._ranks
        self._offsets += later._offsets

    def take(self, count: int) -> "PackedLogprobs":
        """Remove and return the first `count` tokens."""
        taken = PackedLogprobs(self._width)
        entries = count * self._width
        taken._ids = self._ids[:entries]
        self._ids = self._ids[entries:]
        taken._values = self._values[:entries]
        self._values = self._values[entries:]
        taken._ranks = self._ranks[:count]
        self._ranks = self._ranks[count:]
        taken._offsets = self._offsets[:count]
        self._offsets = self._offsets[count:]
        return taken

    def _row(self, row: int) -> TokenLogprob:
        start = row * self._width
        stop = (row + 1) * self._width
        ids = self._ids[start:stop]
        values = self._values[start:stop]
        top = list(zip(ids[1:], values[1:], strict=True))
        return TokenLogprob(ids[0], values[0], self._ranks[row], top, self._offsets[row])


class LogprobTrack:
    """Holds the log probabilities of one sequence until their tokens' text is released."""

    __slots__ = ("_decoded", "_ends", "_released", "_top", "_waiting")

    def __init__(self, top: int) -> None:
        self._top = top
        self._decoded = 0
        self._released = 0
        self._ends: deque[int] = deque()
        self._waiting: PackedLogprobs | None = None

    def add(self, entry: LogprobRow, characters: int) -> None:
        """Append the next token, whose id completed this many characters.

        A token without text (part of a character, or special) is released with the next one.
        """
        columns, row = entry
        start = self._decoded
        self._decoded += characters
        if self._waiting is None:
            self._waiting = PackedLogprobs(min(1 + self._top, columns.width))
        self._waiting.add(columns, row, start)
        self._ends.append(max(self._decoded, start + 1))

    def release(self, characters: int) -> PackedLogprobs | tuple[()]:
        """The tokens of the next `characters` characters of released text."""
        self._released += characters
        ends = self._ends
        count = 0
        while ends and (ends[0] <= self._released or len(ends) > _MAX_WAITING):
            ends.popleft()
            count += 1
        if not ends:
            return self.finish()
        return self._waiting.take(count) if count and self._waiting is not None else ()

    def finish(self) -> PackedLogprobs | tuple[()]:
        """All remaining tokens."""
        rest = self._waiting
        self._waiting = None
        self._ends.clear()
        return () if rest is None else rest


class PromptLogprobTrack:
    """The log probabilities of one prompt, from its second token on.

    They come in chunks, which may repeat. Rows are read only when iterated over, which takes
    microseconds a token: iterate outside of the event loop.
    """

    __slots__ = ("_chunks", "_top")

    def __init__(self, top: int):
        self._top = top
        self._chunks: list[PromptLogprobs] = []

    def add(self, chunk: PromptLogprobs) -> None:
        """Add one chunk; it replaces earlier entries of the same positions."""
        self._chunks.append(chunk)

    def __len__(self) -> int:
        """How many tokens have an entry, once all chunks are added."""
        if not self._chunks:
            return 0
        ends = [chunk.start + len(chunk.table.ranks) // _RANK_BYTES for chunk in self._chunks]
        return max(ends) - min(chunk.start for chunk in self._chunks)

    @property
    def num_entries(self) -> int:
        """How many log probabilities there are, top tokens included."""
        return len(self) * (1 + self._top)

    def __iter__(self) -> Iterator[TokenLogprob]:
        entries: dict[int, TokenLogprob] = {}
        for chunk in self._chunks:
            columns = LogprobColumns(chunk.table)
            for index in range(len(columns)):
                entries[chunk.start + index] = columns.row(index, self._top)
        return iter([entries[position] for position in sorted(entries)])
