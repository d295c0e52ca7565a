"""Two and three hosts give the ids of one process, in every layout."""

import asyncio

import pytest

from tests.helpers.servers.node_requests import expected_ids, ids_of, some_requests, until_up
from tests.helpers.servers.nodes import ARGS, inside, network_hosts, nodes_of

pytestmark = pytest.mark.timeout(600)

REQUESTS = 500


@pytest.fixture(scope="module")
def expected(model: str, moe_model: str) -> dict[str, list[list[int]]]:
    return {each: expected_ids(each, some_requests(REQUESTS)) for each in (model, moe_model)}


@pytest.mark.parametrize(
    ("hosts", "layout", "engines", "has_experts"),
    [
        (2, ("-dp", "2"), 2, False),
        (2, ("-tp", "2"), 1, False),
        (2, ("-dp", "2", "--enable-expert-parallel"), 2, True),
        (2, ("-dp", "2", "-tp", "2", "--enable-expert-parallel"), 2, True),
        (3, ("-dp", "3", "--frontend-per-node"), 3, False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_ids_are_those_of_one_process(
    model: str,
    moe_model: str,
    expected: dict[str, list[list[int]]],
    hosts: int,
    layout: tuple[str, ...],
    engines: int,
    has_experts: bool,
) -> None:
    served = moe_model if has_experts else model
    requests = some_requests(REQUESTS)

    async def drive(url: str) -> list[list[int]]:
        await until_up(url, engines)
        return await ids_of(url, requests)

    with network_hosts(hosts) as places, nodes_of(places, "--model", served, *ARGS, *layout) as nodes:
        started = nodes.start_all()
        for place, node in zip(places, started, strict=True):
            if node.url or "--frontend-per-node" in layout:
                url = node.url or node.http_url()
                assert inside(place, lambda url=url: asyncio.run(drive(url))) == expected[served]
        assert [started[0].terminate(), *(node.wait() for node in started[1:])] == [0] * hosts
