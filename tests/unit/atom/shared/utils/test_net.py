"""Listening sockets."""

import contextlib
import socket
from pathlib import Path

import pytest

from atom.shared.utils.net import AdminSocket, ListenError, ListenPort

LOCAL = "127.0.0.1"


def connect(port: ListenPort) -> socket.socket:
    return socket.create_connection((LOCAL, port.port), timeout=60)


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


def test_sockets_of_another_server_are_used_and_the_missing_ones_are_made() -> None:
    with ListenPort(LOCAL, 0, 3) as port:
        taken = {index: port.open(index).dup() for index in (0, 2)}
        with ListenPort(LOCAL, port.port, 3, taken=taken) as other:
            assert sorted(other.sockets) == [0, 1, 2]
            assert other.open(0) is taken[0]
            port.close_all()
            with connect(other):
                pass


def test_an_admin_socket_moves_to_the_same_address_alone(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    with AdminSocket(None, str(path)) as old:
        with AdminSocket(None, str(path), (old.address, old.socket.dup())) as new:
            assert new.address == old.address
            with AdminSocket(None, str(tmp_path / "other"), (old.address, old.socket)) as third:
                assert third.socket is not old.socket
        assert path.exists()  # a new server that fails leaves the old one's
        with AdminSocket(None, str(path), (old.address, old.socket.dup())) as new:
            new.is_own, old.is_own = True, False
        assert not path.exists()
        path.touch()
    assert path.exists()
