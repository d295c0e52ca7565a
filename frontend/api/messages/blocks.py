"""Orders the contents of a reply into blocks that follow one another: reasoning, text, tool calls."""

from collections.abc import Iterator
from typing import NamedTuple

from frontend.text.output_processor import SequenceOutput
from frontend.text.reply_formats.base import CallDelta

__all__ = ["CALL", "REASONING", "TEXT", "Piece", "pieces"]

REASONING = "reasoning"
TEXT = "text"
CALL = "call"


class Piece(NamedTuple):
    """More of the block that is open if it has the same kind and begins no call; else a new block."""

    kind: str
    text: str
    """For a call, more of its arguments."""
    call: CallDelta | None = None
    """Set where a call begins: its id and name."""


def pieces(update: SequenceOutput) -> Iterator[Piece]:
    """What an update adds, in the order in which models write it."""
    for call in update.calls:
        if not call.id:  # of the call that is open
            yield Piece(CALL, call.arguments)
    if update.reasoning:
        yield Piece(REASONING, update.reasoning)
    if update.text:
        yield Piece(TEXT, update.text)
    for call in update.calls:
        if call.id:
            yield Piece(CALL, call.arguments, call)
