"""How a running server hands its sockets and streams over to a new one.

The running server listens on the socket `handover` in its run directory, which only its user can open; the
new one finds it by the process id of the supervisor, or by the socket of the administration. The messages are
in `atom.shared.messages.handover`. Nothing changes for clients until the new server says that it serves, so
it may fail at any time before.
"""

import contextlib
import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from atom.shared.messages.codec import Decoder, WireError, encode
from atom.shared.messages.handover import (
    PROTOCOL,
    Declined,
    Leaving,
    Left,
    ListeningSockets,
    Serving,
    Starting,
    Stopping,
    TakeOver,
    ToNew,
    ToOld,
)
from atom.shared.messages.resume import Claimed
from atom.shared.utils.logger import get_logger
from atom.shared.utils.run_directory import run_directory_of

__all__ = ["DeclinedError", "HandoverError", "NewServer", "OldServer"]

T = TypeVar("T")

_NAME = "handover"
_FRAME_DEADLINE_S = 30.0
"""For one frame, of a peer that has begun to send it, or that reads it."""
_FIRST_DEADLINE_S = 2.0
"""For the first message of a new server, which it sends at once."""
_OFFER_DEADLINE_S = 180.0
"""For the sockets: the running server may itself be starting, or taking over from an earlier one."""
_ANSWER_DEADLINE_S = 30.0
_ANSWER_POLL_S = 0.1
_STARTING_S = 5.0
"""Between two messages of a new server that starts."""
_SILENCE_DEADLINE_S = 60.0
"""Without such a message: it is stopped, or hangs."""
_MAX_SOCKETS = 250
"""The kernel passes 253 descriptors in one message."""
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_REMEDY = "if no server runs any more, start this one without it"


class HandoverError(RuntimeError):
    """The other server is gone, or cannot hand over; the text is one line."""


class EndedError(HandoverError):
    """The other server has ended, or has closed the connection."""

    def __init__(self) -> None:
        super().__init__("it has ended, or has closed the connection")


class DeclinedError(HandoverError):
    """The running server hands nothing over, and goes on."""


