"""A frontend on every node: killed and restarted there, administered there, and gone with its node."""

import asyncio
import os
import signal
import time
from pathlib import Path

import aiohttp
import pytest

from tests.helpers.servers.node_requests import ids_of, some_requests, until_up
from tests.helpers.servers.nodes import ARGS, Nodes, inside, network_hosts, nodes_of

pytestmark = pytest.mark.timeout(600)

LEAVES_WITHIN_S = 6.0


async def status(url: str, path: str) -> int:
    async with aiohttp.ClientSession(url) as session, session.get(path) as response:
        return response.status


async def drain(path: Path) -> int:
    connector = aiohttp.UnixConnector(path=str(path))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post("http://localhost/drain") as response,
    ):
        return response.status


def frontend_pid(nodes: Nodes, rank: int) -> int:
    (pid,) = (pid for pid, line in nodes.started[rank].children().items() if "frontend.main" in line)
    return pid


def test_each_node_serves_http(model: str, tmp_path: Path) -> None:
    requests = some_requests(60)
    flags = ("--frontend-per-node", "-dp", "2")
    with network_hosts(2) as hosts, nodes_of(hosts, "--model", model, *ARGS, *flags) as nodes:
        master = nodes.start(0)
        node = nodes.start(1, "--admin-socket", str(tmp_path / "admin"))
        master.until("ready .*http")
        urls = [master.url, node.http_url()]

        def everywhere() -> list[list[list[int]]]:
            async def drive(url: str) -> list[list[int]]:
                await until_up(url, 2)
                return await ids_of(url, requests)

            return [
                inside(host, lambda url=url: asyncio.run(drive(url)))
                for host, url in zip(hosts, urls, strict=True)
            ]

        first, second = everywhere()
        assert first == second
        os.kill(frontend_pid(nodes, 1), signal.SIGKILL)
        master.until("frontend 1, life 0, has ended: frontend 1 on node 1 .*killed by SIGKILL; life 1 starts")
        master.until("frontend 1, life 1, is ready")
        assert everywhere() == [first, first]
        assert inside(hosts[1], lambda: asyncio.run(drain(tmp_path / "admin"))) == 200
        deadline = time.monotonic() + LEAVES_WITHIN_S
        while inside(hosts[0], lambda: asyncio.run(status(urls[0], "/ready"))) != 503:
            assert time.monotonic() < deadline, "the drain of one node's frontend holds for all"
        assert [master.terminate(), node.wait()] == [0, 0]


def test_a_node_that_is_stopped_leaves(model: str) -> None:
    with network_hosts(2) as hosts, nodes_of(hosts, "--model", model, *ARGS, "-dp", "2") as nodes:
        master, node = nodes.start_all()
        inside(hosts[0], lambda: asyncio.run(until_up(master.url, 2)))
        begun = time.monotonic()
        assert node.terminate() == 0
        assert time.monotonic() - begun < LEAVES_WITHIN_S
        master.until(r"engine 1, life 0, has ended: node 1 \(10.213.7.2\) was stopped; life 1 starts")
        inside(hosts[0], lambda: asyncio.run(ids_of(master.url, some_requests(5))))
        back = nodes.start(1)
        inside(hosts[0], lambda: asyncio.run(until_up(master.url, 2)))
        back.process.send_signal(signal.SIGTERM)
        assert master.terminate() == 0 and back.wait() == 0
