"""Log probabilities of tokens, released together with the tokens' text.

Each chunk of a stream has the text and the log probabilities of the same tokens.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from atom.messages.engine import LogprobTable, PromptLogprobs

__all__ = ["LogprobColumns", "LogprobTrack", "PromptLogprobTrack", "TokenLogprob"]

_RANK_BYTES = 4


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
        self._width = table.width
        self._ids, self._values, self._ranks = array("i"), array("f"), array("i")
        self._ids.frombytes(table.ids)
        self._values.frombytes(table.values)
        self._ranks.frombytes(table.ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def row(self, index: int, top: int) -> TokenLogprob:
        """Row `index` with `top` top tokens."""
        start = index * self._width
        stop = start + min(1 + top, self._width)
        ids, values = self._ids[start:stop], self._values[start:stop]
        others = list(zip(ids[1:], values[1:], strict=True))
        return TokenLogprob(ids[0], values[0], self._ranks[index], others)


class LogprobTrack:
    """Holds the log probabilities of one sequence until their tokens' text is released."""

    __slots__ = ("_decoded", "_released", "_waiting")

    def __init__(self) -> None:
        self._decoded = 0
        self._released = 0
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()

    def add(self, entry: TokenLogprob, characters: int) -> None:
        """Append the next token, whose id completed this many characters.

        A token without text (part of a character, or special) is released with the next one.
        """
        start = self._decoded
        self._decoded += characters
        self._waiting.append((max(self._decoded, start + 1), entry._replace(offset=start)))

    def release(self, characters: int) -> list[TokenLogprob]:
        """The tokens of the next `characters` characters of released text."""
        self._released += characters
        out = []
        while self._waiting and self._waiting[0][0] <= self._released:
            out.append(self._waiting.popleft()[1])
        return out

    def finish(self) -> list[TokenLogprob]:
        """All remaining tokens."""
        out = [entry for _, entry in self._waiting]
        self._waiting.clear()
        return out


class PromptLogprobTrack:
    """The log probabilities of one prompt, from its second token on.

    They come in chunks, and a chunk may come again. Rows are read only when iterated over, which
    takes microseconds a token: do that outside of the event loop.
    """

    __slots__ = ("_chunks", "_top")

    def __init__(self, top: int):
        self._top = top
        self._chunks: list[PromptLogprobs] = []

    def add(self, chunk: PromptLogprobs) -> None:
        """Add one chunk; it replaces earlier entries of the same positions."""
        self._chunks.append(chunk)

    def __len__(self) -> int:
        """How many tokens have an entry, once all chunks are here."""
        if not self._chunks:
            return 0
        ends = [chunk.start + len(chunk.table.ranks) // _RANK_BYTES for chunk in self._chunks]
        return max(ends) - min(chunk.start for chunk in self._chunks)

    def __iter__(self) -> Iterator[TokenLogprob]:
        entries: dict[int, TokenLogprob] = {}
        for chunk in self._chunks:
            columns = LogprobColumns(chunk.table)
            for index in range(len(columns)):
                entries[chunk.start + index] = columns.row(index, self._top)
        return iter([entries[position] for position in sorted(entries)])
