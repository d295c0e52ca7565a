"""A server that speaks enough of the Redis protocol for a KV tier, and misbehaves on demand."""

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import hiredis

__all__ = ["FakeRedis", "fake_redis"]

_MOMENT_S = 0.02
_REFUSED = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"


class FakeRedis(socketserver.ThreadingTCPServer):
    """`data` are its keys; set the other fields for what goes wrong."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), _Connection)
        self.data: dict[bytes, bytes] = {}
        self.commands: list[bytes] = []
        self.password = b""
        self.is_stalled = False
        self.is_trickling = False
        self.is_full = False
        self.connections: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}"

    def blocks(self) -> dict[bytes, bytes]:
        """A copy of all but the seed; connections may change the original meanwhile."""
        return {key: value for key, value in self.data.copy().items() if b"seed" not in key}

    def disconnect(self) -> None:
        """End all connections."""
        while self.connections:
            with suppress(OSError):  # it has ended
                self.connections.pop().shutdown(socket.SHUT_RDWR)

    def answer(self, name: bytes, *arguments: bytes) -> bytes:
        self.commands.append(name)
        if name == b"AUTH":
            return b"+OK\r\n" if arguments[-1] == self.password else b"-WRONGPASS invalid password\r\n"
        if name in (b"EXISTS", b"TOUCH"):
            return b":%d\r\n" % (arguments[0] in self.data)
        if name == b"UNLINK":
            return b":%d\r\n" % (self.data.pop(arguments[0], None) is not None)
        if name == b"GET":
            value = self.data.get(arguments[0])
            return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
        if name in (b"SET", b"SETNX"):
            if self.is_full and name == b"SET":
                return _REFUSED
            is_new = arguments[0] not in self.data
            if name == b"SET" or is_new:
                self.data[arguments[0]] = arguments[1]
            return b"+OK\r\n" if name == b"SET" else b":%d\r\n" % is_new
        return b"+OK\r\n" if name == b"SELECT" else b"-ERR unknown command\r\n"


class _Connection(socketserver.BaseRequestHandler):
    server: FakeRedis
    request: socket.socket

    def handle(self) -> None:
        self.server.connections.append(self.request)
        reader = hiredis.Reader()
        try:
            while content := self.request.recv(1 << 20):
                reader.feed(content)
                while (command := reader.gets()) is not False:
                    self._send(self.server.answer(*command))
        except OSError:
            return  # the client, or a test, ended it

    def _send(self, content: bytes) -> None:
        while self.server.is_stalled:
            time.sleep(_MOMENT_S)
        if not self.server.is_trickling:
            self.request.sendall(content)
            return
        for place in range(len(content)):
            self.request.sendall(content[place : place + 1])
            time.sleep(_MOMENT_S)


@contextmanager
def fake_redis(port: int = 0) -> Iterator[FakeRedis]:
    """Ends with all of its connections."""
    server = FakeRedis(port)
    thread = threading.Thread(target=server.serve_forever, args=(_MOMENT_S,))
    thread.start()
    try:
        yield server
    finally:
        server.is_stalled = server.is_trickling = False
        server.shutdown()
        server.disconnect()
        server.server_close()
        thread.join(5.0)
