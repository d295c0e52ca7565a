"""Frames over a stream socket: four bytes of length, then the frame."""

import socket

_LENGTH = 4
_PIECE = 1 << 18


class FrameSocket:
    """Sends and receives without waiting; what cannot be sent yet is kept and sent later."""

    is_closed = False
    """Whether the other end is gone, or `close` was called."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._socket = connection
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        """For `select.poll`."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame with the next `flush`; none once the socket is closed."""
        if not self.is_closed:
            self._unsent += len(frame).to_bytes(_LENGTH, "little")
            self._unsent += frame

    def flush(self) -> None:
        """Send as much as can be sent now."""
        try:
            while self._unsent and not self.is_closed:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def receive(self) -> list[bytes]:
        """All complete frames that have arrived."""
        try:
            while not self.is_closed:
                piece = self._socket.recv(_PIECE)
                self._received += piece
                if not piece:
                    self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        frames = []
        while len(self._received) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._received[:_LENGTH], "little")
            if len(self._received) < end:
                break
            frames.append(bytes(self._received[_LENGTH:end]))
            del self._received[:end]
        return frames

    def close(self) -> None:
        """The other end sees the end of the stream."""
        self.is_closed = True
        self._socket.close()


def read_frame(connection: socket.socket) -> bytes:
    """Wait for the next frame of a blocking socket; empty at the end of the stream."""
    length = _read(connection, _LENGTH)
    return _read(connection, int.from_bytes(length, "little"))


def write_frame(connection: socket.socket, frame: bytes) -> None:
    """Send a frame over a blocking socket."""
    connection.sendall(len(frame).to_bytes(_LENGTH, "little") + frame)


def _read(connection: socket.socket, size: int) -> bytes:
    """`size` bytes; empty if the stream ends before."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), _PIECE))
        if not piece:
            return b""
        data += piece
    return bytes(data)
