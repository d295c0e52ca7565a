"""Listening sockets."""

import socket

import pytest

from atom.utils.net import ListenError, listen_socket


def test_a_free_port_accepts_connections() -> None:
    with listen_socket("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=5) as client:
            peer, _ = listener.accept()
            with peer:
                client.sendall(b"x")
                assert peer.recv(1) == b"x"


def test_a_port_in_use_says_what_to_do() -> None:
    with listen_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port}: it is in use; choose another --server-port"):
            listen_socket("127.0.0.1", port)


def test_a_port_is_free_again_after_a_connection_ended() -> None:
    with listen_socket("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=5):
            listener.accept()[0].close()  # this side closes first: it stays in TIME_WAIT
    with listen_socket(*address) as again:
        assert again.getsockname() == address


@pytest.mark.parametrize("host", ["192.0.2.1", "no..host"])
def test_addresses_that_are_not_ours(host: str) -> None:
    with pytest.raises(ListenError, match="use --host"):
        listen_socket(host, 0)
