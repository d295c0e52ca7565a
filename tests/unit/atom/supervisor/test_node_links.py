"""The master's links: who is admitted and who is refused, and how a process of another node looks."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from atom.shared.config.engine import EngineConfig
from atom.shared.config.server import ServerConfig
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.launch import CoreLaunch
from atom.shared.messages.nodes import (
    Beat,
    Exited,
    Join,
    Leaving,
    NodeInfo,
    Refused,
    Report,
    SetEngines,
    Signal,
    Start,
    Stop,
    ToNode,
    Welcome,
)
from atom.shared.messages.supervisor import Ready
from atom.shared.utils.endpoint import LINK_SILENCE_MS, connect, endpoint_key, tcp_endpoint
from atom.shared.utils.net import ListenPort
from atom.supervisor.life import Life
from atom.supervisor.node_links import NodeLinks, NodeSettings, RemoteNode
from atom.supervisor.process import ProcessSpec, Role
from tests.helpers.servers.domains import CHECKPOINT, zmq_context

IDENTITY = {"ATOM": "1.0", "--max-num-seqs": "8", "config.json's hidden_size": "64"}
SECRET = b"of this test alone"
LAUNCH = CoreLaunch(EngineConfig(), CHECKPOINT, "", "", "", 0)
DEADLINE_S = 60.0


class Peer:
    """A node's side of the link, by hand."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str):
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        connect(self.socket, endpoint, LINK_SILENCE_MS)
        self._decoder: Decoder[ToNode] = Decoder(ToNode)

    def send(self, message: Any) -> None:
        self.socket.send(encode(message))

    def receive(self) -> Any:
        """The next message but Beat."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < deadline and self.socket.poll(DEADLINE_S * 1000)
            message = self._decoder.decode(self.socket.recv())
            if not isinstance(message, Beat):
                return message

    def join(self, rank: int = 1, **changes: str) -> Any:
        info = NodeInfo(rank, "10.0.0.2", "eth0", "/run", EngineConfig(), CHECKPOINT, ServerConfig(), {})
        self.send(Join(IDENTITY | changes, info))
        return self.receive()


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    with zmq_context() as made:
        yield made


@pytest.fixture
def endpoint() -> Iterator[tuple[str, str]]:
    """The endpoint of the master, and the one for the nodes."""
    address = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}.1"
    with ListenPort(address, 0) as port:
        key = endpoint_key(SECRET, "link")
        bound = tcp_endpoint(key, address, port.port, os.dup(port.open(0).fileno()))
        yield bound, tcp_endpoint(key, address, port.port)


@pytest.fixture
def links(context: "zmq.Context[Any]", endpoint: tuple[str, str], tmp_path: Path) -> Iterator[NodeLinks]:
    made = NodeLinks(context, NodeSettings(endpoint[0], 3, IDENTITY, tmp_path), {})
    yield made
    made.close()


@pytest.fixture
def peer(context: "zmq.Context[Any]", endpoint: tuple[str, str], links: NodeLinks) -> Iterator[Peer]:
    made = Peer(context, endpoint[1])
    yield made
    made.socket.close(0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def joined(links: NodeLinks, peer: Peer) -> RemoteNode:
    assert isinstance(peer.join(), Welcome)
    assert isinstance(peer.receive(), SetEngines)
    until(lambda: links.missing == [2])
    node = links.nodes[1]
    assert isinstance(node, RemoteNode)
    return node


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ATOM", "0.9", "ATOM: node 1 has 0.9, the master has 1.0"),
        ("--max-num-seqs", "16", "--max-num-seqs: node 1 has 16, the master has 8"),
        ("config.json's hidden_size", "128", "config.json's hidden_size: node 1 has 128, the master has 64"),
        ("--new-flag", "on", "--new-flag: node 1 has on, the master has nothing"),
    ],
)
def test_a_node_that_differs_is_refused_with_both_values(
    peer: Peer, links: NodeLinks, name: str, value: str, reason: str
) -> None:
    assert peer.join(**{name: value}) == Refused(f"node 1 (10.0.0.2) cannot join: {reason}", True)
    assert links.missing == [1, 2]


@pytest.mark.parametrize("rank", [0, 3, -1])
def test_a_rank_that_does_not_exist_is_refused(peer: Peer, links: NodeLinks, rank: int) -> None:
    answer = peer.join(rank)
    assert answer.is_final and answer.reason.startswith(f"--node-rank {rank}: --nnodes is 3 at the master")


def test_a_second_node_of_a_rank_waits_for_the_end_of_the_first(
    context: "zmq.Context[Any]", endpoint: tuple[str, str], peer: Peer, links: NodeLinks
) -> None:
    first = joined(links, peer)
    other = Peer(context, endpoint[1])
    assert other.join() == Refused("node 1 has joined already, from 10.0.0.2", False)
    peer.socket.close(0)
    until(lambda: first.lost)
    assert first.lost == "node 1 (10.0.0.2) has ended, or cannot be reached any more"
    second = joined(links, other)
    assert second is not first and not second.lost
    other.socket.close(0)


def test_an_undecodable_frame_costs_its_sender_alone(peer: Peer, links: NodeLinks) -> None:
    peer.socket.send(b"nonsense")
    assert peer.receive().reason.startswith("a node cannot join: it sent an undecodable frame of 8 bytes")
    joined(links, peer)


def test_a_node_of_another_version_is_refused_with_both_though_its_join_does_not_decode(peer: Peer) -> None:
    theirs = msgspec.msgpack.encode([1, IDENTITY | {"ATOM": "2.0"}, {"another": "shape"}])
    peer.socket.send(theirs)
    assert peer.receive() == Refused("a node cannot join: ATOM: it has 2.0, the master has 1.0", True)


def test_a_node_that_sends_nonsense_after_its_join_is_lost(peer: Peer, links: NodeLinks) -> None:
    node = joined(links, peer)
    peer.socket.send(b"nonsense")
    assert peer.receive().reason.startswith("node 1 sent an undecodable frame of 8 bytes")
    until(lambda: node.lost)


def test_without_the_secret_nothing_arrives(
    context: "zmq.Context[Any]", endpoint: tuple[str, str], peer: Peer, links: NodeLinks
) -> None:
    at, where = endpoint[1].partition("@")[1:]
    stranger = Peer(context, f"curve://{endpoint_key(b'another secret', 'link')}{at}{where}")
    stranger.send(Join(IDENTITY, NodeInfo(2, "", "", "", EngineConfig(), CHECKPOINT, ServerConfig(), {})))
    joined(links, peer)
    assert not stranger.socket.poll(500) and links.missing == [2]
    stranger.socket.close(0)


def test_a_remote_process_is_started_signalled_and_ends(peer: Peer, links: NodeLinks) -> None:
    node = joined(links, peer)
    process = node.spawn("engine-1.0", ProcessSpec("core", Role.CORE, LAUNCH, [5]))
    start = peer.receive()
    assert isinstance(start, Start)
    assert (start.life, start.process, start.module) == ("engine-1.0", "core", "engine_core.process")
    assert start.pass_fds == [5] and process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert peer.receive() == Signal("engine-1.0", "core", signal.SIGTERM)
    peer.send(Exited("engine-1.0", "core", 3))
    assert process.wait(DEADLINE_S) == process.poll() == 3


def test_the_processes_of_a_lost_node_have_ended(peer: Peer, links: NodeLinks) -> None:
    node = joined(links, peer)
    process = node.spawn("engine-1.0", ProcessSpec("core", Role.CORE, LAUNCH))
    peer.receive()
    peer.socket.close(0)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    with pytest.raises(OSError, match="node 1 .* has ended"):
        node.spawn("engine-1.1", ProcessSpec("core", Role.CORE, LAUNCH))


def test_reports_arrive_at_the_socket_of_their_life(
    context: "zmq.Context[Any]", peer: Peer, links: NodeLinks, tmp_path: Path
) -> None:
    joined(links, peer)
    life = Life(context, tmp_path / "engine-1.0", 60.0)
    for name in ("engine-1.7", "../engine-1.0", "engine-1.0"):
        peer.send(Report(name, encode(Ready(f"core of {name}"))))
    assert life.receive(DEADLINE_S) and list(life.reports) == ["core of engine-1.0"]
    life.close()


def test_a_failure_names_the_node_of_its_process(
    context: "zmq.Context[Any]", peer: Peer, links: NodeLinks, tmp_path: Path
) -> None:
    node = joined(links, peer)
    life = Life(context, tmp_path / "engine-1.0", 60.0)
    life.spawn(node, ProcessSpec("core", Role.CORE, LAUNCH))
    peer.send(Exited("engine-1.0", "core", -signal.SIGKILL))
    until(lambda: not life.is_alive)
    failure = life.failure()
    assert failure is not None and failure.text == "core on node 1 (10.0.0.2): killed by SIGKILL"
    life.close()


def test_a_node_may_leave_and_all_end_with_the_master(peer: Peer, links: NodeLinks) -> None:
    node = joined(links, peer)
    peer.send(Leaving())
    assert peer.receive() == Stop("")
    until(lambda: node.lost)
    assert node.lost == "node 1 (10.0.0.2) was stopped"
    joined(links, peer)
    links.close("out of luck", 1)
    assert peer.receive() == Stop("out of luck", 1)
