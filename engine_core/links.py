"""The sockets of an engine core. Nothing here blocks; the owner polls."""

from collections.abc import Iterator

import msgspec
import zmq

from atom.messages.codec import Decoder, WireError, encode
from atom.messages.engine import ToCore
from atom.messages.worker import FromWorker
from atom.utils.logger import get_logger

# Steps that may wait for a frontend that does not read: minutes of decoding, some ten megabytes.
_FRONTEND_QUEUE = 10_000
_MOST_AT_ONCE = 1024
"""Messages taken in between two steps, so that a flood of requests does not hold up the running ones."""


class LinkError(RuntimeError):
    """A peer that the engine cannot do without is gone or talks nonsense."""


class FrontendLink:
    """All frontends. A frontend is addressed by the identity that its connection has."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str):
        self.socket = _bind(context, endpoint)
        self._decoder: Decoder[ToCore] = Decoder(ToCore)
        self._garbled: set[bytes] = set()  # who was complained about; a flood must not fill the log

    def receive(self) -> Iterator[tuple[bytes, ToCore]]:
        """What has come, up to a bound, with its sender.

        An undecodable frame is dropped; the first one of a frontend is logged.
        """
        for identity, frame in _pending(self.socket):
            try:
                yield identity, self._decoder.decode(frame)
            except WireError as error:
                if identity not in self._garbled:
                    self._garbled.add(identity)
                    get_logger().error("a frontend sent an %s; more of its kind are dropped silently", error)

    def send(self, identity: bytes, message: msgspec.Struct) -> bool:
        """False when the frontend is gone or has not read for too long; nothing was sent then."""
        try:
            self.socket.send_multipart([identity, encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


class WorkerLink:
    """All worker ranks, addressed by rank."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, num_ranks: int):
        self.socket = _bind(context, endpoint)
        self._identities = [rank.to_bytes(4, "little") for rank in range(num_ranks)]
        self._decoder: Decoder[FromWorker] = Decoder(FromWorker)

    def receive(self) -> Iterator[FromWorker]:
        """What has come, up to a bound. Raises LinkError for an undecodable frame."""
        for identity, frame in _pending(self.socket):
            try:
                yield self._decoder.decode(frame)
            except WireError as error:
                raise LinkError(f"worker {int.from_bytes(identity, 'little')} sent an {error}") from error

    def send(self, message: msgspec.Struct) -> None:
        """The same frame to every rank. Raises LinkError when one is gone; the others got it."""
        frame, gone = encode(message), []
        for rank, identity in enumerate(self._identities):
            try:
                self.socket.send_multipart([identity, frame], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                gone.append(f"worker {rank} cannot be reached: {error}")
        if gone:
            raise LinkError("; ".join(gone))


def _bind(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, _FRONTEND_QUEUE)
    socket.setsockopt(zmq.RCVHWM, _FRONTEND_QUEUE)
    socket.bind(endpoint)
    return socket


def _pending(socket: "zmq.Socket[bytes]") -> Iterator[tuple[bytes, bytes]]:
    for _ in range(_MOST_AT_ONCE):
        try:
            identity, *frames = socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        yield identity, frames[0] if len(frames) == 1 else b""
