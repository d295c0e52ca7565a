"""Expectations are read after authentication, whatever bytes they have."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import FinishReason
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, Client, running_frontend
from tests.helpers.servers.wire import error_of, post_head, raw_response, read_response

KEY = "Authorization: Bearer key"
BODY = b'{"model": "org/tiny", "prompt": "x"}'


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("checkpoint"))
    script = Script([5, 6, 7], FinishReason.MAX_TOKENS)
    directory: Path = tmp_path_factory.mktemp("core")
    with (
        FakeCore(directory, lambda _: script) as core,
        running_frontend(core, checkpoint, ServerConfig(api_key="key"), wait=False) as client,
    ):
        core.wait_for(lambda: client.exchange("GET", "/ready")[0] == 200)
        yield client


@pytest.mark.parametrize("value", ["miracles", "\xff", "\xed\xa0\x80", "x" * 3000, "100-continue, more"])
def test_another_expectation_is_a_417_with_a_key_and_a_401_without(client: Client, value: str) -> None:
    for key, status in ((KEY, 417), ("X: y", 401)):
        head = post_head(len(BODY), key, f"Expect: {value}").decode().encode("latin-1")
        found, _, body = raw_response(client, head + BODY)
        error = error_of(body)
        assert found == status and len(body) < 500
        assert ("100-continue" in error["message"]) == (status == 417)


def test_a_client_that_waits_is_told_to_continue_once_it_has_shown_its_key(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port), DEADLINE_S) as connection:
        connection.sendall(post_head(len(BODY), KEY, "Expect: 100-Continue"))
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert read_response(connection)[0] == 200
    with socket.create_connection(("127.0.0.1", client.port), DEADLINE_S) as connection:
        connection.sendall(post_head(len(BODY), "Expect: 100-continue"))
        assert read_response(connection)[0] == 401


def test_a_body_that_is_too_large_is_not_asked_for(client: Client) -> None:
    status, _, body = raw_response(client, post_head(9 << 20, KEY, "Expect: 100-continue"))
    assert status == 413 and "--max-body-bytes" in error_of(body)["message"]


@pytest.mark.parametrize("path", ["/unknown", "/health"])
def test_other_paths_answer_in_their_own_way(client: Client, path: str) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\n{KEY}\r\nExpect: 100-continue\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", client.port), DEADLINE_S) as connection:
        connection.sendall(head)
        received = b""
        while b"HTTP/1.1 " not in received.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"):
            received += connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
