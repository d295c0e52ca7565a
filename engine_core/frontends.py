"""The frontends of an engine core: those that are connected, and those that did not read their tokens."""

from collections.abc import Iterator

import zmq

from atom.shared.messages.admin import Answer
from atom.shared.messages.engine import (
    CoreDead,
    CoreReady,
    CoreStalled,
    CoreStats,
    Hello,
    ToCore,
    TokenDeltas,
)
from atom.shared.messages.grammar import GetGrammar
from atom.shared.messages.profile import ProfileResult
from atom.shared.messages.resume import Claimed
from atom.shared.utils.logger import get_logger
from engine_core.core import EngineCore
from engine_core.links import FrontendLink
from engine_core.requests.resumable import NO_FRONTEND

_HELLO_MS = 500  # a connecting frontend retries every 100 ms


class Frontends:
    """Registry of the frontends' connections. An identity, in bytes, is that of a connection."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str):
        self._link = FrontendLink(context, endpoint)
        self.socket = self._link.socket
        """Readable when a frontend has sent a message."""
        self._connected: dict[bytes, int] = {}  # number of each connected frontend, by identity
        # Frontends that did not read their tokens, until their next Hello.
        self._dropped: dict[bytes, int] = {}

    @property
    def connected(self) -> list[bytes]:
        """Identities of all connected frontends."""
        return list(self._connected)

    def receive(self) -> Iterator[tuple[bytes, ToCore]]:
        """Received messages with their senders, up to a bound.

        Messages of a frontend that has lost tokens are answered by CoreDead, until it says Hello again.
        """
        for identity, message in self._link.receive():
            if identity in self._dropped and not isinstance(message, Hello):
                self._link.send(identity, CoreDead("this frontend did not read its tokens in time"))
            else:
                yield identity, message

    def register(self, core: EngineCore, identity: bytes, number: int) -> None:
        """Add a frontend. After a reconnect its identity is new: requests of the old one end."""
        for other, other_number in list(self._connected.items()):
            if other_number == number and other != identity:
                self._remove(core, other)
        self._connected[identity] = number
        self._dropped.pop(identity, None)
        self._dropped = {other: dropped for other, dropped in self._dropped.items() if dropped != number}

    def send(
        self,
        core: EngineCore,
        identity: bytes,
        message: TokenDeltas
        | CoreReady
        | CoreStalled
        | CoreStats
        | ProfileResult
        | Answer
        | GetGrammar
        | Claimed,
    ) -> None:
        """Send, or remove a frontend that cannot be reached: its streams must not miss tokens."""
        if identity == NO_FRONTEND:
            return
        if not self._link.send(identity, message):
            number = self._connected.get(identity, self._dropped.get(identity, -1))
            self._remove(core, identity)
            self._dropped[identity] = number
            get_logger().warning(
                "frontend %d is gone or does not read its tokens: its plain requests end",
                number,
            )

    def report_death(self, reason: str) -> None:
        """Send the cause to all frontends, including new ones whose Hello is not processed yet."""
        if not self._connected:
            self.socket.poll(_HELLO_MS)
        for identity, message in self._link.receive():
            if isinstance(message, Hello):
                self._connected[identity] = message.frontend
        for identity in self._connected:
            self._link.send(identity, CoreDead(reason))

    def _remove(self, core: EngineCore, identity: bytes) -> None:
        core.abort_frontend(identity)
        self._connected.pop(identity, None)
