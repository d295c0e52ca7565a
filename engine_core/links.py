"""The core's sockets: ROUTERs for workers and frontends, and the line to the supervisor.

Nothing is dropped in silence: a peer whose queue is full, or who is gone, is reported to the
caller.
"""

import time
from typing import Any

import msgspec
import zmq

from atom.messages.codec import Decoder, WireError, encode
from atom.messages.engine import ToCore
from atom.messages.supervisor import ToSupervisor
from atom.messages.worker import FromWorker, Loaded, WorkerFailed, WorkerReady
from atom.utils.logger import get_logger

LOAD_DEADLINE_S = 3600.0
_QUEUE_LIMIT = 100_000
_LINGER_MS = 2000
_WAIT_MS = 1000


class WorkerFailedError(RuntimeError):
    """A rank cannot go on; the text is its own line."""


class WorkerLink:
    """All ranks of this core; a message goes to each of them as one encoded frame."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, ranks: int):
        self.socket = _bound_router(context, endpoint)
        self._identities = [rank.to_bytes(4, "little") for rank in range(ranks)]
        self._decoder = Decoder[FromWorker](FromWorker)

    def send(self, message: msgspec.Struct) -> None:
        """To every rank. Raises WorkerFailedError when one cannot take it."""
        frame = encode(message)
        for rank, identity in enumerate(self._identities):
            try:
                self.socket.send_multipart((identity, frame), zmq.DONTWAIT)
            except zmq.ZMQError as error:
                raise WorkerFailedError(f"worker {rank} does not take messages: {error}") from None

    def receive(self) -> FromWorker | None:
        """The next message, if one has come. Raises WorkerFailedError when it is a failure."""
        try:
            _, frame = self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        message = self._decoder.decode(frame)
        if isinstance(message, WorkerFailed):
            raise WorkerFailedError(f"worker {message.rank}: {message.reason}")
        return message

    def all_loaded(self) -> list[Loaded]:
        """What every rank has loaded, by rank; waits for the last one."""
        return self._one_of_each(Loaded, "weights")

    def all_ready(self) -> None:
        """Wait until every rank has its KV cache."""
        self._one_of_each(WorkerReady, "KV cache")

    def _one_of_each(self, kind: type[Any], what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + LOAD_DEADLINE_S
        while len(answers) < len(self._identities):
            self.socket.poll(_WAIT_MS)
            message = self.receive()
            if isinstance(message, kind):
                answers[message.rank] = message
            elif message is not None:
                raise WorkerFailedError(f"a worker sent {type(message).__name__} before its {what}")
            elif time.monotonic() > deadline:
                missing = sorted(set(range(len(self._identities))) - answers.keys())
                raise WorkerFailedError(f"no {what} from workers {missing} in {LOAD_DEADLINE_S:.0f} s")
        return [answers[rank] for rank in sorted(answers)]


class FrontendLink:
    """Every frontend that said Hello, told apart by its ZMQ identity."""

    def __init__(self, context: zmq.Context[Any], endpoint: str):
        self.socket = _bound_router(context, endpoint)
        self._decoder = Decoder[ToCore](ToCore)

    def send(self, frontend: bytes, message: msgspec.Struct) -> bool:
        """False when the frontend is gone or does not keep up: nothing more will reach it."""
        try:
            self.socket.send_multipart((frontend, encode(message)), zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> tuple[bytes, ToCore] | None:
        """The next message and who sent it, if one has come; undecodable ones are logged and skipped."""
        while True:
            try:
                frontend, frame = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return None
            try:
                return frontend, self._decoder.decode(frame)
            except WireError as error:
                get_logger().error("message from a frontend ignored: %s", error)


class SupervisorLink:
    """One way: what the supervisor should know."""

    def __init__(self, context: zmq.Context[Any], endpoint: str):
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(endpoint)

    def send(self, message: ToSupervisor) -> None:
        self._socket.send(encode(message), zmq.DONTWAIT)


def _bound_router(context: zmq.Context[Any], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, _QUEUE_LIMIT)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_LIMIT)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.bind(endpoint)
    return socket
