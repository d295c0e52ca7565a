"""Two nodes on loopback addresses are one server, which serves on when one of them is killed."""

import asyncio

import aiohttp
import pytest

from tests.helpers.servers.node_requests import ids_of, some_requests, until_up
from tests.helpers.servers.nodes import loopback_hosts, nodes_of
from tests.helpers.servers.random_server import ARGS

pytestmark = pytest.mark.timeout(300)


def test_two_nodes_are_one_server(model: str) -> None:
    requests = some_requests(24)

    async def drive(url: str) -> None:
        await until_up(url, 2)
        on_each = [await ids_of(url, requests, data_parallel_rank=rank) for rank in (0, 1)]
        assert on_each[0] == on_each[1] == await ids_of(url, requests)

    async def without_the_second(url: str) -> None:
        assert await ids_of(url, requests[:4])
        async with aiohttp.ClientSession(url) as session, session.get("/ready") as response:
            assert response.status == 200

    with nodes_of(loopback_hosts(2), "--model", model, *ARGS, "-dp", "2") as nodes:
        master = nodes.start(0)
        master.until(r"waiting for node 1 to join at 127\S+:29500 \(1800 s\)")
        node = nodes.start(1)
        master.until("ready .*http")
        asyncio.run(drive(master.url))
        node.kill()
        master.until(r"engine 1, life 0, has ended: node 1 \(127\S+\) has ended")
        asyncio.run(without_the_second(master.url))
        assert master.terminate() == 0
