"""Thousands of invalid requests: no 5xx, no internals in responses, and the engine keeps serving."""

import asyncio
import contextlib
import http.client
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from tests.helpers.servers.edges import Gauges, wait_until
from tests.helpers.servers.hostile import hostile_bodies, odd_requests
from tests.helpers.servers.random_server import ARGS, write_checkpoint
from tests.helpers.servers.server import Server, running_server
from tests.helpers.servers.worst_bodies import worst_bodies

pytestmark = pytest.mark.timeout(300)

ODD = 1_000
BATCH = 500
CONNECTIONS = 12
SEED = 20_260_101
MAX_GROWTH = 5 << 20
# Implementation details that no response may contain.
INTERNALS = re.compile(r"Traceback|\.py\b|site-packages|/tmp/|/usr/|/home/|object at 0x|msgspec|aiohttp")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = write_checkpoint(
        tmp_path_factory.mktemp("model"), hidden_size=48, intermediate_size=64, num_hidden_layers=1
    )
    limits = ("--max-model-len", "64", "--num-kv-blocks", "4096")
    with running_server("--model", str(directory), *ARGS, *limits) as running:
        yield running


def check(path: str, sent: bytes, status: int, received: bytes) -> None:
    """A valid response or OpenAI's error object."""
    text = received.decode()
    where = f"{path} {sent[:300]!r} -> {status} {text[:500]}"
    assert not INTERNALS.search(text), where
    if status != 200:
        assert 400 <= status < 500, where
        error = json.loads(text)["error"]
        more = {"param", "code"}
        if path.startswith("/v1/messages"):
            more = {"details"} if "'thread'" in error["message"] else set()
        assert set(error) == {"message", "type"} | more, where
        return
    for event in text.split("\n\n") if text.startswith(("data: ", "event: ")) else [text]:
        if event and event != "data: [DONE]":
            answer = json.loads(event[event.find("{") :])
            assert answer.keys() & {"choices", "tokens", "prompt", "type", "output", "input_tokens"}, where


async def drive(session: aiohttp.ClientSession, bodies: Iterator[tuple[str, bytes]]) -> Counter[int]:
    statuses: Counter[int] = Counter()

    async def one_connection() -> None:
        for path, body in bodies:
            async with session.post(path, data=body) as answer:
                received = await answer.read()
            check(path, body, answer.status, received)
            statuses[answer.status] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(one_connection())
    return statuses


def first(bodies: Iterator[tuple[str, bytes]], count: int) -> Iterator[tuple[str, bytes]]:
    for _ in range(count):
        yield next(bodies)


def test_the_worst_bodies(server: Server) -> None:
    """Each gets one of its expected statuses, and the next request is served."""
    good = {"prompt": "one two", "max_tokens": 2, "ignore_eos": True}

    async def run() -> None:
        async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=60)) as session:
            for case in worst_bodies():
                if case.chunk_size is not None:
                    continue
                headers = {"Content-Encoding": case.encoding} if case.encoding else {}
                async with session.post(case.path, data=io.BytesIO(case.body), headers=headers) as answer:
                    received = await answer.read()
                assert answer.status in case.statuses, (case.name, received[:500])
                check(case.path, case.body, answer.status, received)
                async with session.post("/v1/completions", json=good) as answer:
                    assert answer.status == 200, case.name

    asyncio.run(run())
    wait_until(server, Gauges.is_idle, "idle")
    assert "Traceback" not in server.text()


class Unchecked(http.client.HTTPConnection):
    """Sends any path."""

    def _validate_path(self, url: str) -> None:
        pass


def test_odd_requests_to_every_route(server: Server) -> None:
    """Odd methods, names and headers: http.client sends them as they are."""
    address = urlsplit(server.url)
    statuses: Counter[int] = Counter()
    for odd in odd_requests(SEED, ODD):
        connection = Unchecked("127.0.0.1", address.port, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(odd.method, odd.path, skip_accept_encoding=True)
            for name, value in {**odd.headers, "Content-Length": str(len(odd.body))}.items():
                connection.putheader(name, value.encode())
            connection.endheaders(odd.body)
            response = connection.getresponse()
            received = response.read()
        where = f"{odd} -> {response.status} {received[:300]!r}"
        assert response.status < 500, where
        if response.status >= 400 and odd.method != "HEAD":
            assert set(json.loads(received)) <= {"error", "type"}, where
            assert not INTERNALS.search(received.decode()), where
        statuses[response.status] += 1
    assert {200, 400, 404, 405} <= statuses.keys()
    assert "Traceback" not in server.text()


def test_two_thousand_hostile_bodies(server: Server) -> None:
    check_hostile_bodies(server, 2_000)


@pytest.mark.slow
def test_ten_thousand_hostile_bodies(server: Server) -> None:
    sizes = check_hostile_bodies(server, 10_000)
    assert sizes[-1] - sizes[-2] < MAX_GROWTH


def check_hostile_bodies(server: Server, count: int) -> list[int]:
    """Send so many; returns the frontend's resident bytes after each batch."""
    frontend = psutil.Process(next(pid for pid, line in server.children().items() if "frontend.main" in line))
    good: dict[str, Any] = {"prompt": "one two", "max_tokens": 8, "ignore_eos": True}
    statuses: Counter[int] = Counter()
    sizes = []

    async def run() -> None:
        bodies = hostile_bodies(SEED, count)
        steps = Gauges(server)["engine_steps_total"]
        async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=60)) as session:
            for _ in range(count // BATCH):
                statuses.update(await drive(session, first(bodies, BATCH)))
                async with session.post("/v1/completions", json=good) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["usage"]["completion_tokens"] == 8
                gauges = await asyncio.to_thread(Gauges, server)
                assert gauges["engine_steps_total"] > steps
                steps = gauges["engine_steps_total"]
                sizes.append(frontend.memory_info().rss)

    asyncio.run(run())
    print(dict(statuses), "RSS in MiB:", [size >> 20 for size in sizes])
    assert statuses[200] > count // 20 and statuses[400] > count // 20
    wait_until(server, Gauges.is_idle, "idle")
    assert "Traceback" not in server.text()
    return sizes
