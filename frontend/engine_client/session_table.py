"""Which rank has run the last request of each session, and how long its prompt was.

A prompt's prefix finds its rank as well, until the router has forgotten it, or the client has changed the
beginning, such as an agent that shortens its context. The name of the session still says where most are.
"""

from collections import OrderedDict
from typing import NamedTuple

__all__ = ["SessionTable"]

_MOST_SESSIONS = 1 << 16


class _Last(NamedTuple):
    rank: int
    life: int
    tokens: int


class SessionTable:
    """The sessions seen last, by hash; the oldest are forgotten."""

    def __init__(self, num_ranks: int):
        self._last: OrderedDict[int, _Last] = OrderedDict()
        self._lives = [0] * num_ranks

    def __len__(self) -> int:
        return len(self._last)

    def find(self, session: int) -> tuple[int, int] | None:
        """(rank, tokens of the last prompt) of a session; None for a new one, or if its engine has ended."""
        last = self._last.get(session)
        if last is None or last.life != self._lives[last.rank]:
            return None
        return last.rank, last.tokens

    def put(self, session: int, rank: int, tokens: int) -> None:
        """Note that a request of the session goes to a rank, with a prompt of `tokens` tokens."""
        self._last[session] = _Last(rank, self._lives[rank], tokens)
        self._last.move_to_end(session)
        if len(self._last) > _MOST_SESSIONS:
            self._last.popitem(last=False)

    def forget(self, rank: int) -> None:
        """Forget the sessions of a rank whose engine has ended: its next life has nothing of them."""
        self._lives[rank] += 1
