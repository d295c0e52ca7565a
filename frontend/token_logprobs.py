"""Log probabilities: out of the wire's columns, and held back as long as the text is.

What is shown of a token comes no earlier than its text, so that every piece of a stream has
the text and the log probabilities of the same tokens.
"""

from array import array
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from atom.messages.engine import LogprobTable, PromptLogprobs

__all__ = ["LogprobColumns", "LogprobTrack", "PromptRecord", "TokenLogprob"]


class TokenLogprob(NamedTuple):
    """One token, and what was likely in its place."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """Ids with their log probabilities, the most likely first."""
    offset: int = 0
    """Characters of the generated text before this token's."""


class LogprobColumns:
    """Reads rows out of a table as it came over the wire."""

    def __init__(self, table: LogprobTable):
        self._width = table.width
        self._ids, self._values, self._ranks = array("i"), array("f"), array("i")
        self._ids.frombytes(table.ids)
        self._values.frombytes(table.values)
        self._ranks.frombytes(table.ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def row(self, index: int, top: int) -> TokenLogprob:
        """Token `index` with the `top` most likely ones."""
        start = index * self._width
        stop = start + min(1 + top, self._width)
        ids, values = self._ids[start:stop], self._values[start:stop]
        others = list(zip(ids[1:], values[1:], strict=True))
        return TokenLogprob(ids[0], values[0], self._ranks[index], others)


class LogprobTrack:
    """The generated tokens of one choice whose text was not shown yet."""

    __slots__ = ("_decoded", "_shown", "_waiting")

    def __init__(self) -> None:
        self._decoded = 0
        self._shown = 0
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()

    def place(self, entry: TokenLogprob, characters: int) -> None:
        """The next token of the text, which completed so many characters.

        One that completed none (it is part of a character, or special) waits for the next one.
        """
        start = self._decoded
        self._decoded += characters
        self._waiting.append((max(self._decoded, start + 1), entry._replace(offset=start)))

    def release(self, characters: int) -> list[TokenLogprob]:
        """What belongs to this many characters more of shown text."""
        self._shown += characters
        out = []
        while self._waiting and self._waiting[0][0] <= self._shown:
            out.append(self._waiting.popleft()[1])
        return out

    def finish(self) -> list[TokenLogprob]:
        """All that is left."""
        out = [entry for _, entry in self._waiting]
        self._waiting.clear()
        return out


@dataclass(slots=True)
class PromptRecord:
    """The log probabilities of one prompt's tokens, which come in pieces, perhaps repeatedly."""

    top: int
    entries: dict[int, TokenLogprob]
    """By position; a prompt's first token has none."""

    def take(self, piece: PromptLogprobs) -> None:
        """Add one piece, in the place of whatever was there."""
        columns = LogprobColumns(piece.table)
        for index in range(len(columns)):
            self.entries[piece.start + index] = columns.row(index, self.top)

    def finish(self) -> list[TokenLogprob]:
        """All of them in order, once the prompt is computed."""
        return [self.entries[position] for position in sorted(self.entries)]
