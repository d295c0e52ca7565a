"""Messages between a server and the one that replaces it: one Unix socket, frames with their length first.

new    TakeOver
old    ListeningSockets, with the descriptors of the sockets, or Declined
new    Starting, Starting, …  every few seconds; without, the old one sends Declined and goes on
       Serving                its engines and frontends are ready, and accept connections
old    Leaving                it accepts none any more; later, what it has not finished of streams that
       Claimed, Claimed, ...  can be resumed
       Left

A new server that is stopped before that sends Stopping. If it ends without, the old one accepts connections
again.
"""

import msgspec

from atom.shared.messages.resume import Claimed

PROTOCOL = 2
"""Version of these messages and of all that `Claimed` has: both servers must have the same."""


class TakeOver(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """The first message of a new server."""

    protocol: int


class ListeningSockets(msgspec.Struct, tag=2, array_like=True, frozen=True, gc=False):
    """The sockets of the running server; their descriptors come with this message, in this order."""

    host: str
    """As its --host."""
    port: int
    indexes: list[int]
    """Numbers of the HTTP sockets."""
    api_server_count: int
    admin: str
    """Address of the administration, whose socket is the last one; empty without one."""
    next_life: int
    """`FrontendLaunch.first_life` for the new server."""


class Declined(msgspec.Struct, tag=3, array_like=True, frozen=True, gc=False):
    """Nothing is handed over."""

    reason: str


class Serving(msgspec.Struct, tag=4, array_like=True, frozen=True, gc=False):
    """The new server accepts connections."""

    model: dict[str, str]
    """What its model is, for comparison: names and values."""
    has_admin: bool
    """Whether it has taken the socket of the administration."""


class Leaving(msgspec.Struct, tag=5, array_like=True, frozen=True, gc=False):
    """The old server accepts no further connections, and finishes what it has."""

    difference: str
    """Why its streams cannot go on at the new one; empty if they can."""


class Left(msgspec.Struct, tag=6, array_like=True, frozen=True, gc=False):
    """The last message: all streams have been sent."""


class Stopping(msgspec.Struct, tag=7, array_like=True, frozen=True, gc=False):
    """The new server is stopped on purpose."""


class Starting(msgspec.Struct, tag=8, array_like=True, frozen=True, gc=False):
    """The new server still starts: it has not been stopped, and does not hang."""


ToOld = TakeOver | Starting | Serving | Stopping
ToNew = ListeningSockets | Declined | Leaving | Claimed | Left
