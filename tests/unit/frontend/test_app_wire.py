"""Malformed HTTP, slow clients, and clients that do not read their responses."""

import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from frontend.api.generation.generation import Generation
from frontend.http.limits import HttpLimits
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, Client, running_frontend
from tests.helpers.servers.wire import error_of, metric, post_head, raw_response, read_response

TOKENIZER = tiny_tokenizer.tokenizer()
FLOOD = [5] * 200_000
STALLED, CHOICES = 200, 8
SHORT = HttpLimits(
    body_deadline_s=0.3, head_deadline_s=0.5, keepalive_s=0.5, write_deadline_s=0.5, silence_s=0.2
)


def script_by_prompt(request: AddRequest) -> Script:
    text = TOKENIZER.decode(unpack_ids(request.prompt_ids))
    if "silence" in text:
        return Script([], reason=None)
    if "flood" in text:
        return Script(FLOOD, reason=None)
    return Script([5, 6, 7], FinishReason.MAX_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("checkpoint"), max_model_len=200_000)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCore]:
    with FakeCore(tmp_path_factory.mktemp("core"), script_by_prompt, max_model_len=200_000) as core:
        yield core


@pytest.fixture(scope="module")
def client(core: FakeCore, checkpoint: Checkpoint) -> Iterator[Client]:
    with running_frontend(core, checkpoint) as client:
        yield client


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Iterator[Client]:
    """A server with short deadlines."""
    with (
        FakeCore(tmp_path_factory.mktemp("impatient"), script_by_prompt, max_model_len=200_000) as core,
        running_frontend(core, checkpoint, limits=SHORT, send_buffer=4096) as client,
    ):
        yield client


# Malformed HTTP


JUNK = [
    b"hello\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls?\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nno colon here\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nBad\x00Name: 1\r\n\r\n",
    b"G\x80T / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"b" * (1 << 20) + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(200)) + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: nine\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
]


@pytest.mark.parametrize("data", JUNK, ids=range(len(JUNK)))
def test_malformed_http_gets_an_error_object(client: Client, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", client.port), DEADLINE_S) as connection:
        with contextlib.suppress(ConnectionError):  # the response may come before all was sent
            connection.sendall(data)
        status, head, body = read_response(connection)
        assert 400 <= status < 500
        assert error_of(body)["type"] == "invalid_request_error"
        assert b"X-Request-Id" in head
    assert client.call("GET", "/health")[0] == 200


def test_overlong_heads_are_a_431(client: Client) -> None:
    status, _, body = raw_response(client, b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"b" * 10_000 + b"\r\n\r\n")
    assert (status, "too long" in error_of(body)["message"]) == (431, True)


def test_an_unknown_expectation_is_a_417(client: Client) -> None:
    status, head, body = raw_response(client, post_head(2, "Expect: miracles", "X-Request-Id: mine"))
    assert b"X-Request-Id: mine\r\n" in head
    assert (status, error_of(body)["type"]) == (417, "invalid_request_error")


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("Transfer-Encoding: chunked", b"zz\r\n"),
        ("Transfer-Encoding: chunked", b"5\r\nabcdefgh\r\n0\r\n\r\n"),
        ("Content-Encoding: gzip\r\nContent-Length: 9", b"not gzip!"),
        ("Content-Encoding: deflate\r\nContent-Length: 4", b"\xff\xff\xff\xff"),
        ("Content-Length: 4", b"\xff\xfe{}"),
        ("Content-Length: 0", b""),
    ],
)
def test_malformed_bodies_are_a_400(client: Client, head: str, body: bytes) -> None:
    request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body
    status, _, response = raw_response(client, request)
    assert status == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_paths_that_are_no_text(client: Client) -> None:
    for path in (b"/v1/models/\xff\xfe", b"/\xc3\x28", b"/%ff%00", b"/v1/models/%ed%a0%80"):
        status, _, body = raw_response(client, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status in (400, 404)
        error_of(body)


def test_quoted_input_is_clipped(client: Client) -> None:
    status, data, _ = client.exchange("POST", "/v1/completions", {"x" * 100_000: 1})
    assert status == 400
    assert len(data) < 3000


def test_any_content_type_is_read_as_json(client: Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "nonsense", ""):
        headers = {"Content-Type": kind}
        assert client.exchange("POST", "/v1/completions", {"prompt": "x"}, headers=headers)[0] == 200


def test_garbage_after_a_request_affects_only_its_connection(client: Client) -> None:
    body = b'{"prompt": "x"}'
    status, _, response = raw_response(client, post_head(len(body)) + body + b"\x00\xff garbage\r\n\r\n" * 50)
    assert status == 400  # what came together is refused together
    error_of(response)
    assert client.call("GET", "/health")[0] == 200


def test_truncated_bodies_start_no_request(client: Client, core: FakeCore) -> None:
    before = len(core.requests)
    for data in (
        post_head(1000) + b'{"prompt": ',
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"pro',
        b"POST /v1/compl",
    ):
        with socket.create_connection(("127.0.0.1", client.port), DEADLINE_S) as connection:
            connection.sendall(data)
    assert client.call("GET", "/health")[0] == 200
    assert len(core.requests) == before


# Slow clients


def test_a_body_that_does_not_arrive_is_a_408(impatient: Client) -> None:
    status, _, body = raw_response(impatient, post_head(1000) + b'{"pro')
    assert (status, "0.3 s" in error_of(body)["message"]) == (408, True)


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_connections_without_a_request_are_closed(impatient: Client, start: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), DEADLINE_S) as connection:
        begun = time.monotonic()
        connection.sendall(start)
        while time.monotonic() - begun < DEADLINE_S:
            time.sleep(0.02)
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"a" if start else b"")
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                if connection.recv(1) == b"":
                    break
        else:
            pytest.fail("still open")
    assert time.monotonic() - begun > 0.3


