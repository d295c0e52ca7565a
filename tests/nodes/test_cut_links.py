"""A host whose link is cut under load: no packet and no FIN comes any more. It is noticed, and comes back.

Streams of its engine go on at another one, or there once it is back.
"""

import asyncio
import contextlib
import time

import pytest

from tests.helpers.servers.node_requests import ReadyWatch, engines_up, ids_of, some_requests, until_up
from tests.helpers.servers.nodes import ARGS, Host, NodeProcess, inside, network_hosts, nodes_of, set_link
from tests.helpers.servers.random_server import Crowd

pytestmark = pytest.mark.timeout(600)

NOTICED_S = 5.0
STREAMS = 8


async def cut_and_return(master: NodeProcess, cut: Host, node: NodeProcess, engines: int) -> None:
    """All engines stream when the second one's host is cut off; later it is connected again.

    `bound` streams are those whose clients chose that engine.
    """
    await until_up(master.url, engines)
    requests = some_requests(20)
    before = await ids_of(master.url, requests, data_parallel_rank=1)
    staying = [Crowd(STREAMS, 700, data_parallel_rank=rank) for rank in range(engines) if rank != 1]
    moving, bound = Crowd(2 * STREAMS, 700), Crowd(2, 300, data_parallel_rank=1)
    async with bound.streaming(master):
        async with ReadyWatch(master.url) as ready, contextlib.AsyncExitStack() as streams:
            for crowd in (*staying, moving):
                await streams.enter_async_context(crowd.streaming(master))
            set_link(cut, up=False)
            begun = time.monotonic()
            while await engines_up(master.url) == engines:
                await asyncio.sleep(0.02)
            noticed_s = time.monotonic() - begun
            assert await ids_of(master.url, requests) == before  # on the engine that is left
        print(f"noticed after {noticed_s:.1f} s")
        assert noticed_s < NOTICED_S
        assert [crowd.ends for crowd in staying] == [{"finished": STREAMS}] * (engines - 1)
        assert moving.ends == {"finished": 2 * STREAMS} and not bound.ends
        assert set(ready.statuses) == {200}
        await asyncio.to_thread(node.until, "the link to the master at .* has ended")
        await asyncio.to_thread(no_children, node)
        set_link(cut, up=True)
        rejoined_s = await until_up(master.url, engines)
        print(f"again ready {rejoined_s:.1f} s after the link came back")
    assert bound.ends == {"finished": 2}
    assert await ids_of(master.url, requests, data_parallel_rank=1) == before


def no_children(node: NodeProcess) -> None:
    deadline = time.monotonic() + NOTICED_S
    while node.children():
        assert time.monotonic() < deadline, node.children()
        time.sleep(0.05)


@pytest.mark.parametrize("count", [2, 3])
def test_a_cut_host_is_noticed_and_joins_again(model: str, count: int) -> None:
    with network_hosts(count) as hosts, nodes_of(hosts, "--model", model, *ARGS, "-dp", str(count)) as nodes:
        master, node, *others = nodes.start_all()
        inside(hosts[0], lambda: asyncio.run(cut_and_return(master, hosts[1], node, count)))
        assert [master.terminate(), *(each.wait() for each in (node, *others))] == [0] * count


@pytest.mark.parametrize("layout", [("-tp", "2"), ("-dp", "2", "--enable-expert-parallel")], ids=" ".join)
def test_a_domain_over_two_hosts_ends_and_restarts_as_one(
    model: str, moe_model: str, layout: tuple[str, ...]
) -> None:
    engines = 1 if "-tp" in layout else 2

    async def drive(master: NodeProcess) -> None:
        await until_up(master.url, engines)
        requests = some_requests(20)
        before = await ids_of(master.url, requests)
        crowd = Crowd(STREAMS, 200)
        async with crowd.streaming(master):
            set_link(hosts[1], up=False)
            begun = time.monotonic()
            while await engines_up(master.url):
                await asyncio.sleep(0.02)
            assert time.monotonic() - begun < NOTICED_S
            set_link(hosts[1], up=True)
            await until_up(master.url, engines)
        assert crowd.ends == {"finished": STREAMS}
        assert await ids_of(master.url, requests) == before

    served = model if engines == 1 else moe_model
    with network_hosts(2) as hosts, nodes_of(hosts, "--model", served, *ARGS, *layout) as nodes:
        master, node = nodes.start_all()
        inside(hosts[0], lambda: asyncio.run(drive(master)))
        assert [master.terminate(), node.wait()] == [0, 0]


def test_a_node_that_is_killed_is_started_again(model: str) -> None:
    async def drive(master: NodeProcess, node: NodeProcess) -> None:
        await until_up(master.url, 2)
        before = await ids_of(master.url, requests := some_requests(20))
        node.kill()
        begun = time.monotonic()
        while await engines_up(master.url) == 2:
            await asyncio.sleep(0.02)
        assert time.monotonic() - begun < NOTICED_S
        assert await ids_of(master.url, requests) == before
        nodes.start(1)
        await until_up(master.url, 2)
        assert await ids_of(master.url, requests, data_parallel_rank=1) == before

    with network_hosts(2) as hosts, nodes_of(hosts, "--model", model, *ARGS, "-dp", "2") as nodes:
        master, node = nodes.start_all()
        inside(hosts[0], lambda: asyncio.run(drive(master, node)))
        assert master.terminate() == 0


def test_nodes_outlive_a_master_and_join_the_next(model: str) -> None:
    with network_hosts(2) as hosts, nodes_of(hosts, "--model", model, *ARGS, "-dp", "2") as nodes:
        master, node = nodes.start_all()
        master.kill()
        no_children(node)
        again = nodes.start(0)
        again.until("ready .*http")
        inside(hosts[0], lambda: asyncio.run(until_up(again.url, 2)))
        assert [again.terminate(), node.wait()] == [0, 0]
