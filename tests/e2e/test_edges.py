"""A real server and clients that disconnect in every phase, alone and by the thousand."""

import asyncio
import contextlib
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.servers.edges import DEADLINE_S, Gauges, Peer, wait_until
from tests.helpers.servers.random_server import ARGS, write_checkpoint
from tests.helpers.servers.server import Server, running_server

pytestmark = pytest.mark.timeout(240)

STORM = 1000
AT_ONCE = 30  # with two choices each they have room
RUNNING, QUEUED = 8, 56
LONG = 60_000
"""More tokens than a test waits for."""
CROWD = 10 * (RUNNING + QUEUED)
LONG_PROMPT = "one two three four five six seven eight nine ten " * 40


@contextlib.contextmanager
def serving(directory: Path, blocks: int) -> Iterator[Server]:
    """Chunked prefill, and eight running requests."""
    write_checkpoint(directory, hidden_size=48, intermediate_size=64, num_hidden_layers=2)
    limits = ("--max-num-seqs", str(RUNNING), "--max-num-batched-tokens", "128")
    queue = ("--num-kv-blocks", str(blocks), "--max-queued-requests", str(QUEUED))
    with running_server("--model", str(directory), *ARGS, *limits, *queue) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("model"), 4000) as running:
        yield running


def body(prompt: str = "one two", stream: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "stream": stream,
        "max_tokens": LONG,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }


def check_is_idle(server: Server) -> None:
    """No sequence is live, no block is in use, and no step runs.

    A request whose client left at once may still reach the core after the first idle scrape, so the
    server has until the deadline to pass half a second without a step.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        before = wait_until(server, Gauges.is_idle, "idle")
        time.sleep(0.5)  # an idle core checks its integrity, and ends if it fails
        after = Gauges(server)
        if after.is_idle() and after["engine_steps_total"] == before["engine_steps_total"]:
            break
        assert time.monotonic() < deadline, f"never idle: {vars(after)}"
    assert after["engine_up"] == 1
    with urllib.request.urlopen(f"{server.url}/ready", timeout=DEADLINE_S) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("abruptly", [False, True])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_while_running(server: Server, stream: bool, abruptly: bool) -> None:
    async def drive() -> Gauges:
        peer = await Peer.connect(server)
        await peer.send(body(stream=stream, n=2))
        await asyncio.to_thread(wait_until, server, lambda g: g["num_requests_running"] == 2, "running")
        before = await asyncio.to_thread(Gauges, server)
        await peer.close(abruptly)
        return before

    before = asyncio.run(drive())
    after = wait_until(server, Gauges.is_idle, "idle")
    # On a busy machine many steps run during the two scrapes.
    assert after["engine_steps_total"] - before["engine_steps_total"] < LONG / 2
    check_is_idle(server)


def test_disconnecting_in_the_queue_and_in_prefill(server: Server) -> None:
    async def drive() -> None:
        runners = [await Peer.connect(server) for _ in range(8)]
        for runner in runners:
            await runner.send(body())
        waiting = [await Peer.connect(server) for _ in range(4)]
        for peer in waiting:
            await peer.send(body(LONG_PROMPT, stream=False))
        await asyncio.to_thread(wait_until, server, lambda g: g["num_requests_waiting"] >= 4, "waiting")
        for peer in waiting:
            await peer.close()
        await asyncio.to_thread(wait_until, server, lambda g: g["num_requests_waiting"] == 0, "left")
        before = await asyncio.to_thread(Gauges, server)

        def all_go_on(now: Gauges) -> bool:
            return now["generation_tokens_total"] > before["generation_tokens_total"] + 400

        after = await asyncio.to_thread(wait_until, server, all_go_on, "unaffected")
        assert after["num_requests_running"] == len(runners)
        for runner in runners:
            await runner.read_frames(300)
            await runner.close()
        in_prefill = [await Peer.connect(server) for _ in range(4)]
        for peer in in_prefill:
            await peer.send(body(LONG_PROMPT))
            await peer.close()

    asyncio.run(drive())
    check_is_idle(server)


def test_disconnecting_before_the_body_is_complete(server: Server) -> None:
    before = Gauges(server)

    async def drive() -> None:
        for _ in range(20):
            peer = await Peer.connect(server)
            await peer.send(body(LONG_PROMPT), share=0.5)
            await peer.close()

    asyncio.run(drive())
    check_is_idle(server)
    assert Gauges(server)["prompt_tokens_total"] == before["prompt_tokens_total"]


async def _one_of_many(server: Server, source: random.Random) -> None:
    peer = await Peer.connect(server)
    prompt = source.choice(["one two", "three four five", LONG_PROMPT])
    stream = source.random() < 0.7
    request = body(prompt, stream, n=source.choice([1, 1, 2]), max_tokens=source.choice([3, 30, 1500]))
    match source.randrange(6):
        case 0:
            await peer.send(request, share=source.random())
        case 1:
            await peer.send(request)
        case 2:
            await peer.send(request)
            await asyncio.sleep(source.random() * 0.3)
        case 3 if stream:
            await peer.send(request)
            await peer.read_frames(1)
        case 4 if stream:
            await peer.send(request)
            await peer.read_frames(source.randrange(2, 10))
        case _:
            await peer.send(body(prompt, max_tokens=5))
            assert b"data: [DONE]\n\n" in await peer.read_frames(1 << 30)
    await peer.close(abruptly=source.random() < 0.5)


@pytest.mark.slow
def test_a_thousand_disconnects_leak_nothing(tmp_path: Path) -> None:
    """With fewer blocks than eight running requests can want."""
    with serving(tmp_path, 160) as server:
        check_disconnects(server)


def check_disconnects(server: Server) -> None:
    source = random.Random(7)
    before = Gauges(server)

    async def drive() -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with slots:
                await _one_of_many(server, random.Random(source.random() + number))

        async with asyncio.TaskGroup() as group:
            for number in range(STORM):
                group.create_task(one(number))

    asyncio.run(drive())
    check_is_idle(server)
    after = Gauges(server)
    assert after["client_disconnects_total"] - before["client_disconnects_total"] > STORM / 4
    assert after["request_success_total"] - before["request_success_total"] > STORM / 4


def test_ten_times_the_capacity(server: Server) -> None:
    before = Gauges(server)
    statuses: Counter[int] = Counter()

    async def one(session: aiohttp.ClientSession) -> None:
        async with session.post("/v1/completions", json=body(stream=False, max_tokens=20)) as answer:
            reply = await answer.json()
            statuses[answer.status] += 1
            if answer.status == 200:
                assert reply["usage"]["completion_tokens"] == 20
            else:
                assert 1 <= int(answer.headers["Retry-After"]) <= 60

    async def drive() -> None:
        connector = aiohttp.TCPConnector(limit=CROWD)
        async with aiohttp.ClientSession(server.url, connector=connector) as session:
            await asyncio.gather(*(one(session) for _ in range(CROWD)))
            await one(session)  # the other requests have ended

    asyncio.run(drive())
    after = Gauges(server)
    assert statuses.keys() == {200, 429}
    assert statuses[200] > RUNNING + QUEUED
    assert after["requests_refused_total"] - before["requests_refused_total"] == statuses[429]
    check_is_idle(server)