def test_a_silent_stream_sends_comments(impatient: Client) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), DEADLINE_S) as connection:
        body = b'{"prompt": "silence", "stream": true}'
        connection.sendall(post_head(len(body)) + body)
        received = b""
        while received.count(b": keep-alive\n\n") < 3:
            received += connection.recv(4096)
    assert b"data:" not in received


def test_comments_end_with_the_stream(impatient: Client) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), DEADLINE_S) as connection:
        body = b'{"prompt": "x", "stream": true}'
        connection.sendall(post_head(len(body), "Connection: close") + body)
        received = b""
        while piece := connection.recv(4096):
            received += piece
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_clients_that_do_not_read_are_disconnected(impatient: Client) -> None:
    stalled = metric(impatient, "atom:stalled_clients_total")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(DEADLINE_S)
        connection.connect(("127.0.0.1", impatient.port))
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        deadline = time.monotonic() + DEADLINE_S
        while metric(impatient, "atom:stalled_clients_total") == stalled:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_stalled_clients_cost_little_and_are_disconnected_alone(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    limits = replace(SHORT, body_deadline_s=10.0, write_deadline_s=2.0)
    body = json.dumps({"prompt": "flood", "stream": True, "max_tokens": 150_000, "n": CHOICES}).encode()
    process, server = psutil.Process(), ServerConfig(max_queued_requests=STALLED * CHOICES)
    with (
        FakeCore(tmp_path, script_by_prompt, max_model_len=200_000, step_s=0.05) as core,
        running_frontend(core, checkpoint, server, limits=limits, send_buffer=4096) as client,
        contextlib.ExitStack() as stack,
    ):
        before = process.memory_info().rss
        for _ in range(STALLED):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", client.port))
            connection.sendall(post_head(len(body)) + body)
        core.wait_for(lambda: len(core.requests) == STALLED * CHOICES)
        stalled = {request.request_ids[0] for request in core.requests}
        growth = []
        deadline = time.monotonic() + 4 * DEADLINE_S
        while not stalled <= set(core.aborted) or len(growth) <= 5:
            assert time.monotonic() < deadline
            assert client.post("/v1/completions", prompt="x")[0] == 200
            growth.append(process.memory_info().rss - before)
        assert metric(client, "atom:stalled_clients_total") == STALLED
    assert max(growth) < 50 << 20


def test_an_exception_in_a_stream_ends_it_with_an_error_event(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def frames(*_: object) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise KeyError("a secret of the implementation")

    monkeypatch.setattr(Generation, "stream", frames)
    status, data, _ = client.exchange("POST", "/v1/completions", {"prompt": "x", "stream": True})
    first, last, done, rest = data.decode().split("\n\n")
    assert (status, first, done, rest) == (200, "data: 1", "data: [DONE]", "")
    assert error_of(last.removeprefix("data: ").encode())["code"] == "internal_error"
    assert "secret" not in last
