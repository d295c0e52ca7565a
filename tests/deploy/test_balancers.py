"""HAProxy, nginx and Envoy as deploy/lb configures them, before two servers of which one is killed."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.servers.random_server import ARGS, MODEL_NAME
from tests.helpers.servers.server import Server

REQUESTS = 1000
CLIENTS = 24
KILL_AFTER = 400
DEADLINE_S = 300.0

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Balancer:
    """How one is checked and started; `{config}` and `{directory}` are filled in."""

    program: str
    config: str
    check: str
    run: str

    def command(self, words: str, config: Path) -> list[str]:
        return [
            self.program,
            *(word.format(config=config, directory=config.parent) for word in words.split()),
        ]


BALANCERS = [
    Balancer("haproxy", "haproxy.cfg", "-c -f {config}", "-db -f {config}"),
    Balancer(
        "nginx", "nginx.conf", "-t -p {directory} -c {config}", "-p {directory} -c {config} -g daemon_off;"
    ),
    Balancer("envoy", "envoy.yaml", "--mode validate -c {config}", "-c {config} --log-level error"),
]


@pytest.fixture(params=BALANCERS, ids=lambda one: one.program)
def balancer(request: pytest.FixtureRequest) -> Balancer:
    one: Balancer = request.param
    if shutil.which(one.program) is None:
        pytest.skip(f"{one.program} is not installed")
    return one


@pytest.fixture
def servers(model: str) -> Iterator[list[Server]]:
    """Two servers, started together."""
    started = [Server("--model", model, *ARGS) for _ in range(2)]
    try:
        for server in started:
            server.wait_ready()
        yield started
    finally:
        for server in started:
            server.kill()


def test_the_shipped_file_is_valid(balancer: Balancer, deploy: Path, tmp_path: Path) -> None:
    config = tmp_path / balancer.config
    shutil.copy(deploy / "lb" / balancer.config, config)
    done = subprocess.run(
        balancer.command(balancer.check, config), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout


@contextlib.contextmanager
def running(balancer: Balancer, deploy: Path, directory: Path, servers: list[Server]) -> Iterator[str]:
    """The balancer before the servers; yields its URL."""
    text = (deploy / "lb" / balancer.config).read_text()
    for shipped, server in zip(("8001", "8002"), servers, strict=True):
        assert text.count(shipped) == 1
        text = text.replace(shipped, server.url.rpartition(":")[2])
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(2):
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            ports.append(str(one.getsockname()[1]))
    text = text.replace("8080", ports[0]).replace("9901", ports[1])
    config = directory / balancer.config
    config.write_text(text)
    words = [word.replace("daemon_off;", "daemon off;") for word in balancer.command(balancer.run, config)]
    with open(directory / "log", "w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            wait_until_ready(f"http://127.0.0.1:{ports[0]}", process, directory / "log")
            yield f"http://127.0.0.1:{ports[0]}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    async def ready() -> bool:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/ready") as response:
                    return response.status == 200
        return False

    deadline = time.monotonic() + 60
    while not asyncio.run(ready()):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@dataclass
class Load:
    """What became of the requests."""

    url: str
    victim: Server
    finished: int = 0
    killed_at: float = 0.0
    failures: list[tuple[str, str, float]] = field(default_factory=list)
    """(server that the balancer named, what happened, when the request was sent)."""
    by_server: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        numbers = iter(range(REQUESTS))
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with aiohttp.ClientSession(self.url, timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, numbers) for _ in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
        for number in numbers:
            sent, server = time.monotonic(), [""]
            try:
                problem = await self._request(session, number, server)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                problem = repr(error)
            if problem:
                self.failures.append((server[0], problem, sent))
            else:
                self.finished += 1
                self.by_server[server[0]] += 1
            if self.finished == KILL_AFTER and not self.killed_at:
                self.killed_at = time.monotonic()
                self.victim.kill()

    async def _request(self, session: aiohttp.ClientSession, number: int, server: list[str]) -> str:
        """The problem; empty for a whole response."""
        streams, length = bool(number % 2), 8 + number % 40
        body: dict[str, Any] = {"model": MODEL_NAME, "prompt": [number % 90 + 3] * 9, "max_tokens": length}
        async with session.post(
            "/v1/completions", json=body | {"stream": streams, "ignore_eos": True}
        ) as response:
            server[0] = response.headers.get("x-atom-server", "")
            if response.status != 200:
                return f"status {response.status}"
            if not streams:
                usage = (await response.json())["usage"]
                return "" if usage["completion_tokens"] == length else f"{usage}"
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return ""
                if line.startswith(b"data: ") and "error" in json.loads(line[6:]):
                    return line.decode()
        return "the stream was cut off"


async def chunk_times(url: str) -> list[float]:
    """When the chunks of a stream arrived, in seconds since it was asked for."""
    body = {"model": MODEL_NAME, "prompt": "once", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    timeout, times = aiohttp.ClientTimeout(total=DEADLINE_S), []
    async with (
        aiohttp.ClientSession(url, timeout=timeout) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        began = time.monotonic()
        async for line in response.content:
            if line.startswith(b"data: "):
                times.append(time.monotonic() - began)
    return times


def test_streams_and_a_killed_server(
    balancer: Balancer, deploy: Path, tmp_path: Path, servers: list[Server]
) -> None:
    with running(balancer, deploy, tmp_path, servers) as url:
        times = asyncio.run(chunk_times(url))
        assert len(times) > 100 and times[len(times) // 10] < 0.5 * times[-1], "the stream was buffered"

        load = Load(url, servers[1])
        asyncio.run(asyncio.wait_for(load.run(), DEADLINE_S))
        victim = servers[1].url.removeprefix("http://")
        survivor = servers[0].url.removeprefix("http://")
        names = {"haproxy": ("atom-1", "atom-0")}.get(balancer.program, (victim, survivor))
        late = [failure for failure in load.failures if failure[2] > load.killed_at + 0.5]
        print(
            f"\n{balancer.program}: first chunk after {times[0]:.3f} s, last after {times[-1]:.3f} s; "
            f"{load.finished} of {REQUESTS} finished, {len(load.failures)} failed: "
            f"{Counter((server or 'no answer', problem[:40]) for server, problem, _ in load.failures)}; "
            f"by server {dict(load.by_server)}"
        )
        assert all(server != names[1] for server, _, _ in load.failures), load.failures
        assert not late, late
        assert load.finished + len(load.failures) == REQUESTS and len(load.failures) <= CLIENTS
        assert load.by_server[names[0]] > 0 < load.by_server[names[1]]
