"""Readers learn where everything is, and their releases reach the core; what else comes is dropped."""

import logging
from pathlib import Path

import pytest
import torch
import zmq

from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.kv_peers import AskLayout, LeasesReleased, PeerLayout
from parallel.transfer.nixl_agent import NixlAgent, TransferError
from tests.helpers.engine.fake_nixl import FakeNixl
from tests.helpers.engine.until import until
from workers.memory import lease_server
from workers.memory.block_rows import BlockRows
from workers.memory.lease_server import LeaseServer, cache_properties


def test_where_the_cache_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeNixl(monkeypatch)
    cache, states = torch.rand(8, 2, 4), torch.rand(6, 4)
    groups = [BlockRows([cache], 8, 32), BlockRows([states], 3, 16, places=2)]
    properties = cache_properties(16, 2, "torch.float32", groups, "12ab")
    assert properties == {
        "block size": "16",
        "ranks": "2",
        "dtype": "torch.float32",
        "fingerprint of version, model and settings": "12ab",
        "tensors": "2",
        "tensor 0": "torch.float32 [2, 4]",
        "tensor 1": "torch.float32 [4]",
    }
    endpoint = f"ipc://{tmp_path}/kv-3"
    server = LeaseServer(NixlAgent(), endpoint, 3, groups, properties, b"secret")
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.connect(endpoint)
        with caplog.at_level(logging.WARNING):
            reader.send_multipart([b"", b"garbage"])
            reader.send_multipart([b"", encode(AskLayout())])
            assert reader.poll(10_000)
        answer: PeerLayout = Decoder[PeerLayout](PeerLayout).decode(reader.recv_multipart()[-1])
    assert "a reader of KV blocks sent an undecodable frame" in caplog.text
    assert answer.num_blocks == [8, 3] and answer.properties == properties
    assert answer.secret == b"secret"
    assert [(one.address, one.stride, one.size) for group in answer.tensors for one in group] == [
        (cache.data_ptr(), 32, 32),
        (states.data_ptr(), 32, 16),
    ]
    assert server.next_released() is None
    reader_agent = NixlAgent()
    peer = reader_agent.connect(answer.agent)
    for message in (b"5 1", b"of another kind", b"6 0"):
        reader_agent.notify(peer, message)
    found = until(server.next_released)
    while len(found.leases) < 2:
        found = LeasesReleased(3, found.leases + until(server.next_released).leases)
    assert found == LeasesReleased(3, [(5, 1), (6, 0)])
    server.close()
    assert len(fake.agents) == 2


def test_the_library_may_fail_for_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FakeNixl(monkeypatch)
    agent = NixlAgent()
    problems = [TransferError("NIXL could not poll")]

    def poll() -> list[bytes]:
        if problems:
            raise problems.pop()
        return [b"1 2"]

    monkeypatch.setattr(agent, "poll", poll)
    with caplog.at_level(logging.WARNING):
        server = LeaseServer(
            agent, f"ipc://{tmp_path}/kv", 0, [BlockRows([torch.rand(8, 4)], 8, 16)], {}, b""
        )
        assert until(server.next_released).leases[0] == (1, 2)
    assert "NIXL could not poll" in caplog.text
    server.close()


def test_a_port_in_use_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While a server replaces another one, both are there."""
    FakeNixl(monkeypatch)
    monkeypatch.setattr(lease_server, "_BIND_AGAIN_S", 0.01)
    groups = [BlockRows([torch.rand(8, 4)], 8, 16)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        earlier = context.socket(zmq.ROUTER)
        port = earlier.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        with caplog.at_level(logging.WARNING):
            server = LeaseServer(NixlAgent(), endpoint, 0, groups, {}, b"later")
        assert f"{endpoint} is in use" in caplog.text
        earlier.close(linger=0)
        reader.connect(endpoint)

        def answer() -> bytes | None:
            reader.send_multipart([b"", encode(AskLayout())])  # the earlier socket may have got the last one
            return reader.recv_multipart()[-1] if reader.poll(100) else None

        layout: PeerLayout = Decoder[PeerLayout](PeerLayout).decode(until(answer))
    assert layout.secret == b"later"
    server.close()


def test_an_address_that_is_gone_for_a_while_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A port was in use at the start, and at a later try the host has lost the address."""
    fake = FakeNixl(monkeypatch)
    monkeypatch.setattr(lease_server, "_BIND_AGAIN_S", 0.01)
    bind = LeaseServer._bind
    results: list[bool | None] = [False, None]

    def bind_or_not(self: LeaseServer) -> bool:
        if not results:
            return bind(self)
        if (result := results.pop(0)) is None:
            raise TransferError("KV blocks cannot be offered")
        return result

    monkeypatch.setattr(LeaseServer, "_bind", bind_or_not)
    agent, reader = NixlAgent(), NixlAgent()
    groups = [BlockRows([torch.rand(8, 4)], 8, 16)]
    with caplog.at_level(logging.WARNING):
        server = LeaseServer(agent, f"ipc://{tmp_path}/kv", 0, groups, {}, b"")
        fake.agents[reader.name].send_notif(agent.name, b"3 0")
        assert until(server.next_released).leases == [(3, 0)]
    assert "KV blocks cannot be offered" in caplog.text and not results
    server.close()


def test_an_address_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNixl(monkeypatch)
    with pytest.raises(
        TransferError, match=r"192\.0\.2\.1:5600.*give an address of this host in --kv-transfer-host"
    ):
        LeaseServer(
            NixlAgent(), "tcp://192.0.2.1:5600", 0, [BlockRows([torch.rand(8, 4)], 8, 16)], {}, b"secret"
        )
