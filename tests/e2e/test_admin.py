"""The administration of a server with TLS, two frontends and two engines: each command must reach all."""

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers.servers.certificates import client_context, make_authority, make_certificate
from tests.helpers.servers.random_server import ARGS, ENDLESS
from tests.helpers.servers.server import Server, running_server

pytestmark = pytest.mark.timeout(300)

DEADLINE_S = 60.0
PROMPT = list(range(5, 105))
OFTEN = 24
"""So many connections that both frontends have some of them, but once in millions."""
UNDELIVERED = 16
"""More tokens than a core has generated and not yet sent: a request that is aborted does not get them."""


class AdminConnection(http.client.HTTPConnection):
    """To a Unix socket."""

    def __init__(self, path: Path):
        super().__init__("localhost", timeout=DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(str(self._path))


class Clients:
    """Public and administrative requests, each on a connection of its own."""

    def __init__(self, server: Server, tls: ssl.SSLContext, socket_path: Path):
        self.server = server
        self._tls = tls
        self._path = socket_path

    def public(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        address = urlsplit(self.server.url)
        connection = http.client.HTTPSConnection(
            "127.0.0.1", address.port, timeout=DEADLINE_S, context=self._tls
        )
        return exchange(connection, method, path, body)

    def admin(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        return exchange(AdminConnection(self._path), method, path, body, **headers)

    def complete(self, **fields: Any) -> tuple[int, Any]:
        body = {"model": "random", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        return self.public("POST", "/v1/completions", body | fields)

    def report(self, name: str) -> Any:
        status, report = self.public("GET", f"/v1/requests/{name}")
        assert status == 200, report
        (sequence,) = report["sequences"]
        return sequence


def exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, **headers: str
) -> tuple[int, Any]:
    with contextlib.closing(connection):
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.fixture(scope="module")
def clients(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    directory = tmp_path_factory.mktemp("a")
    authority = make_authority(directory)
    certificate, key = make_certificate(directory, "server")
    path = directory / "admin"
    tls = ("--ssl-certfile", certificate, "--ssl-keyfile", key)
    layout = ("--api-server-count", "2", "-dp", "2", "--dp-load-balance", "round_robin")
    with running_server("--model", model, *ARGS, *layout, *tls, "--admin-socket", str(path)) as server:
        yield Clients(server, client_context(authority), path)
        assert server.terminate() == 0
        assert not path.exists()


@contextlib.contextmanager
def restored(clients: Clients) -> Iterator[None]:
    """The server is as it was after the block, also for the tests after one that fails."""
    try:
        yield
    finally:
        clients.admin("POST", "/abort_requests", {"abort_all": True})
        clients.admin("POST", "/log_level", {"level": "info"})
        assert clients.admin("POST", "/resume")[0] == 200
        wait_until(lambda: all(clients.public("GET", "/ready")[0] == 200 for _ in range(OFTEN)))


def test_any_frontend_explains_a_request_of_any_engine(clients: Clients) -> None:
    requests, deadline = [0, 0], time.monotonic() + DEADLINE_S
    while min(requests) < 2:  # one engine may be ready before the other
        assert time.monotonic() < deadline, requests
        _, response = clients.complete(prompt=[*PROMPT, sum(requests)])
        for _ in range(3):  # of two frontends
            sequence = clients.report(response["id"])
        requests[sequence["data_parallel_rank"]] += 1
        assert (sequence["status"], sequence["finish_reason"]) == ("finished", "max_tokens")
        assert (sequence["prompt_tokens"], sequence["generated_tokens"]) == (101, 2)
        assert 0 <= sequence["queue_ms"] < 1000 * DEADLINE_S
        assert 0 < sequence["prefill_ms"] < 1000 * DEADLINE_S
        assert 0 < sequence["decode_ms"] < 1000 * DEADLINE_S
    assert sequence["cached_tokens"] == 96
    assert sequence["first_missed_block"] is None
    assert clients.public("GET", "/v1/requests/cmpl-unknown")[0] == 404


def test_a_reset_cache_is_empty_on_all_engines(clients: Clients) -> None:
    names = [clients.complete()[1]["id"] for _ in range(4)]
    assert clients.report(names[-1])["cached_tokens"] == 96
    status, reset = clients.admin("POST", "/reset_prefix_cache")
    assert (status, reset["status"]) == (200, "success")
    assert reset["uncached_blocks"] >= 12
    ranks: set[int] = set()
    for _ in range(4):  # each of two frontends takes turns of its own
        sequence = clients.report(clients.complete()[1]["id"])
        rank = sequence["data_parallel_rank"]
        assert sequence["cached_tokens"] == (96 if rank in ranks else 0)
        if rank not in ranks:
            missed = {"block": 0, "position": 0, "reason": "never_cached"}
            assert sequence["first_missed_block"] == missed
        ranks.add(rank)
    assert ranks == {0, 1}
    assert clients.report(clients.complete()[1]["id"])["cached_tokens"] == 96


def test_requests_are_listed_and_aborted(clients: Clients) -> None:
    def one_of(name: str) -> Any:
        return clients.admin("GET", f"/requests/{name}")[1]["sequences"][0]

    with ThreadPoolExecutor(4) as pool, restored(clients):
        long = {"max_tokens": ENDLESS}
        running = {name: pool.submit(clients.complete, request_id=name, **long) for name in "abcd"}
        wait_until(lambda: clients.admin("GET", "/requests")[1]["total"] == 4)
        listed = clients.admin("GET", "/requests")[1]["data"]
        assert {one["id"] for one in listed} == {f"cmpl-{name}" for name in "abcd"}
        assert {one["data_parallel_rank"] for one in listed} == {0, 1}
        status, answer = clients.admin("POST", "/abort_requests", {"request_ids": ["cmpl-b", "cmpl-x"]})
        assert (status, answer["aborted_sequences"]) == (200, 1)
        status, response = running["b"].result(DEADLINE_S)
        (choice,) = response["choices"]
        assert (status, choice["finish_reason"], choice["raw_finish_reason"]) == (200, "length", "aborted")
        assert clients.report("cmpl-b")["finish_reason"] == "aborted"
        wait_until(lambda: one_of("cmpl-a")["status"] == "decoding")
        assert clients.admin("POST", "/abort_requests", {"abort_all": True})[1]["aborted_sequences"] == 3
        assert all(one.result(DEADLINE_S)[0] == 200 for one in running.values())
    assert clients.admin("GET", "/requests")[1] == {"object": "list", "total": 0, "data": []}


def test_draining_refuses_new_requests_alone(clients: Clients) -> None:
    def generated() -> int:
        (one,) = clients.admin("GET", "/requests/cmpl-long")[1]["sequences"]
        return int(one["generated_tokens"])

    with ThreadPoolExecutor(1) as pool, restored(clients):
        running = pool.submit(clients.complete, max_tokens=ENDLESS, request_id="long")
        wait_until(lambda: clients.admin("GET", "/requests")[1]["total"] == 1)
        assert clients.admin("POST", "/drain") == (
            200,
            {"status": "success", "log_level": "info", "draining": True},
        )
        wait_until(lambda: all(clients.public("GET", "/ready")[0] == 503 for _ in range(OFTEN)))
        assert [clients.complete()[0] for _ in range(8)] == [503] * 8
        before = generated()
        wait_until(lambda: generated() > before + UNDELIVERED)
        clients.admin("POST", "/abort_requests", {"request_ids": ["cmpl-long"]})
        status, response = running.result(DEADLINE_S)
        assert status == 200 and response["usage"]["completion_tokens"] > before
    assert [clients.complete()[0] for _ in range(8)] == [200] * 8


def test_the_log_level_holds_for_all_processes(clients: Clients) -> None:
    def named() -> str:
        """A request that has ended: all that is logged of it is in the log."""
        name = str(clients.complete()[1]["id"])
        assert clients.report(name)["status"] == "finished"
        time.sleep(0.1)
        return name

    assert clients.admin("GET", "/log_level") == (200, {"level": "info"})
    with restored(clients):
        assert clients.admin("POST", "/log_level", {"level": "debug"})[0] == 200
        for _ in range(2):
            wait_until(lambda: f"request {named()} ended by MAX_TOKENS" in clients.server.text())
        assert clients.admin("POST", "/log_level", {"level": "info"})[0] == 200
    wait_until(lambda: named() not in clients.server.text())


def test_web_pages_and_the_public_port_have_no_administration(clients: Clients) -> None:
    assert clients.public("POST", "/drain")[0] == 404
    assert clients.public("POST", "/abort_requests", {"abort_all": True})[0] == 404
    assert clients.admin("POST", "/drain", Origin="http://localhost")[0] == 403
    assert clients.admin("GET", "/requests", Host="evil.example.org")[0] == 403
    assert clients.admin("GET", "/metrics", Host="evil.example.org")[0] == 403


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
