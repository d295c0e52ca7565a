"""Keep-alive, half-closed connections, disconnects and errors before the first token."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web

from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from frontend.api.models.service import ModelService
from frontend.engine_client.client import EngineClient
from frontend.errors import UnavailableError
from frontend.http import connections
from frontend.http.limits import HttpLimits
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, Client, running_frontend
from tests.helpers.servers.wire import post_head, read_response

TOKENIZER = tiny_tokenizer.tokenizer()
KEEPALIVE_S = 3.0
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


def script(request: AddRequest) -> Script:
    if "silence" in TOKENIZER.decode(unpack_ids(request.prompt_ids)):
        return Script([], reason=None)
    return Script([70] * 100, FinishReason.MAX_TOKENS)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCore]:
    with FakeCore(tmp_path_factory.mktemp("core"), script, step_s=0.005) as core:
        yield core


@pytest.fixture(scope="module")
def client(core: FakeCore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("checkpoint"))
    with running_frontend(core, checkpoint, limits=HttpLimits(keepalive_s=KEEPALIVE_S)) as client:
        yield client


def connect(client: Client) -> socket.socket:
    return socket.create_connection(("127.0.0.1", client.port), 2 * DEADLINE_S)


def completion(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "x", **fields}).encode()
    return post_head(len(body)) + body


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


# Keep-alive


@pytest.mark.parametrize("first_bytes", [len(GET), 20])
def test_a_request_that_arrived_in_time_is_served_by_a_busy_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch, first_bytes: int
) -> None:
    """Both the idle timer and bytes of a request, or of a part of its head, wait for the event loop."""
    loops: list[asyncio.AbstractEventLoop] = []
    list_models = ModelService.list

    def list_and_keep_loop(service: ModelService) -> Any:
        loops.append(asyncio.get_running_loop())
        return list_models(service)

    monkeypatch.setattr(ModelService, "list", list_and_keep_loop)
    is_blocked, is_sent = threading.Event(), threading.Event()

    def block() -> None:
        is_blocked.set()
        is_sent.wait(DEADLINE_S)
        time.sleep(KEEPALIVE_S)

    with connect(client) as connection:
        connection.sendall(GET)
        assert read_response(connection)[0] == 200
        loops[0].call_soon_threadsafe(block)
        assert is_blocked.wait(DEADLINE_S)
        connection.sendall(GET[:first_bytes])
        is_sent.set()
        assert client.call("GET", "/health")[0] == 200  # the loop goes on
        connection.sendall(GET[first_bytes:])
        assert read_response(connection)[0] == 200


def test_idle_connections_are_closed(client: Client) -> None:
    with connect(client) as connection:
        connection.sendall(GET)
        assert read_response(connection)[0] == 200
        assert connection.recv(1) == b""


# Many small chunks


def test_bytes_are_parsed_in_pieces_with_turns_for_other_tasks(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one byte, and pipelined requests after them, from a client that then closes its side."""
    calls: list[tuple[int, int]] = []
    turns, parse = 0, web.RequestHandler.data_received

    def turn() -> None:
        nonlocal turns
        turns += 1

    def observed_parse(connection: web.RequestHandler, data: bytes) -> None:
        if data:
            calls.append((len(data), turns))
            connection._loop.call_soon(turn)
        parse(connection, data)

    monkeypatch.setattr(web.RequestHandler, "data_received", observed_parse)
    body = b'{"prompt":"x"' + b" " * 300_000 + b"}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    request = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    with connect(client) as connection:
        sender = threading.Thread(target=connection.sendall, args=(request * 2 + GET * 3,))
        sender.start()
        sender.join(DEADLINE_S)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 5
    assert sum(size for size, _ in calls) == len(request * 2 + GET * 3)
    assert max(size for size, _ in calls) <= 64 * 1024
    full = [at for size, at in calls if size >= 32 * 1024]
    assert all(before < after for before, after in pairwise(full))


# Half-closed connections


@pytest.mark.parametrize("stream", [True, False])
def test_a_half_closed_client_gets_its_response(client: Client, stream: bool) -> None:
    with connect(client) as connection:
        connection.sendall(completion(stream=stream))
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)
    while received.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
        received = received.partition(b"\r\n\r\n")[2]
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else json.loads(body)["choices"]


def test_pipelined_requests_of_a_half_closed_client_are_all_served(client: Client) -> None:
    with connect(client) as connection:
        connection.sendall(GET * 3)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 3


def test_a_half_closed_connection_without_a_complete_request_is_closed(client: Client) -> None:
    for start in (b"", GET[:20], completion()[:-5]):
        with connect(client) as connection:
            connection.sendall(start)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == b""


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_with_its_request_aborts_it(
    client: Client, core: FakeCore, stream: bool
) -> None:
    """The request and the end of the connection arrive together."""
    core.requests.clear()
    with connect(client) as connection:
        connection.sendall(completion(prompt="silence", stream=stream, n=2))
    core.wait_for(lambda: len(core.requests) == 2)
    core.wait_for(lambda: {request.request_ids[0] for request in core.requests} <= set(core.aborted))


# Errors


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_dies_before_the_first_token_is_named(
    client: Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnavailableError("the engine is gone: killed", code="engine_dead")

    monkeypatch.setattr(EngineClient, "open", fail)
    status, data, _ = client.exchange("POST", "/v1/completions", {"prompt": "x", "stream": stream})
    if stream:
        event, done = data.strip().split(b"\n\n")
        assert (status, done) == (200, b"data: [DONE]")
        data = event.removeprefix(b"data: ")
    else:
        assert status == 503
    assert json.loads(data)["error"]["code"] == "engine_dead"


def test_an_aiohttp_that_works_in_another_way_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    connections.check_aiohttp()
    monkeypatch.setattr(connections, "_INTERNALS", ("_waiter", "_not_there"))
    with pytest.raises(
        ImportError, match=r"^aiohttp 3\.\S+ does not fit: .* has no _not_there\. Install .*$"
    ):
        connections.check_aiohttp()
