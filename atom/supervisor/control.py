"""The supervisor's socket for the frontends: tells them which engines there are."""

from collections.abc import Callable

import zmq

from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.messages.resume import Claimed, GetStream, HandedStream, LeaveStream
from atom.shared.messages.supervisor import (
    Engines,
    GetEngines,
    RestartEngines,
    SetServerState,
    ToControl,
    WantTrial,
    control_identity,
)
from atom.shared.utils.logger import get_logger

Wanted = SetServerState | WantTrial | RestartEngines
"""What a frontend may want to change."""


def _no_stream(question: GetStream) -> HandedStream:
    return HandedStream(question.number)


def _not_left(claimed: Claimed) -> None:
    raise AssertionError("no other server replaces one of several nodes")


class Control:
    """The ROUTER at `endpoint`, which every frontend connects to."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        take: Callable[[GetStream], HandedStream] = _no_stream,
        leave: Callable[[Claimed], None] = _not_left,
    ):
        """`take` gives the streams of an earlier server, `leave` keeps those that go to a later one."""
        self._take = take
        self._leave = leave
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A restarted frontend has the identity of the one before, whose end may not have been noticed.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.bind(endpoint)
        self._frontends: set[int] = set()
        self._decoder: Decoder[ToControl] = Decoder(ToControl)

    def receive(self, engines: Engines) -> list[Wanted]:
        """Answer the frontends that have asked with `engines`; returns what frontends want to change."""
        wanted: list[Wanted] = []
        while self.socket.poll(0):
            _, *frames = self.socket.recv_multipart()
            try:
                request = self._decoder.decode(frames[0] if len(frames) == 1 else b"")
            except WireError as error:
                get_logger().error("a frontend's control connection sent an %s", error)
                continue
            if isinstance(request, GetStream):
                self._send(request.frontend, encode(self._take(request)))
                continue
            if isinstance(request, LeaveStream):
                self._leave(request.claimed)
                self._send(request.frontend, encode(HandedStream(request.number)))
                continue
            if not isinstance(request, GetEngines):
                wanted.append(request)
                continue
            wanted.append(WantTrial(request.frontend, 0))  # an earlier life may have had a turn
            self._frontends.add(request.frontend)
            self._send(request.frontend, encode(engines))
        return wanted

    def publish(self, engines: Engines) -> None:
        """Send `engines` to every frontend."""
        frame = encode(engines)
        for frontend in list(self._frontends):
            self._send(frontend, frame)

    def _send(self, frontend: int, frame: bytes) -> None:
        try:
            self.socket.send_multipart([control_identity(frontend), frame], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._frontends.discard(frontend)  # it has ended: its next life asks again

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
