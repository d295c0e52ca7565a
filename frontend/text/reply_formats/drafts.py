"""Tool calls in the reasoning of a reply.

    <think> I could write <tool_call> … </tool_call>, but first … </think>   a thought
    <think> I look both up. <tool_call> … </tool_call>                       a call without a closing marker

Both begin alike. So what follows the beginning of a call is held: as soon as text follows the call, or a
closing marker, it is reasoning; if the reply ends with the call, it is one.
"""

from typing import Protocol

from frontend.text.reply_formats.base import ReplyDelta

__all__ = ["Drafts"]


class CallParser(Protocol):
    """Parses the reasoning as if it were content."""

    @property
    def num_parsed(self) -> int:
        """Characters so far, but for those that may begin a marker."""

    @property
    def calls_at(self) -> int | None:
        """Where the calls begin with which the text ends so far; None: it ends with other text."""

    @property
    def ends_with_call(self) -> bool:
        """Whether the text ends with a whole call."""

    def feed(self, token_id: int, text: str) -> ReplyDelta:
        """Parse more text."""

    def finish(self, text: str, complete: bool) -> ReplyDelta:
        """Parse the last text."""


class Drafts:
    """Separates the reasoning of one sequence from the calls that may end it."""

    def __init__(self, parser: CallParser):
        self._parser = parser
        self._held: list[str] = []
        """What was read and not returned."""
        self._num_returned = 0

    def read(self, text: str) -> str:
        """Read more of the reasoning. Returns what is known to be reasoning now."""
        if not text:
            return ""
        self._held.append(text)
        self._parser.feed(0, text)
        at = self._parser.calls_at
        count = (self._parser.num_parsed if at is None else at) - self._num_returned
        if not count:
            return ""
        held = self.drop()
        self._held.append(held[count:])
        self._num_returned += count
        return held[:count]

    def drop(self) -> str:
        """All that is held: the reasoning goes on, or has been closed."""
        held = "".join(self._held)
        self._held = []
        return held

    def end(self, complete: bool) -> tuple[str, str]:
        """(the rest of the reasoning, the text of the calls that end the reply).

        `complete` tells whether the model ended the reply itself: how a reply that was
        cut off would have gone on is not known.
        """
        self._parser.finish("", complete)
        held = self.drop()
        return ("", held) if complete and self._parser.ends_with_call else (held, "")
