"""HTTPS: whole requests, clients that stop reading, clients' certificates, renewal, unusable files."""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import frontend.http.tls
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.server import ServerConfig
from atom.shared.messages.engine import AddRequest, FinishReason, unpack_ids
from frontend.http.limits import HttpLimits
from frontend.http.tls import tls_context
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.certificates import client_context, make_authority, make_certificate
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import DEADLINE_S, Client, running_frontend
from tests.helpers.servers.wire import metric, post_head, read_response

TOKENIZER = tiny_tokenizer.tokenizer()
LIMITS = HttpLimits(write_deadline_s=2.5)


def script(request: AddRequest) -> Script:
    if "flood" in TOKENIZER.decode(unpack_ids(request.prompt_ids)):
        return Script([70] * 150_000, FinishReason.MAX_TOKENS, per_step=10_000)
    return Script([70] * 10, FinishReason.MAX_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """authority.pem; server.pem, .key; other.pem, .key, of the same authority."""
    directory = tmp_path_factory.mktemp("certificates")
    make_authority(directory)
    make_certificate(directory, "server")
    make_certificate(directory, "other")
    return directory


def settings(files: Path, **more: Any) -> ServerConfig:
    return ServerConfig(ssl_certfile=str(files / "server.pem"), ssl_keyfile=str(files / "server.key"), **more)


@contextmanager
def served(
    core_dir: Path,
    checkpoint: Checkpoint,
    server: ServerConfig,
    tls: ssl.SSLContext,
    limits: HttpLimits = LIMITS,
    wait: bool = True,
) -> Iterator[Client]:
    with (
        FakeCore(core_dir, script, max_model_len=200_000) as core,
        running_frontend(core, checkpoint, server, wait, limits, send_buffer=4096, tls=tls) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint, files: Path) -> Iterator[Client]:
    tls = client_context(files / "authority.pem")
    with served(tmp_path_factory.mktemp("core"), checkpoint, settings(files), tls) as client:
        yield client


def connect(client: Client, receive_buffer: int = 1 << 16) -> ssl.SSLSocket:
    assert client.tls is not None
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    plain.settimeout(DEADLINE_S)
    plain.connect(("127.0.0.1", client.port))
    return client.tls.wrap_socket(plain, server_hostname="localhost")


def test_responses_streams_and_errors(client: Client) -> None:
    status, response = client.post("/v1/completions", prompt="x")
    assert (status, response["usage"]["completion_tokens"]) == (200, 10)
    assert len(client.events("/v1/completions", prompt="x")) == 10
    assert client.post("/v1/completions", prompt="x", max_tokens=-1)[0] == 400
    large = ["word " * 10_000] * 8  # several TLS records in and out
    assert client.post("/v1/completions", prompt=large, echo=True, max_tokens=1)[0] == 200


def test_requests_follow_one_another_on_a_connection(client: Client) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    with connect(client) as connection:
        assert connection.selected_alpn_protocol() is None
        for _ in range(5):
            connection.sendall(post_head(len(body)) + body)
            assert read_response(connection)[0] == 200


def test_a_client_that_leaves_is_noticed(client: Client) -> None:
    left = metric(client, "atom:client_disconnects_total")
    body = json.dumps({"prompt": "flood", "max_tokens": 150_000}).encode()
    with connect(client) as connection:
        connection.sendall(post_head(len(body)) + body)
    wait_until(lambda: metric(client, "atom:client_disconnects_total") == left + 1)


def test_a_client_that_does_not_read_is_disconnected(client: Client) -> None:
    stalled = metric(client, "atom:stalled_clients_total")
    body = json.dumps({"prompt": "flood", "stream": True, "max_tokens": 150_000, "n": 8}).encode()
    with connect(client, receive_buffer=4096) as connection:
        connection.sendall(post_head(len(body)) + body)
        wait_until(lambda: metric(client, "atom:stalled_clients_total") == stalled + 1)
        assert client.post("/v1/completions", prompt="x")[0] == 200


def test_connections_without_a_handshake_are_closed(
    tmp_path: Path, checkpoint: Checkpoint, files: Path
) -> None:
    """Those of clients as they are might be, too, if this process stood still: nothing else is asked here."""
    limits, tls = HttpLimits(handshake_deadline_s=0.3), client_context(files / "authority.pem")
    with served(tmp_path, checkpoint, settings(files), tls, limits, wait=False) as client:
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"):
            with socket.create_connection(("127.0.0.1", client.port), DEADLINE_S) as connection:
                begun = time.monotonic()
                with contextlib.suppress(ConnectionError):
                    connection.sendall(sent)
                    while connection.recv(4096):
                        pass
                assert time.monotonic() - begun < limits.head_deadline_s / 2
        wait_until(lambda: is_served(client))


def is_served(client: Client) -> bool:
    try:
        return client.post("/v1/completions", prompt="x")[0] == 200
    except (ssl.SSLError, ConnectionError):
        return False


def test_the_end_of_an_idle_connection_is_not_logged(
    tmp_path: Path, checkpoint: Checkpoint, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits, tls = HttpLimits(keepalive_s=0.05), client_context(files / "authority.pem")
    with served(tmp_path, checkpoint, settings(files), tls, limits) as client, connect(client) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(connection)[0] == 200
        assert connection.recv(1) == b""
        connection.unwrap().close()
        assert client.post("/v1/completions", prompt="x")[0] == 200
    assert caplog.messages == []


def test_clients_may_have_to_show_a_certificate(tmp_path: Path, checkpoint: Checkpoint, files: Path) -> None:
    authority = files / "authority.pem"
    known = client_context(authority)
    known.load_cert_chain(files / "other.pem", files / "other.key")
    server = settings(files, ssl_ca_certs=str(authority), ssl_cert_reqs=2)
    with served(tmp_path, checkpoint, server, known) as client:
        assert client.post("/v1/completions", prompt="x")[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            Client(client.port, client_context(authority)).exchange("GET", "/health")


def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(
    tmp_path: Path, checkpoint: Checkpoint, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend.http.tls, "_RELOAD_INTERVAL_S", 0.02)
    for name in ("server.pem", "server.key"):
        shutil.copy(files / name, tmp_path)

    def subject() -> str:
        with connect(renewing) as connection:
            certificate: Any = connection.getpeercert()
            return str(certificate["subject"][0][0][1])

    tls = client_context(files / "authority.pem")
    with served(tmp_path, checkpoint, settings(tmp_path), tls) as renewing:
        assert subject() == "server"
        (tmp_path / "server.pem").write_text("half of a certifica")
        time.sleep(0.2)
        assert subject() == "server"
        shutil.copy(files / "other.key", tmp_path / "server.key")
        shutil.copy(files / "other.pem", tmp_path / "server.pem")
        wait_until(lambda: subject() == "other")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ssl_certfile": "missing.pem"}, "--ssl-certfile missing.pem: No such file"),
        ({"ssl_keyfile": "missing.pem"}, "--ssl-keyfile missing.pem: No such file"),
        ({"ssl_keyfile": None}, "--ssl-keyfile"),
        ({"ssl_keyfile": "{other.key}"}, "the private key is not that of the certificate"),
        ({"ssl_keyfile": "{encrypted.key}"}, "the private key is encrypted"),
        ({"ssl_certfile": "{server.key}"}, "must contain a certificate"),
        ({"ssl_certfile": None}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_ca_certs": "{server.key}"}, "--ssl-ca-certs .*no certificate"),
        ({"ssl_ca_certs": "missing.pem"}, "--ssl-ca-certs missing.pem: No such file"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-ca-certs"),
        ({"ssl_cert_reqs": 1, "ssl_certfile": None, "ssl_keyfile": None}, "--ssl-cert-reqs needs --ssl-cert"),
    ],
)
def test_unusable_settings_are_one_line(files: Path, change: dict[str, Any], words: str) -> None:
    encrypted = files / "encrypted.key"
    if not encrypted.exists():
        arguments = [
            "-in",
            str(files / "server.key"),
            "-aes256",
            "-passout",
            "pass:x",
            "-out",
            str(encrypted),
        ]
        subprocess.run(["openssl", "pkey", *arguments], check=True)
    values = {
        name: str(files / value[1:-1]) if isinstance(value, str) and value.startswith("{") else value
        for name, value in change.items()
    }
    paths = {"ssl_certfile": str(files / "server.pem"), "ssl_keyfile": str(files / "server.key")}
    with pytest.raises(ValueError, match=words) as caught:
        tls_context(ServerConfig(**(paths | values)))
    assert "\n" not in str(caught.value)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
