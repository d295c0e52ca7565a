"""Listening sockets: bound once by the supervisor, then passed to the frontend."""

import contextlib
import errno
import socket

_BACKLOG = 4096

_REMEDIES = {
    errno.EADDRINUSE: "it is in use; choose another --server-port, or 0 for a free one",
    errno.EACCES: "not permitted; choose a --server-port from 1024 up",
    errno.EADDRNOTAVAIL: "this host has no such address; use --host 127.0.0.1 or 0.0.0.0",
}


class ListenError(OSError):
    """Listening on the address failed; the text is one line with the remedy."""


def listen_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on `host` (a name, IPv4 or IPv6 address); port 0 takes a free one.

    Raises ListenError. The caller closes the socket.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ListenError(f"cannot listen on {host}: no such host; use --host 127.0.0.1 or 0.0.0.0") from None
    with contextlib.ExitStack() as on_error:
        listener = on_error.enter_context(socket.socket(family, kind, protocol))
        try:
            # A restart must not wait for connections of the last run to time out.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, error.strerror)
            raise ListenError(f"cannot listen on {host} port {port}: {remedy}") from None
        on_error.pop_all()
    return listener
