"""Opens the rendezvous of ranks of a benchmark or test, before they start; engines have `NodePorts`."""

import contextlib
from collections.abc import Iterator

from msgspec.structs import replace

from atom.shared.messages.launch import Rendezvous
from atom.shared.utils.net import ListenPort

_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def open_rendezvous(ranks: int, life: int = 0) -> Iterator[list[Rendezvous | None]]:
    """The rendezvous of each of `ranks` workers on this host; leave once rank 0 is started.

    The port is bound here and stays so: rank 0 inherits the socket. Others that connect before it
    serves them wait in the backlog, and are refused once it is dead. One rank needs none: None.
    """
    if ranks == 1:
        yield [None]
        return
    with ListenPort(_LOOPBACK, 0) as port:
        where = Rendezvous(_LOOPBACK, port.port, life)
        yield [replace(where, listen_fd=port.open(0).fileno()), *[where] * (ranks - 1)]
