"""The connection to a Redis server: URLs, logins, the seed that servers agree on."""

import socket
from contextlib import closing

import pytest

from atom.shared.utils.redis_client import (
    RedisAddress,
    RedisClient,
    RedisError,
    agreed_seed,
    parse_redis_url,
)
from tests.helpers.servers.fake_redis import fake_redis

LARGE = (1 << 64) - 2


def test_urls() -> None:
    assert parse_redis_url("redis://store") == RedisAddress("store", 6379, 0, "", False)
    assert parse_redis_url("rediss://me@[::1]:7000/3") == RedisAddress("::1", 7000, 3, "me", True)
    for url, words in (
        ("http://store", "redis:// or rediss://"),
        ("redis://:secret@store", "set ATOM_KV_OFFLOAD_REMOTE_PASSWORD"),
        ("redis://store:70000", "from 1 to 65535"),
        ("redis://store/keys", "HOST:PORT/DATABASE"),
        ("redis://", "HOST:PORT/DATABASE"),
        ("redis://store?db=1", "HOST:PORT/DATABASE"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_redis_url(url)


def test_the_first_seed_is_that_of_all() -> None:
    with fake_redis() as server, closing(RedisClient(server.url)) as client:
        assert agreed_seed(client, LARGE) == LARGE
        assert agreed_seed(client, 5) == LARGE
        server.data[b"atom-kv:seed"] = b"damaged"
        with pytest.raises(RedisError, match=r"remove all keys atom-kv:\*"):
            agreed_seed(client, 5)


def test_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_KV_OFFLOAD_REMOTE_PASSWORD", "right")
    with fake_redis() as server:
        server.password = b"right"
        client = RedisClient(server.url)
        client.open()
        client.close()
        server.password = b"other"
        with pytest.raises(RedisError, match="refused the login: WRONGPASS"):
            client.open()
        assert not client.is_open


def test_a_server_that_cannot_be_reached() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = RedisClient(f"redis://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(RedisError, match="cannot be reached: .*refused"):
            client.open()


def test_a_reply_that_is_too_long_ends_the_connection() -> None:
    with fake_redis() as server:
        server.data[b"key"] = bytes(10_000)
        client = RedisClient(server.url)
        client.open()
        with pytest.raises(RedisError, match="more than was asked for"):
            list(client.exchange([("GET", "key")], 100, 2.0))
        assert not client.is_open
        client.open()
        value, refused = client.exchange([("GET", "key"), ("NONSENSE",)], 10_000, 2.0)
        assert value == bytes(10_000) and isinstance(refused, Exception)
        client.close()
