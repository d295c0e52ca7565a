"""The sockets of an engine core. Nothing here blocks; the caller polls."""

import time
from collections.abc import Iterator

import msgspec
import zmq

from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.messages.engine import ToCore
from atom.shared.messages.worker import FromWorker
from atom.shared.utils.endpoint import bind
from atom.shared.utils.logger import get_logger

# Messages queued for a frontend that does not read: minutes of decoding, some ten megabytes.
_FRONTEND_QUEUE = 10_000
_MAX_MESSAGES = 1024
"""Received between two steps, so that a flood of requests does not delay the running ones."""
_RECEIVE_S = 0.01
"""Frontends' messages are received and processed for no longer between two steps: they may be large."""


class LinkError(RuntimeError):
    """A worker is gone or sent an undecodable frame."""


class FrontendLink:
    """The socket to all frontends; a frontend is addressed by the identity of its connection."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str):
        self.socket = _bind(context, endpoint)
        self._decoder: Decoder[ToCore] = Decoder(ToCore)
        self._logged: set[bytes] = set()  # frontends with a logged bad frame: a flood must not fill the log

    def receive(self) -> Iterator[tuple[bytes, ToCore]]:
        """Received messages with their senders, up to a bound, which counts what the caller does with them.

        Undecodable frames are dropped; the first of each frontend is logged.
        """
        until = time.monotonic() + _RECEIVE_S
        for identity, frame in _pending(self.socket):
            try:
                yield identity, self._decoder.decode(frame)
            except WireError as error:
                if identity not in self._logged:
                    self._logged.add(identity)
                    get_logger().error(
                        "a frontend sent an %s; its further undecodable frames are not logged",
                        error,
                    )
            if time.monotonic() > until:
                return

    def send(self, identity: bytes, message: msgspec.Struct) -> bool:
        """Returns False, without sending, when the frontend is gone or its queue is full."""
        try:
            self.socket.send_multipart([identity, encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


class WorkerLink:
    """The socket to all worker ranks."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, num_ranks: int):
        self.socket = _bind(context, endpoint)
        self._identities = [rank.to_bytes(4, "little") for rank in range(num_ranks)]
        self._decoder: Decoder[FromWorker] = Decoder(FromWorker)

    def receive(self) -> Iterator[FromWorker]:
        """Received messages, up to a bound. Raises LinkError for an undecodable frame."""
        for identity, frame in _pending(self.socket):
            try:
                yield self._decoder.decode(frame)
            except WireError as error:
                raise LinkError(f"worker {int.from_bytes(identity, 'little')} sent an {error}") from error

    def send(self, message: msgspec.Struct) -> bytes:
        """Send one frame to every rank, and return it.

        Raises LinkError when ranks are gone; the others still receive it.
        """
        frame = encode(message)
        gone = []
        for rank, identity in enumerate(self._identities):
            try:
                self.socket.send_multipart([identity, frame], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                gone.append(f"worker {rank} cannot be reached: {error}")
        if gone:
            raise LinkError("; ".join(gone))
        return frame


def _bind(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, _FRONTEND_QUEUE)
    socket.setsockopt(zmq.RCVHWM, _FRONTEND_QUEUE)
    bind(socket, endpoint)
    return socket


def _pending(socket: "zmq.Socket[bytes]") -> Iterator[tuple[bytes, bytes]]:
    for _ in range(_MAX_MESSAGES):
        try:
            identity, *frames = socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        yield identity, frames[0] if len(frames) == 1 else b""
