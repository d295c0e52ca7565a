"""Listening sockets."""

import contextlib
import socket

import pytest

from atom.shared.utils.net import ListenError, ListenPort

LOCAL = "127.0.0.1"


def connect(port: ListenPort) -> socket.socket:
    return socket.create_connection((LOCAL, port.port), timeout=5)


def accepted(port: ListenPort, count: int) -> list[int]:
    """Connections that wait at each of the sockets."""
    found = []
    for index in range(count):
        listener = port.open(index)
        listener.setblocking(False)
        found.append(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
                found[-1] += 1
    return found


def test_a_free_port_accepts_connections() -> None:
    with ListenPort(LOCAL, 0) as port, connect(port) as client:
        peer, _ = port.open(0).accept()
        with peer:
            client.sendall(b"x")
            assert peer.recv(1) == b"x"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("other", [1, 2])
def test_a_port_in_use_says_what_to_do(count: int, other: int) -> None:
    with ListenPort(LOCAL, 0, count) as port:
        problem = f"port {port.port}: it is in use; choose another --server-port"
        with pytest.raises(ListenError, match=problem):
            ListenPort(LOCAL, port.port, other)


def test_a_port_is_free_again_after_a_connection_ended() -> None:
    with ListenPort(LOCAL, 0) as port:
        number = port.port
        with connect(port):
            port.open(0).accept()[0].close()  # this side closes first: it stays in TIME_WAIT
    with ListenPort(LOCAL, number) as again:
        assert again.port == number


@pytest.mark.parametrize("host", ["192.0.2.1", "no..host"])
def test_addresses_that_are_not_ours(host: str) -> None:
    with pytest.raises(ListenError, match="use --host"):
        ListenPort(host, 0)


def test_connections_spread_over_the_sockets_of_a_port() -> None:
    with ListenPort(LOCAL, 0, 3) as port, contextlib.ExitStack() as clients:
        for _ in range(120):
            clients.enter_context(connect(port))
        counts = accepted(port, 3)
        assert sum(counts) == 120 and min(counts) > 10


@pytest.mark.parametrize("closed", [0, 1])
def test_a_closed_socket_gets_no_connections_until_it_is_opened_again(closed: int) -> None:
    with ListenPort(LOCAL, 0, 2) as port, contextlib.ExitStack() as clients:
        port.close(closed)
        for _ in range(20):
            clients.enter_context(connect(port))
        port.open(closed)
        assert accepted(port, 2)[closed] == 0
        for _ in range(60):
            clients.enter_context(connect(port))
        assert min(accepted(port, 2)) > 5
