"""POST /v1/requests/{id}/abort, and which ids the status page shows."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, Client, running_frontend

IDS = tiny_tokenizer.tokenizer().encode("one two three", add_special_tokens=False)
KEYS = ("first", "second")


def script(request: AddRequest) -> Script:
    """Three words, and no end."""
    return Script(IDS, None)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A frontend with two keys."""
    directory = tmp_path_factory.mktemp("core")
    with (
        FakeCore(directory, script) as core,
        running_frontend(
            core, tiny_tokenizer.checkpoint(directory), ServerConfig(api_key=",".join(KEYS))
        ) as client,
    ):
        yield client


def headers(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **more}


@contextlib.contextmanager
def running(client: Client, path: str, body: dict[str, Any], key: str = KEYS[0]) -> Iterator[socket.socket]:
    """A stream that has begun, and that only an abort ends."""
    data = json.dumps(body | {"stream": True})
    head = f"Host: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\nContent-Length: {len(data)}"
    with socket.create_connection(("127.0.0.1", client.port), timeout=DEADLINE_S) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n{data}".encode())
        received = b""
        while b" thre" not in received:
            received += connection.recv(65536)
        yield connection


def abort(client: Client, name: str, **sent: str) -> tuple[int, Any]:
    status, body, _ = client.exchange("POST", f"/v1/requests/{name}/abort", headers=sent)
    return status, json.loads(body)


def rest(connection: socket.socket) -> bytes:
    received = b""
    while more := connection.recv(65536):
        received += more
    return received


def test_an_abort_ends_the_stream_with_what_it_has(client: Client) -> None:
    body = {"prompt": "go", "max_tokens": 1000, "n": 2, "request_id": "mine"}
    with running(client, "/v1/completions", body) as connection:
        status, report = abort(client, "cmpl-mine", **headers(KEYS[0]))
        assert (status, report["id"], report["aborted_sequences"]) == (200, "cmpl-mine", 2)
        ending = rest(connection)
        assert ending.count(b'"finish_reason":"length"') == 2 and b"data: [DONE]" in ending
    status, error = abort(client, "cmpl-mine", **headers(KEYS[0]))
    assert status == 404 and "no request 'cmpl-mine' is running" in error["error"]["message"]


def test_a_request_of_another_key_is_not_known(client: Client) -> None:
    body = {"prompt": "go", "max_tokens": 1000, "request_id": "other"}
    with running(client, "/v1/completions", body) as connection:
        assert abort(client, "cmpl-other", **headers(KEYS[1]))[0] == 404
        assert abort(client, "cmpl-other")[0] == 401
        assert abort(client, "cmpl-other", **headers(KEYS[0]))[0] == 200
        rest(connection)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"Origin": "https://example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://x"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://x", "Host": "x"}, 404),
        # A proxy may have changed the Host; the browser has compared the origins.
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://public"}, 404),
        ({}, 404),
    ],
)
def test_pages_of_other_origins_abort_nothing(client: Client, sent: dict[str, str], status: int) -> None:
    assert abort(client, "unknown", **headers(KEYS[0], **sent))[0] == status


def test_an_abort_has_no_fields(client: Client) -> None:
    """The status page sends {}."""
    sent = {"headers": headers(KEYS[0])}
    status, body, _ = client.exchange("POST", "/v1/requests/unknown/abort", {"after_s": 5}, **sent)
    assert status == 400 and b"after_s" in body
    assert client.exchange("POST", "/v1/requests/unknown/abort", {}, **sent)[0] == 404


def test_an_id_is_bounded(client: Client) -> None:
    status, error = abort(client, "x" * 257, **headers(KEYS[0]))
    assert status == 400 and error["error"]["param"] == "id"


def test_the_page_keeps_ids_that_open_stored_responses(client: Client) -> None:
    with running(client, "/v1/responses", {"input": "go", "model": "org/tiny"}):
        found: list[Any] = []
        while [row["is_hidden"] for row in found] != [True]:  # earlier ones may still be shown
            _, body, _ = client.exchange("GET", "/status", headers=headers(KEYS[0]))
            found = json.loads(body)["tick"]["requests"]
    (row,) = found
    assert len(row["id"]) == 13 and row["id"].startswith("resp_")
