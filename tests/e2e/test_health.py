"""No probe tells of a server what is not true, whichever of its processes has been killed."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.helpers.servers.random_server import ARGS, write_checkpoint
from tests.helpers.servers.server import Server, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_DEADLINE_S = 90.0
_BODY = {"model": "random", "prompt": "one", "max_tokens": 1}


async def probe(session: aiohttp.ClientSession, path: str) -> int:
    """The status; 0 while no process answers."""
    try:
        async with session.get(path) as response:
            return response.status
    except (aiohttp.ClientConnectionError, TimeoutError):
        return 0


async def watch(server: Server, victim: str) -> list[tuple[int, int]]:
    """(/health, /ready) in a row, from SIGKILL of a process until a token can be made again.

    Whenever /ready is 200 a request is sent, which must succeed: nothing is killed meanwhile.
    """
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(force_close=True)
    seen: list[tuple[int, int]] = []
    async with (
        aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as session,
        asyncio.timeout(_DEADLINE_S),
    ):
        before = server.text().count("is ready after")
        pid = next(pid for pid, line in server.children().items() if victim in line)
        os.kill(pid, signal.SIGKILL)
        while server.text().count(", has ended: ") <= before:  # noticed
            await asyncio.sleep(0.01)
        while server.text().count("is ready after") <= before or seen[-1:] != [(200, 200)]:
            seen.append((await probe(session, "/health"), await probe(session, "/ready")))
            if seen[-1][1] == 200:
                async with session.post("/v1/completions", json=_BODY) as response:
                    assert response.status == 200, await response.text()
            await asyncio.sleep(0.1)
    return seen


def test_health_and_readiness_while_each_process_is_killed_in_turn(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", hidden_size=48, intermediate_size=64, num_hidden_layers=2)
    with running_server("--model", str(model), *ARGS, "--hang-timeout", "20") as server:
        for victim in ("workers.main", "engine_core.process"):
            seen = asyncio.run(watch(server, victim))
            assert {health for health, _ in seen} == {200}  # the frontend lives
            assert 503 in {ready for _, ready in seen}
        asyncio.run(watch(server, "frontend.main"))


def port_of(server: Server) -> int:
    """The port on which it listens; 0 before it does. It is not logged before the server is ready."""
    found = psutil.Process(server.process.pid).net_connections("tcp4")
    return next((each.laddr.port for each in found if each.status == psutil.CONN_LISTEN), 0)


async def watch_start(server: Server) -> int:
    """The status of /ready once one of two engines serves, while a worker of the other is stopped."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with asyncio.timeout(_DEADLINE_S):
        while not (port := port_of(server)):
            await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(url, timeout=timeout) as session, asyncio.timeout(_DEADLINE_S):
        while len(workers := [pid for pid, line in server.children().items() if "workers.main" in line]) < 2:
            await asyncio.sleep(0.01)
        os.kill(workers[1], signal.SIGSTOP)
        try:
            served = False
            while not served:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.post("/v1/completions", json=_BODY) as response:
                        served = response.status == 200
                await asyncio.sleep(0.1)
            return await probe(session, "/ready")
        finally:
            os.kill(workers[1], signal.SIGCONT)


async def check_ready(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        assert await probe(session, "/ready") == 200


@pytest.mark.parametrize("prefill", [0, 1])
def test_a_start_is_not_ready_before_its_last_engine(tmp_path: Path, prefill: int) -> None:
    """Two engines, also where one of them computes the prompts."""
    model = write_checkpoint(tmp_path / "model", hidden_size=48, intermediate_size=64, num_hidden_layers=2)
    tier = ("--kv-offload-dir", str(tmp_path / "kv"), "--kv-offload-disk", "64M") if prefill else ()
    server = Server("--model", str(model), *ARGS, "-dp", "2", "--prefill-engines", str(prefill), *tier)
    try:
        assert asyncio.run(watch_start(server)) == 503
        server.wait_ready()
        asyncio.run(check_ready(server.url))
    finally:
        server.kill()
