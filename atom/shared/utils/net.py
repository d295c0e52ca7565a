"""Listening sockets: bound by the supervisor, then passed to the frontends."""

import contextlib
import errno
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

_BACKLOG = 4096
_FLAGS_WITH_ZERO = ("--server-port", "--admin-port")

_REMEDIES = {
    errno.EADDRINUSE: "it is in use; choose another {flag}{or_free}",
    errno.EACCES: "not permitted; choose a {flag} from 1024 up",
    errno.EADDRNOTAVAIL: "this host has no such address; use --host 127.0.0.1 or 0.0.0.0",
}


class ListenError(OSError):
    """Listening on the address failed; the text is one line with the remedy."""


class ListenPort:
    """`count` sockets that listen on one port; the kernel spreads connections over them (SO_REUSEPORT).

    `host` is a name, an IPv4 or an IPv6 address; port 0 takes a free one. Raises ListenError, which names
    `flag`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        count: int = 1,
        flag: str = "--server-port",
        taken: Mapping[int, socket.socket] | None = None,
    ):
        """`taken` has those of the sockets, by number, that another server has bound to this port."""
        self._host = host
        self._count = count
        self._sockets: dict[int, socket.socket] = dict(taken or {})
        if self._sockets:
            self.port = port
        else:
            # The first socket is bound without SO_REUSEPORT, which fails where another server has the port.
            first = _listen_socket(host, port, joins=False, shared=count > 1, flag=flag)
            self.port = int(first.getsockname()[1])
            self._sockets[0] = first
        try:
            for index in range(count):
                self.open(index)
        except BaseException:
            self.close_all()
            raise

    def open(self, index: int) -> socket.socket:
        """Socket `index`, which is made again after `close`."""
        if index not in self._sockets:
            shared = self._count > 1
            self._sockets[index] = _listen_socket(self._host, self.port, shared, shared)
        return self._sockets[index]

    def descriptors_without(self, index: int) -> dict[int, int]:
        """Those of all sockets but `index`, by number."""
        return {other: self.open(other).fileno() for other in range(self._count) if other != index}

    @property
    def sockets(self) -> dict[int, socket.socket]:
        """Those that are open, by number."""
        return dict(self._sockets)

    def close(self, index: int) -> None:
        """Close socket `index`; a process that inherited it still listens."""
        if index in self._sockets:
            self._sockets.pop(index).close()

    def close_all(self) -> None:
        """Close all sockets. May be called twice."""
        for index in list(self._sockets):
            self.close(index)

    def __enter__(self) -> "ListenPort":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_all()


class AdminSocket:
    """A listening socket for users of this host: a port of 127.0.0.1, or a Unix socket of the owner alone.

    Port 0 takes a free one. Raises ListenError.
    """

    def __init__(self, port: int | None, path: str | None, taken: tuple[str, socket.socket] | None = None):
        """`taken`: address and socket that another server hands over, used if this is the same address."""
        self._path = None if path is None else Path(path).absolute()
        self.is_own = True
        """Whether the path is removed at the end: not while it is that of another server."""
        wanted = f"http://127.0.0.1:{port}" if self._path is None else f"unix:{self._path}"
        if taken is not None and taken[0] == wanted:
            self.address, self.socket = taken
            self.is_own = False
        elif self._path is None:
            self.socket = _listen_socket("127.0.0.1", port or 0, False, False, "--admin-port")
            self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        else:
            self.socket = _listen_path(self._path)
            self.address = f"unix:{self._path}"

    def __enter__(self) -> "AdminSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        if self._path is not None and self.is_own:
            self._path.unlink(missing_ok=True)


def is_loopback_host(host: str) -> bool:
    """Whether a Host header names this host's loopback interface."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    return name.lower() in ("localhost", "127.0.0.1", "[::1]")


def _listen_path(path: Path) -> socket.socket:
    """A socket at `path` that only this user can open; one without a listener is replaced."""
    with contextlib.ExitStack() as on_error:
        made = on_error.enter_context(socket.socket(socket.AF_UNIX))
        try:
            if path.is_socket() and not _is_listening(path):
                path.unlink()
            mask = os.umask(0o177)
            try:
                made.bind(str(path))
            finally:
                os.umask(mask)
            made.listen(_BACKLOG)
        except OSError as error:
            reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            raise ListenError(f"--admin-socket {path}: {reason}") from None
        on_error.pop_all()
    return made


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        return client.connect_ex(str(path)) != errno.ECONNREFUSED


def _listen_socket(
    host: str, port: int, joins: bool, shared: bool, flag: str = "--server-port"
) -> socket.socket:
    """A listening TCP socket that joins those on its port, or lets others join. Raises ListenError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ListenError(f"cannot listen on {host}: no such host; use --host 127.0.0.1 or 0.0.0.0") from None
    with contextlib.ExitStack() as on_error:
        made = on_error.enter_context(socket.socket(family, kind, protocol))
        try:
            # A restart must not wait for connections of the last run to time out.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(joins))
            made.bind(address)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
            made.listen(_BACKLOG)
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, error.strerror or "").format(
                flag=flag, or_free=", or 0 for a free one" if flag in _FLAGS_WITH_ZERO else ""
            )
            raise ListenError(f"cannot listen on {host} port {port}: {remedy}") from None
        on_error.pop_all()
    return made
