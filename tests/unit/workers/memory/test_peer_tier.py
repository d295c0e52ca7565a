"""Blocks of another engine arrive whole, or are missing: a late, failed or overwritten read is never used."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from atom.shared.messages.kv_peers import Lease
from atom.shared.messages.kv_tiers import BlockCopy, BlocksCopied, CopyBlocks
from atom.shared.utils.lease_seal import engine_name, seal
from parallel.transfer.nixl_agent import NixlAgent
from tests.helpers.engine.fake_nixl import FakeNixl
from tests.helpers.engine.until import until
from workers.memory import peer_tier
from workers.memory.block_rows import BlockRows
from workers.memory.lease_server import LeaseServer
from workers.memory.peer_tier import PeerTier, decode_release, encode_release, rank_address
from workers.memory.tier_copier import TierCopier

CPU = torch.device("cpu")
SAME = {"block size": "16"}
RANK = 1
SECRET = b"of the engine"


def groups(*tensors: torch.Tensor) -> list[BlockRows]:
    return [BlockRows([tensor], len(tensor), tensor[0].nbytes) for tensor in tensors]


def sealed(address: str, slot: int = 0, generation: int = 0, secret: bytes = SECRET) -> Lease:
    lease = Lease(address, slot, generation, engine_name(secret), b"what it is for")
    return msgspec.structs.replace(lease, seal=seal(lease, secret))


class Engines:
    """One that has blocks, and the tier of another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path):
        monkeypatch.setattr(peer_tier, "_READ_S", 0.05)
        monkeypatch.setattr(peer_tier, "_ASK_S", 3.0)
        monkeypatch.setattr(peer_tier, "_PAUSE_S", 0.0)
        self.fake = FakeNixl(monkeypatch)
        self.source = torch.rand(8, 2, 4), torch.rand(5, 3, 4)
        self.lease = sealed(f"ipc://{directory}/kv", 7)
        self.agent = NixlAgent()
        endpoint = rank_address(self.lease.address, RANK)
        self.server = LeaseServer(self.agent, endpoint, RANK, groups(*self.source), SAME, SECRET)
        self.tier = PeerTier(NixlAgent(), RANK, [32, 48], CPU, dict(SAME))

    def read(self, group: int, slots: Sequence[int], lease: Lease | None = None) -> list[int]:
        """Indices of failed ones; the others are compared."""
        tensor = self.source[group]
        rows = torch.empty(len(slots), tensor[0].nbytes, dtype=torch.uint8)
        copies = [BlockCopy(group, 0, slot) for slot in slots]
        failed = self.tier.read_from(lease or self.lease, group, copies, rows)
        for index, slot in enumerate(slots):
            if index not in failed:
                assert torch.equal(rows[index].view(torch.float32), tensor[slot].flatten())
        return failed


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engines]:
    made = Engines(monkeypatch, tmp_path)
    yield made
    made.tier.close()
    made.server.close()


