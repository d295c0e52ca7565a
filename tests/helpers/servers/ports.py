"""A free port that stays free: the kernel gives it to no other process."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A bound port of 127.0.0.1 at which nothing listens; a server with SO_REUSEADDR still may."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]
