"""The connection to one engine core: its socket, and the state that the core last reported.

It handles no requests. `EngineClient` reads its socket with a `FrameReader`, `CoreLinks` with a poller. No
state is final: after `connect` the link is ready again with the next CoreReady.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

import zmq

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import CoreDead, CoreReady, CoreStalled, FromCore, Hello, ToCore
from atom.shared.utils.endpoint import connect
from frontend.errors import UnavailableError

__all__ = ["EngineLink", "LinkState"]


class LinkState(Enum):
    """The state that the core last reported."""

    CONNECTING = "connecting"
    """The core has sent nothing on this connection yet: it does not read before it is ready."""
    READY = "ready"
    STALLED = "stalled"
    """One of its workers does not respond."""
    DEAD = "dead"
    """The core has ended, or the connection has."""


class EngineLink:
    """One DEALER socket to the core at `endpoint`; `index` is this frontend's number.

    Receive with `decode(frame)`.
    """

    def __init__(self, context: "zmq.Context[Any]", endpoint: str, index: int):
        self.state = LinkState.CONNECTING
        self.limits: CoreReady | None = None
        """The core's limits; None until it was ready for the first time."""
        self.silence = ""
        """Set by the owner while the core does not respond: one line that says so."""
        self.after_send: Callable[[], None] | None = None
        """Set by the reader of the socket: sending may take note of frames that have arrived."""
        self._reason = ""
        self._context = context
        self._endpoint = endpoint
        self._index = index
        self._decoder = Decoder[FromCore](FromCore)

    def connect(self) -> None:
        """Open a socket and send Hello; the core aborts the requests of an earlier connection."""
        self.socket: Any = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # No message may be dropped; the number in flight is bounded by the running requests.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        connect(self.socket, self._endpoint)
        self.state = LinkState.CONNECTING
        self.silence = ""
        self.send(Hello(self._index))

    def close(self) -> None:
        """Close the socket and drop queued messages."""
        self.socket.close(0)

    def mark_dead(self, reason: str) -> None:
        """Note the end of the connection; `check_ready` reports `reason` until the core is ready again."""
        self.state = LinkState.DEAD
        self._reason = reason

    @property
    def is_ready(self) -> bool:
        """Whether the core can generate."""
        return self.state is LinkState.READY and not self.silence

    @property
    def problem(self) -> str:
        """Why the core cannot generate, as far as known; empty while it can."""
        return "" if self.is_ready else self.silence or self._reason

    def check_ready(self) -> None:
        """Raises UnavailableError while the core cannot generate."""
        if self.is_ready:
            return
        if self.state is LinkState.STALLED or self.silence:
            raise UnavailableError(f"the engine does not respond: {self.silence or self._reason}")
        if self._reason:  # dead, or connecting again
            raise UnavailableError(f"the engine is gone: {self._reason}", code="engine_dead")
        raise UnavailableError("the engine is still starting; try again shortly")

    def send(self, message: ToCore) -> None:
        """Queue a message; never waits, since the queue is unbounded."""
        self.socket.send(encode(message), zmq.DONTWAIT)
        if self.after_send is not None:
            self.after_send()

    def decode(self, frame: bytes) -> FromCore:
        """The message in a received frame; updates the state. Raises WireError."""
        message = self._decoder.decode(frame)
        match message:
            case CoreReady():
                self.state = LinkState.READY
                self.limits = message
                self._reason = ""
            case CoreStalled(reason):
                self.state = LinkState.STALLED
                self._reason = reason
            case CoreDead(reason):
                self.mark_dead(reason)
        return message