class _Channel(Generic[T]):
    """A connection that carries frames of type `kind`, and descriptors with a frame."""

    def __init__(self, connection: socket.socket, kind: Any):
        self._connection = connection
        self._connection.settimeout(_FRAME_DEADLINE_S)
        self._decoder = Decoder[T](kind)
        self.fds: list[int] = []
        """Descriptors that came with the latest frame; their receiver closes them."""

    @property
    def peer(self) -> int:
        """Process id of the other end."""
        raw = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(raw)[0])

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Raises HandoverError."""
        frame = encode(message)
        length = _LENGTH.pack(len(frame))
        try:
            if fds:
                socket.send_fds(self._connection, [length], list(fds))
            else:
                self._connection.sendall(length)
            self._connection.sendall(frame)
        except ConnectionError:
            raise EndedError from None
        except OSError as error:
            raise HandoverError(f"the other server does not read: {error}") from None

    def receive(self, wait_s: float = 0.0) -> T | None:
        """The next message; None if none begins within `wait_s`. Raises HandoverError at the end."""
        try:
            if not select.select([self._connection], [], [], wait_s)[0]:
                return None
            head, self.fds, _, _ = socket.recv_fds(
                self._connection, _LENGTH.size, _MAX_SOCKETS, socket.MSG_CMSG_CLOEXEC
            )
            head += self._read(_LENGTH.size - len(head)) if head else b""
            if not head:
                raise EndedError
            return self._decoder.decode(self._read(_LENGTH.unpack(head)[0]))
        except ConnectionError:
            raise EndedError from None
        except (OSError, WireError) as error:
            raise HandoverError(f"the connection to the other server has failed: {error}") from None

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._connection.recv(min(size, 1 << 20))
            if not part:
                raise EndedError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        for descriptor in self.fds:
            os.close(descriptor)
        self.fds = []
        self._connection.close()


class NewServer:
    """The new server, as the running one sees it: is offered the sockets, then gets the streams."""

    def __init__(
        self, run_dir: Path, offer: Callable[[], tuple[ListeningSockets, list[int]]], declines: str = ""
    ):
        """`offer()` returns the sockets and their descriptors; `declines` says why nothing is handed over."""
        self._declines = declines
        self._offer = offer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(run_dir / _NAME))
        self._listener.listen(8)
        self._listener.setblocking(False)
        self._channel: _Channel[ToOld] | None = None
        self.pid = 0
        """Process id of the supervisor of the new server; 0 before there is one."""
        self._heard_at = 0.0
        self._is_stopped = False

    def poll(self) -> Serving | None:
        """Answer who has connected; returns the message of a new server that accepts connections."""
        with contextlib.suppress(BlockingIOError):
            self._accept(_Channel(self._listener.accept()[0], ToOld))
        if self._channel is None:
            return None
        try:
            while (message := self._channel.receive()) is not None:
                self._heard_at = time.monotonic()
                if isinstance(message, Serving):
                    return message
                if not isinstance(message, Starting):
                    raise HandoverError(f"it sent {type(message).__name__} twice")
            if time.monotonic() > self._heard_at + _SILENCE_DEADLINE_S:
                raise HandoverError(f"it is stopped, or hangs: nothing came for {_SILENCE_DEADLINE_S:g} s")
        except HandoverError as error:
            get_logger().warning(
                "process %d does not take over after all, and this server goes on: %s", self.pid, error
            )
            with contextlib.suppress(HandoverError):  # it has ended
                self._channel.send(Declined(f"process {os.getpid()} has given it up: {error}"))
            self._drop()
        return None

    def has_died(self) -> bool:
        """Whether the new server, which serves, has ended without having been stopped."""
        try:
            while self._channel is not None and (message := self._channel.receive()) is not None:
                self._is_stopped |= isinstance(message, Stopping)
        except HandoverError:
            self._drop()
        return self._channel is None and not self._is_stopped and not _is_alive(self.pid)

    def send(self, message: Leaving | Claimed | Left) -> None:
        """Raises HandoverError."""
        assert self._channel is not None, "a new server has said that it serves"
        self._channel.send(message)

    def close(self) -> None:
        """Close the socket; the new server goes on."""
        self._drop()
        self._listener.close()

    def _accept(self, channel: _Channel[ToOld]) -> None:
        try:
            message = channel.receive(_FIRST_DEADLINE_S)
            if not isinstance(message, TakeOver):
                raise HandoverError("it sent no TakeOver")
            reason = self._declines or self._reason_against(message)
            offer, fds = self._offer()
            if len(fds) > _MAX_SOCKETS:
                reason = (
                    f"it has {len(fds)} listening sockets, and hands over {_MAX_SOCKETS} at most: restart it"
                )
            if reason:
                channel.send(Declined(reason))
                channel.close()
                return
            channel.send(offer, fds)
        except HandoverError as error:
            get_logger().warning("a connection to take over has failed: %s", error)
            channel.close()
            return
        self._channel = channel
        self._heard_at = time.monotonic()
        self._is_stopped = False
        self.pid = channel.peer
        get_logger().info("process %d is going to take over", self.pid)

    def _reason_against(self, message: TakeOver) -> str:
        if self._channel is not None:
            return f"process {self.pid} is taking over from it already"
        if message.protocol != PROTOCOL:
            return f"it hands over by version {PROTOCOL} of the protocol, not {message.protocol}: restart it"
        return ""

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class OldServer:
    """The running server, as a new one sees it: gives its sockets, then its streams."""

    def __init__(self, target: str, meanwhile: Callable[[], None] = lambda: None):
        """`target` is the process id of its supervisor, or its admin socket.

        Calls `meanwhile` until it answers. Raises HandoverError, a line for people, which names what was
        given.
        """
        try:
            connection = _connected(run_directory_of(target) / _NAME)
        except OSError as error:
            raise HandoverError(f"--upgrade-from {target}: {error.strerror or error}") from None
        self._channel: _Channel[ToNew] | None = _Channel(connection, ToNew)
        try:
            self._channel.send(TakeOver(PROTOCOL))
            message = _received(self._channel, _OFFER_DEADLINE_S, meanwhile)
            if isinstance(message, Declined):
                raise HandoverError(message.reason)
            if not isinstance(message, ListeningSockets):
                raise HandoverError(f"it does not answer within {_OFFER_DEADLINE_S:.0f} s")
        except HandoverError as error:
            self.close()
            remedy = f": {_REMEDY}" if isinstance(error, EndedError) else ""
            raise HandoverError(f"--upgrade-from {target}: {error}{remedy}") from None
        except BaseException:  # `meanwhile` gives the wait up
            self.close()
            raise
        self.offer = message
        """What the running server has; the sockets are those of `sockets` and `admin`."""
        found = [socket.socket(fileno=descriptor) for descriptor in self._channel.fds]
        self._channel.fds = []
        self.admin = (message.admin, found.pop()) if message.admin else None
        self.sockets = dict(zip(message.indexes, found, strict=True))
        self._starting_at = 0.0
        """When the next `Starting` is due."""

    def starting(self) -> None:
        """This server still starts. To be called often. Raises DeclinedError if the old one goes on."""
        now = time.monotonic()
        if self._channel is None or now < self._starting_at:
            return
        self._starting_at = now + _STARTING_S
        try:
            self._check_declined()
            self._channel.send(Starting())
        except DeclinedError:
            raise
        except HandoverError as error:
            get_logger().warning("the server that this one was to replace has ended: %s", error)
            self.close()

    def serving(self, model: dict[str, str], has_admin: bool, meanwhile: Callable[[], None]) -> str:
        """This server accepts connections: the old one accepts none any more.

        Returns why streams of the old one cannot go on here; empty if they can. Calls `meanwhile` until it
        answers. Raises DeclinedError if it goes on, else HandoverError.
        """
        if self._channel is None:
            raise HandoverError("the server that it was to replace has ended")
        self._check_declined()
        self._starting_at = math.inf
        self._channel.send(Serving(model, has_admin))
        message = _received(self._channel, _ANSWER_DEADLINE_S, meanwhile)
        if not isinstance(message, Leaving):
            raise HandoverError("the running server does not leave its sockets")
        return message.difference

    def _check_declined(self) -> None:
        """Raises HandoverError."""
        assert self._channel is not None
        message = self._channel.receive()
        if isinstance(message, Declined):
            self.close()
            raise DeclinedError(message.reason)

    def stopping(self) -> None:
        """Tell the old server that this one is stopped, and that it is not to go on for it."""
        if self._channel is not None:
            with contextlib.suppress(HandoverError):  # it has ended
                self._channel.send(Stopping())

    @property
    def is_connected(self) -> bool:
        """Whether streams may still come."""
        return self._channel is not None

    def streams(self) -> list[Claimed]:
        """Those that have come since the last call; after the last one the connection is closed."""
        found: list[Claimed] = []
        try:
            while self._channel is not None and (message := self._channel.receive()) is not None:
                if isinstance(message, Left):
                    self.close()
                elif isinstance(message, Claimed):
                    found.append(message)
        except HandoverError as error:
            get_logger().warning("the earlier server has handed over no further streams: %s", error)
            self.close()
        return found

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _received(channel: _Channel[T], deadline_s: float, meanwhile: Callable[[], None]) -> T | None:
    """The next message; None if none begins in time. Calls `meanwhile` until then. Raises HandoverError."""
    deadline = time.monotonic() + deadline_s
    while (message := channel.receive(_ANSWER_POLL_S)) is None and time.monotonic() < deadline:
        meanwhile()
    return message


def _connected(path: Path) -> socket.socket:
    """A connection to the socket of a running server. Raises OSError, whose text is for people."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)  # it would wait without end for a server that is stopped
    try:
        connection.connect(str(path))
    except BaseException as error:
        connection.close()
        if isinstance(error, FileNotFoundError):
            raise OSError("it still starts: try again when it is ready") from None
        if isinstance(error, ConnectionRefusedError):
            raise OSError(f"it ends: wait for its end; {_REMEDY}") from None
        if isinstance(error, BlockingIOError):
            raise OSError("it is stopped, or hangs: it accepts no connection") from None
        raise
    return connection


def _is_alive(pid: int) -> bool:
    """Whether it has not ended; a process that this one cannot see has."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