def test_blocks_of_each_kind_are_read(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.read(0, [5, 0, 7]) == [] and engines.read(1, [4, 4]) == []
    assert engines.fake.bytes_read == 3 * 32 + 2 * 48 + 2 * 8
    engines.tier._free = [
        dataclasses.replace(target, buffer=target.buffer[:64]) for target in engines.tier._free
    ]
    assert engines.read(0, [1, 2, 3, 4, 5]) == []  # two blocks at a time


def test_the_copier_writes_them_to_the_cache(engines: Engines) -> None:
    cache = torch.zeros(8, 2, 4)
    copier = TierCopier(groups(cache, torch.zeros(5, 3, 4)), [engines.tier], RANK)
    copier.submit(CopyBlocks(3, 0, True, [BlockCopy(0, 2, 6), BlockCopy(0, 3, 5)], lease=engines.lease))
    assert until(copier.next_copied) == BlocksCopied(RANK, 3)
    assert torch.equal(cache[2], engines.source[0][6]) and torch.equal(cache[3], engines.source[0][5])
    assert not cache[4:].any()
    copier.close()


def test_a_lease_that_ends_meanwhile_is_a_miss(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    assert engines.read(0, [1, 2]) == []
    engines.fake.after_read.append(lambda: engines.server.end([engines.lease.slot]))
    with caplog.at_level(logging.WARNING):
        assert engines.read(0, [1, 2]) == [0, 1]
    assert "did not hold the blocks until they were read" in caplog.text
    assert engines.read(0, [1, 2], sealed(engines.lease.address, engines.lease.slot, 1)) == []
    assert engines.read(0, [1], sealed(engines.lease.address, 8)) == []


def test_a_late_read_keeps_its_buffer(engines: Engines) -> None:
    engines.fake.is_stuck = True
    assert engines.read(0, [1]) == [0] and engines.read(0, [2]) == [0]
    assert engines.fake.num_reads == 1 and len(engines.tier._free) == 1  # it has no second buffer
    assert engines.tier._peers  # the connection is kept: the library tells by it when a read is over
    engines.fake.is_stuck = False
    assert engines.read(0, [4]) == [] and len(engines.tier._free) == 2


@pytest.mark.parametrize("part", ["blocks", "word"])
def test_others_are_read_while_one_engine_does_not_respond(engines: Engines, part: str) -> None:
    other = sealed(f"{engines.lease.address}-other", 7)
    agent = NixlAgent()
    server = LeaseServer(
        agent, rank_address(other.address, RANK), RANK, groups(*engines.source), SAME, SECRET
    )
    if part == "blocks":
        engines.fake.stuck.add(engines.agent.name)
    else:
        engines.fake.after_read.append(lambda: engines.fake.stuck.add(engines.agent.name))
    for _ in range(3):
        assert engines.read(0, [1]) == [0]
        assert engines.read(0, [1, 2], other) == []
    engines.fake.stuck = {engines.agent.name, agent.name}
    assert engines.read(0, [1], other) == [0] and engines.read(0, [1]) == [0]
    engines.fake.stuck.clear()
    assert engines.read(0, [1]) == [] and engines.read(0, [1], other) == []
    server.close()


def test_an_engine_is_read_again_that_was_started_again_during_a_late_read(engines: Engines) -> None:
    engines.fake.stuck.add(engines.agent.name)
    assert engines.read(0, [1]) == [0]
    engines.server.close()
    endpoint = rank_address(engines.lease.address, RANK)
    engines.server = LeaseServer(NixlAgent(), endpoint, RANK, groups(*engines.source), SAME, b"later")
    later = sealed(engines.lease.address, secret=b"later")
    assert engines.read(0, [1], later) == [0]  # the library may still write to the buffer
    del engines.fake.agents[engines.agent.name]
    assert engines.read(0, [1], later) == [] and len(engines.tier._free) == 2


def test_a_late_word_keeps_its_place(engines: Engines) -> None:
    engines.fake.after_read.append(lambda: setattr(engines.fake, "is_stuck", True))
    assert engines.read(0, [1]) == [0]
    engines.fake.is_cut = True
    engines.fake.is_stuck = False
    assert engines.read(0, [1]) == [0]
    engines.fake.is_cut = False
    assert engines.read(0, [1]) == []


def test_a_cut_connection_is_opened_again(engines: Engines) -> None:
    assert engines.read(0, [1]) == []
    engines.fake.is_cut = True
    assert engines.read(0, [1]) == [0] and not engines.tier._peers
    engines.fake.is_cut = False
    assert engines.read(0, [1]) == []


def test_an_engine_that_has_ended_is_not_asked_again_at_once(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_tier, "_PAUSE_S", 60.0)
    gone = sealed(engines.lease.address + "-gone")
    assert engines.read(0, [1], gone) == [0]
    engines.tier._no_first_until = 0.0
    monkeypatch.setattr(PeerTier, "_ask", lambda *_: pytest.fail("it is asked"))
    assert engines.read(0, [1], gone) == [0]
    engines.tier.release(gone)


def test_requests_do_not_make_a_pause_longer(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_tier, "_PAUSE_S", 60.0)
    now = [1000.0]
    monkeypatch.setattr(peer_tier.time, "monotonic", lambda: now[0])
    engines.fake.is_cut = True
    assert engines.read(0, [1]) == [0]
    engines.fake.is_cut = False
    for _ in range(2):
        now[0] += 31.0
        assert engines.read(0, [1]) == ([0] if now[0] < 1060.0 else [])
    engines.tier.release(engines.lease)


def test_engines_that_are_not_there_do_not_keep_others_waiting(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients choose the addresses, within limits."""
    monkeypatch.setattr(peer_tier, "_PAUSE_S", 60.0)
    assert engines.read(0, [1]) == []
    assert engines.read(0, [1], sealed(engines.lease.address + "-gone")) == [0]
    monkeypatch.setattr(peer_tier, "_MOST_ASKED", 4)
    other = sealed(f"{engines.lease.address}-other", 7)
    endpoint = rank_address(other.address, RANK)
    server = LeaseServer(NixlAgent(), endpoint, RANK, groups(*engines.source), SAME, SECRET)
    with monkeypatch.context() as patch:
        patch.setattr(PeerTier, "_ask", lambda *_: pytest.fail("it is waited for"))
        assert engines.read(0, [1], other) == [0]
        asked = engines.tier._asked[other.address]
        assert until(lambda: asked.poll(0) or None)
        for number in range(9):
            assert engines.read(0, [1], sealed(f"{engines.lease.address}-{number}")) == [0]
            assert len(engines.tier._asked) <= 4
        assert engines.read(0, [1], other) == []  # its answer has come meanwhile
    assert asked.closed and other.address not in engines.tier._asked
    server.close()
    engines.tier._forget(engines.lease.address)
    assert engines.read(0, [1]) == []  # it has responded before


def test_blocks_that_the_engine_does_not_have(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert engines.read(0, [7, 8]) == [0, 1]
    assert "the engine has no such blocks" in caplog.text


def test_a_forged_lease_is_neither_read_nor_released(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    assert engines.read(0, [1]) == []
    reads = engines.fake.num_reads
    forged = msgspec.structs.replace(engines.lease, statement=b"other blocks")
    with caplog.at_level(logging.WARNING):
        assert engines.read(0, [2], forged) == [0]
    assert "has not granted the lease" in caplog.text
    engines.tier.release(forged)
    engines.tier.release(engines.lease)
    assert engines.fake.num_reads == reads and until(engines.server.next_released).leases == [(7, 0)]
    assert engines.read(0, [2]) == []  # the engine itself is not at fault


def test_an_engine_that_was_started_again_is_asked_again(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    assert engines.read(0, [1]) == []
    peer = engines.tier._peers[engines.lease.address]
    earlier = sealed(engines.lease.address, secret=b"of an earlier life")
    with caplog.at_level(logging.WARNING):
        assert engines.read(0, [1], earlier) == [0]
    assert "has been started again" in caplog.text
    assert engines.tier._peers[engines.lease.address] is peer  # it is the same life
    engines.server.close()
    endpoint = rank_address(engines.lease.address, RANK)
    engines.server = LeaseServer(NixlAgent(), endpoint, RANK, groups(*engines.source), SAME, b"later")
    later = sealed(engines.lease.address, secret=b"later")
    assert engines.read(0, [1], later) == [] and engines.read(0, [1]) == [0]


def test_another_layout_is_a_miss_by_name(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    engines.tier._own["block size"] = "32"
    with caplog.at_level(logging.WARNING):
        assert engines.read(0, [1]) == [0]
    assert "another layout: block size is 16, here 32" in caplog.text
    engines.tier._own["dtype"] = "torch.float16"
    assert engines.read(0, [1]) == [0] and engines.fake.num_reads == 0


def test_a_damaged_description_is_a_miss(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = engines.tier._ask(rank_address(engines.lease.address, RANK))
    damaged = type(layout)(b"damaged", *(getattr(layout, name) for name in layout.__struct_fields__[1:]))
    monkeypatch.setattr(PeerTier, "_ask", lambda *_: damaged)
    assert engines.read(0, [1]) == [0]


def test_no_more_engines_are_known_than_there_is_room_for(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_tier, "_MOST_PEERS", 1)
    assert engines.read(0, [1]) == []
    other = f"{engines.lease.address}-other"
    server = LeaseServer(NixlAgent(), rank_address(other, RANK), RANK, groups(*engines.source), SAME, SECRET)
    assert engines.read(0, [1], sealed(other)) == [] and list(engines.tier._peers) == [other]
    server.close()


def test_ranks_of_an_address() -> None:
    assert rank_address("ipc://run/kv", 2) == "ipc://run/kv-2"
    assert rank_address("tcp://10.0.0.7:5600", 2) == "tcp://10.0.0.7:5602"


def test_releases_are_numbers() -> None:
    assert decode_release(encode_release(Lease("ipc://kv", 3, 4))) == (3, 4)
    assert decode_release(b"3") is None and decode_release(b"\xff a") is None
    for other in (b"-1 0", b"3 -1", b"4096 0", b"3 99999999999999999999"):  # no message has the last one
        assert decode_release(other) is None
