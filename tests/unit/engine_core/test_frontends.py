"""Frontends that reconnect, vanish, or are there when the core ends; over real sockets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.engine import CoreDead, FromCore, GetStats, Hello
from atom.shared.messages.worker import FullAttentionSpec
from engine_core import links
from engine_core.frontends import Frontends
from engine_core.scheduler import Limits
from tests.helpers.engine.core_driver import CoreDriver

WAIT_MS = 10_000


class Side:
    """The frontends' side of the socket, and a core with requests of frontend `a`."""

    def __init__(self, directory: Path):
        self.context: zmq.Context[Any] = zmq.Context()
        self.endpoint = f"ipc://{directory}/frontends"
        self.frontends = Frontends(self.context, self.endpoint)
        self.run = CoreDriver([FullAttentionSpec(4, 1)], [16], Limits(4, 8))
        self.core = self.run.core
        self._sockets: list[zmq.Socket[bytes]] = []

    def connect(self, identity: bytes) -> "zmq.Socket[bytes]":
        """A connection that has sent Hello(0)."""
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(self.endpoint)
        socket.send(encode(Hello(0)))
        self._sockets.append(socket)
        return socket

    def receive(self) -> list[Any]:
        """The messages that have come, waiting for one."""
        assert self.frontends.socket.poll(WAIT_MS)
        return list(self.frontends.receive())


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    made = Side(tmp_path)
    yield made
    made.context.destroy(linger=0)


def response(socket: "zmq.Socket[bytes]") -> Any:
    assert socket.poll(WAIT_MS)
    return Decoder(FromCore).decode(socket.recv())


def test_a_reconnected_frontend_replaces_its_old_connection(side: Side) -> None:
    for identity in (b"a", b"b"):
        side.connect(identity)
        ((sender, hello),) = side.receive()
        side.frontends.register(side.core, sender, hello.frontend)
        if identity == b"a":
            side.run.add(1, [1], max_tokens=4, frontend=b"a")
    assert side.frontends.connected == [b"b"] and side.core.num_live == 0


def test_large_messages_are_received_one_by_one_between_steps(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if each took longer than all of them may."""
    monkeypatch.setattr(links, "_RECEIVE_S", -1.0)
    socket = side.connect(b"a")
    for _ in range(2):
        socket.send(encode(GetStats()))
    found = [side.receive() for _ in range(3)]
    assert found == [[(b"a", Hello(0))], [(b"a", GetStats())], [(b"a", GetStats())]]


def test_messages_after_lost_tokens_are_refused_until_the_next_hello(side: Side) -> None:
    side.run.add(1, [1], max_tokens=4, frontend=b"a")
    side.frontends.send(side.core, b"a", side.core.stats())  # nobody is connected
    assert side.core.num_live == 0
    socket = side.connect(b"a")
    ((sender, hello),) = side.receive()
    socket.send(encode(GetStats()))
    assert side.receive() == []
    assert response(socket) == CoreDead("this frontend did not read its tokens in time")
    side.frontends.register(side.core, sender, hello.frontend)
    socket.send(encode(GetStats()))
    assert side.receive() == [(b"a", GetStats())]


def test_a_frontend_whose_hello_is_not_processed_learns_of_the_death(side: Side) -> None:
    socket = side.connect(b"a")
    side.frontends.report_death("the GPU is gone")
    assert response(socket) == CoreDead("the GPU is gone")
