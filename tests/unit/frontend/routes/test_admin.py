"""The administration: what it refuses, profiles, and the state of the server that frontends follow."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.engine.launcher import _admin_socket
from atom.shared.config.observability import ObservabilityConfig
from atom.shared.config.server import ServerConfig
from atom.shared.messages.admin import ServerState
from atom.shared.messages.profile import Profile, ProfileResult
from atom.shared.utils.net import AdminSocket, ListenError, is_loopback_host
from frontend.http.lifecycle import Lifecycle
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import Client, running_frontend


def profile(message: Profile) -> ProfileResult:
    return ProfileResult(message.number, message.on)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Client]]:
    """The public server, which drains, and its administration."""
    checkpoint = tiny_tokenizer.checkpoint(tmp_path_factory.mktemp("checkpoint"))
    traced = ObservabilityConfig(torch_profiler_dir="traces")
    listener = socket.create_server(("127.0.0.1", 0))
    admin = Client(listener.getsockname()[1])
    options: dict[str, Any] = {"admin_fd": listener.detach(), "state": ServerState(draining=True)}
    with (
        FakeCore(tmp_path_factory.mktemp("core"), lambda request: Script([70]), profile=profile) as core,
        running_frontend(
            core, checkpoint, ServerConfig(api_key="key"), observability=traced, wait=False, **options
        ) as client,
    ):
        core.wait_for(lambda: bool(core._peers))
        yield client, admin


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/abort_requests", b"", "body is invalid"),
        ("/abort_requests", b"\xff", "body is invalid"),
        ("/abort_requests", b"{}", "'request_ids'"),
        ("/abort_requests", b'{"request_ids": ["a"], "abort_all": true}', "'request_ids'"),
        ("/abort_requests", b'{"request_ids": "a"}', "request_ids"),
        ("/abort_requests", b'{"request_id": ["a"]}', "request_id"),
        ("/abort_requests", b'{"request_ids": [' + b'"a",' * 1024 + b'"a"]}', "1024"),
        ("/log_level", b'{"level": "loud"}', "level"),
        ("/log_level", b"{}", "level"),
    ],
)
def test_bad_bodies_are_refused(clients: tuple[Client, Client], path: str, body: bytes, words: str) -> None:
    status, error = clients[1].call("POST", path, raw=body)
    assert status == 400
    assert words in error["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/drain", b'{"after_s": 5}', "/drain has no fields, send no body: .*`after_s`"),
        ("/resume", b"now", "/resume has no fields, send no body: "),
        ("/reset_prefix_cache", b"[]", "no fields"),
        ("/restart_engines", b'{"ranks": [0]}', "`ranks`"),
        ("/resume?when=now", b"", "unknown parameter 'when'"),
    ],
)
def test_routes_without_fields_refuse_any(
    clients: tuple[Client, Client], path: str, body: bytes, words: str
) -> None:
    status, error = clients[1].call("POST", path, raw=body)
    assert status == 400 and re.search(words, error["error"]["message"])


def test_routes_without_fields_read_no_large_body(clients: tuple[Client, Client]) -> None:
    """Its length is refused unread; the same as {} is no body."""
    admin = clients[1]
    status, _, _ = admin.exchange("POST", "/drain", raw=b"", headers={"Content-Length": str(1 << 40)})
    assert status == 413
    assert admin.call("POST", "/reset_prefix_cache", {})[0] == admin.call("POST", "/reset_prefix_cache")[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://localhost"},
        {"Sec-Fetch-Mode": "navigate"},
        {"Host": "example.org"},
        {"Host": "127.0.0.1.example.org:80"},
        {"Host": ""},
    ],
)
@pytest.mark.parametrize("path", ["/requests", "/metrics", "/server_info"])
def test_web_pages_are_refused(clients: tuple[Client, Client], path: str, headers: dict[str, str]) -> None:
    assert clients[1].exchange("GET", path, headers=headers)[0] == 403


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("127.0.0.1:9000", True),
        ("[::1]:9000", True),
        ("[::1]", True),
        ("localhost:", False),
        ("127.0.0.1@example.org", False),
        ("", False),
    ],
)
def test_hosts(host: str, is_loopback: bool) -> None:
    assert is_loopback_host(host) == is_loopback


def test_no_key_is_needed_there_and_no_command_is_public(clients: tuple[Client, Client]) -> None:
    public, admin = clients
    assert admin.call("GET", "/log_level") == (200, {"level": "info"})
    assert admin.exchange("GET", "/metrics")[0] == 200
    assert admin.exchange("GET", "/v1/models")[0] == 404
    key = {"Authorization": "Bearer key"}
    for path in ("/abort_requests", "/drain", "/resume", "/reset_prefix_cache", "/log_level"):
        assert public.exchange("POST", path, {}, headers=key)[0] == 404


def test_a_frontend_starts_in_the_state_that_is_set(clients: tuple[Client, Client]) -> None:
    public, _ = clients
    status, _, headers = public.exchange(
        "POST", "/v1/completions", {"prompt": "x"}, headers={"x-api-key": "key"}
    )
    assert (status, headers["retry-after"], headers["connection"]) == (503, "2", "close")
    assert public.call("GET", "/ready")[1]["reason"] == "the server is draining: it takes no new requests"


def test_profiles_need_no_key_there(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    admin = Client(listener.getsockname()[1])
    checkpoint, traced = tiny_tokenizer.checkpoint(tmp_path), ObservabilityConfig(torch_profiler_dir="traces")
    with (
        FakeCore(tmp_path, lambda request: Script([70]), profile=profile) as core,
        running_frontend(core, checkpoint, observability=traced, admin_fd=listener.detach()),
    ):
        assert admin.call("POST", "/start_profile")[0] == 200
        assert admin.call("POST", "/stop_profile")[1]["traces"] == []
    assert [message.on for message in core.profiles] == [True, False]


def test_draining_ends_but_stopping_does_not() -> None:
    lifecycle = Lifecycle()
    lifecycle.set_draining(True)
    lifecycle.set_draining(False)
    with lifecycle.admit():
        pass
    lifecycle._is_stopping = True
    lifecycle.set_draining(False)
    assert lifecycle.is_draining


def test_a_socket_is_private_and_replaces_one_that_is_left_over(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with AdminSocket(None, str(path)) as admin:
        assert path.stat().st_mode & 0o777 == 0o600
        assert admin.address == f"unix:{path}"
        with pytest.raises(ListenError, match="--admin-socket .*in use"):
            AdminSocket(None, str(path))
    assert not path.exists()
    path.write_text("a file of somebody")
    with pytest.raises(ListenError, match="--admin-socket"):
        AdminSocket(None, str(path))
    assert path.read_text() == "a file of somebody"


def test_a_port_is_on_the_loopback_interface() -> None:
    with AdminSocket(0, None) as admin:
        host, port = admin.socket.getsockname()
        assert (host, admin.address) == ("127.0.0.1", f"http://127.0.0.1:{port}")
        with pytest.raises(ListenError, match="another --admin-port"):
            AdminSocket(port, None)


def test_one_of_port_and_socket() -> None:
    with pytest.raises(ValueError, match="exclude"):
        _admin_socket(ServerConfig(admin_port=0, admin_socket="x"))
    with _admin_socket(ServerConfig()) as none:
        assert none is None
