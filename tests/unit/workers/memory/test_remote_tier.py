"""Blocks in a Redis server: shared, and never trusted; a server that fails costs a moment, and blocks."""

import logging
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from atom.shared.messages.kv_tiers import BlockCopy
from atom.shared.utils.redis_client import RedisClient
from tests.helpers.servers.fake_redis import FakeRedis, fake_redis
from workers.memory import remote_tier
from workers.memory.remote_tier import RemoteTier

A, B, C = (bytes([number]) * 8 for number in (1, 2, 3))
ROWS = torch.arange(48, dtype=torch.uint8).view(3, 16)
SEED = 7


@pytest.fixture
def server() -> Iterator[FakeRedis]:
    with fake_redis() as made:
        yield made


@pytest.fixture
def make(server: FakeRedis) -> Iterator[Callable[..., RemoteTier]]:
    clients = []

    def made(name: str = "model-0", seed: int = SEED) -> RemoteTier:
        clients.append(RedisClient(server.url))
        return RemoteTier(clients[-1], name, 2, seed)

    yield made
    for client in clients:
        client.close()


@pytest.fixture
def tier(make: Callable[..., RemoteTier]) -> RemoteTier:
    made = make()
    assert made.write(0, copies(A, B, C), ROWS) == []
    return made


def copies(*digests: bytes, replaced: bytes = b"") -> list[BlockCopy]:
    return [BlockCopy(0, 5, 0, digest, b"input" + digest, replaced) for digest in digests]


def read(tier: RemoteTier, *digests: bytes) -> tuple[list[int], torch.Tensor]:
    rows = torch.zeros(len(digests), 16, dtype=torch.uint8)
    return tier.read(0, copies(*digests), rows), rows


def test_another_server_of_the_same_model_finds_blocks(
    tier: RemoteTier, make: Callable[..., RemoteTier]
) -> None:
    other = make()
    new = bytes([9]) * 8
    assert other.present(A + new + B) == [b"\1\0\1", b"\0\0\0"]
    failed, rows = read(other, C, new, A)
    assert failed == [1] and torch.equal(rows[[0, 2]], ROWS[[2, 0]])
    assert make("other-model-0").present(A) == [b"\0", b"\0"]


def test_a_block_is_sent_once(server: FakeRedis, tier: RemoteTier, make: Callable[..., RemoteTier]) -> None:
    server.commands.clear()
    assert make().write(0, copies(A, bytes(8)), ROWS[:2]) == []
    assert server.commands.count(b"SET") == 1 and server.commands.count(b"TOUCH") == 2


def test_replaced_blocks_are_removed(server: FakeRedis, tier: RemoteTier) -> None:
    assert tier.write(0, copies(bytes(8), replaced=A), ROWS[:1]) == []
    assert read(tier, A)[0] == [0] and read(tier, B, C)[0] == []


def test_large_reads_and_writes_come_in_parts(
    server: FakeRedis, tier: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "_PART_BYTES", 32)
    digests = [bytes([number]) * 8 for number in range(20, 25)]
    rows = torch.arange(80, dtype=torch.uint8).view(5, 16)
    assert tier.write(0, copies(*digests), rows) == []
    failed, found = read(tier, *digests)
    assert failed == [] and torch.equal(found, rows)


@pytest.mark.parametrize(
    "damage", [lambda value: value[:-1], lambda value: value + b"x", lambda value: value[:-1] + b"x", None]
)
def test_damaged_blocks_are_misses(
    server: FakeRedis, tier: RemoteTier, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    first, second, _ = sorted(server.blocks())
    server.data[first] = damage(server.data[first]) if callable(damage) else server.data[second]
    with caplog.at_level(logging.WARNING):
        failed, rows = read(tier, A, B, C)
    assert failed == [0] and torch.equal(rows[1:], ROWS[1:])
    assert first not in server.data and len(server.blocks()) == 2
    assert len(caplog.records) == 1 and "is damaged, and is computed again" in caplog.text


def test_a_full_server_costs_the_blocks_that_did_not_fit(
    server: FakeRedis, tier: RemoteTier, caplog: pytest.LogCaptureFixture
) -> None:
    server.is_full = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert tier.write(0, copies(bytes(8), A), ROWS[:2]) == [0]
    assert read(tier, A)[0] == []
    assert len(caplog.records) == 1 and "refuses KV blocks: OOM" in caplog.text


@pytest.mark.parametrize("fault", ["is_stalled", "is_trickling", "gone"])
def test_a_server_that_fails_costs_a_moment_once(
    server: FakeRedis,
    tier: RemoteTier,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    monkeypatch.setattr(remote_tier, "_EXCHANGE_S", 0.2)
    if fault == "gone":
        server.shutdown()
        server.server_close()
        server.disconnect()
    else:
        setattr(server, fault, True)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert read(tier, A, B, C)[0] == [0, 1, 2]
        assert time.monotonic() - started < 30
        server.commands.clear()
        assert tier.present(A + B) == [b"\0\0", b"\0\0"]
        assert tier.write(0, copies(bytes(8)), ROWS[:1]) == [0]
    assert not server.commands, "it was asked again at once"
    assert len(caplog.records) == 1 and "blocks that are there are computed" in caplog.text


def test_a_server_that_recovers_is_asked_again(
    server: FakeRedis, tier: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_tier, "_EXCHANGE_S", 0.2)
    monkeypatch.setattr(remote_tier, "_PAUSE_S", 0.1)
    server.is_stalled = True
    assert read(tier, A)[0] == [0]
    server.is_stalled = False
    time.sleep(0.2)
    monkeypatch.undo()
    assert read(tier, A)[0] == []


def test_a_connection_that_the_server_closed_is_opened_again(server: FakeRedis, tier: RemoteTier) -> None:
    server.disconnect()
    time.sleep(0.1)
    assert read(tier, A)[0] == []


def test_servers_that_met_under_other_digests_are_told(
    tier: RemoteTier, make: Callable[..., RemoteTier], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert make(seed=8).present(A) == [b"\1", b"\0"]
    assert "has blocks under other digests" in caplog.text
