"""Two servers that share a Redis or Valkey server: hits across them, and outputs that no fault changes."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.checkpoints.tiny_models import prompt_of
from tests.helpers.servers.edges import metrics_text
from tests.helpers.servers.random_server import ARGS, MODEL_NAME, write_checkpoint
from tests.helpers.servers.redis_process import PROGRAM, RedisProcess, redis_process
from tests.helpers.servers.server import Server, running_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROGRAM is None, reason="neither valkey-server nor redis-server is installed"),
    pytest.mark.usefixtures("shared_memory_is_left_as_it_was"),
]

PASSWORD = "of the store"
PROMPTS = [prompt_of(150 + 16 * number, number) for number in range(6)]
NEW_TOKENS = 24
DEADLINE_S = 120.0
SLOW_S = 20.0
"""More than a request takes on a busy machine, and less than if each waited for the store."""


@pytest.fixture(scope="module")
def store() -> Iterator[RedisProcess]:
    with redis_process(PASSWORD) as made:
        yield made


@contextmanager
def two_servers(store: RedisProcess, directory: Path, *roles: str) -> Iterator[list[Server]]:
    """Servers that share the store, each with a role if there are some."""
    model = write_checkpoint(directory / "tiny")
    tier = ("--kv-offload-remote-url", store.url, "--kv-offload-remote", "64M", "--num-kv-blocks", "200")
    args = ("--model", str(model), *ARGS, *tier, "--max-model-len", "512", "--max-num-seqs", "2")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOM_KV_OFFLOAD_REMOTE_PASSWORD", PASSWORD)
        servers = []
        for number in range(2):
            transfer = [
                {"kv_connector": "LMCacheConnectorV1", "kv_role": role} for role in roles[number:][:1]
            ]
            options = [part for each in transfer for part in ("--kv-transfer-config", json.dumps(each))]
            path = str(directory / f"admin-{number}")
            servers.append(stack.enter_context(running_server(*args, *options, "--admin-socket", path)))
        yield servers


async def post(session: aiohttp.ClientSession, path: str, body: object = None) -> Any:
    """The response's JSON. Requests are refused while the only engine starts again.

    One that the engine had when it was killed gets an `engine_dead`.
    """
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with session.post(path, json=body) as response:
                if response.status == 200:
                    return await response.json()
                text = await response.text()
                assert response.status == 503 or json.loads(text)["error"]["code"] == "engine_dead", text
            await asyncio.sleep(0.1)


async def forget(server: Server) -> None:
    """What the cache and the index of the tier have; the store keeps its blocks."""
    (path,) = re.findall(r"--admin-socket (\S+)", " ".join(server.process.args))
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path)) as session:
        await post(session, "/reset_prefix_cache")


async def complete(server: Server, number: int, max_tokens: int = NEW_TOKENS) -> str:
    body = {
        "model": MODEL_NAME,
        "prompt": PROMPTS[number],
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
    }
    async with aiohttp.ClientSession(server.url) as session:
        return str((await post(session, "/v1/completions", body))["choices"][0]["text"])


def all_of(*servers: Server) -> list[list[str]]:
    """The outputs of all prompts, on each server, which get them at the same time and have none cached."""

    async def run() -> list[list[str]]:
        await asyncio.gather(*map(forget, servers))
        each = [[complete(server, number) for number in range(len(PROMPTS))] for server in servers]
        return [list(found) for found in await asyncio.gather(*(asyncio.gather(*some) for some in each))]

    return asyncio.run(run())


def remote(server: Server, name: str) -> int:
    """A counter of the tier."""
    (found,) = re.findall(
        rf'^atom:kv_tier_{name}_total\{{.*tier="REMOTE".*\}} (\S+)$', metrics_text(server), re.MULTILINE
    )
    return int(float(found))


def until_stored(server: Server, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while remote(server, "stored_blocks") < count:
        assert time.monotonic() < deadline, "blocks are not stored"
        time.sleep(0.05)


def test_outputs_with_a_shared_store_and_its_faults(store: RedisProcess, tmp_path: Path) -> None:
    with two_servers(store, tmp_path) as servers:
        check_faults(store, servers)


def check_faults(store: RedisProcess, servers: list[Server]) -> None:
    first, second = servers
    (expected,) = all_of(first)
    until_stored(first, 50)
    assert all_of(second) == [expected]
    assert remote(second, "hits") > 300, "the other server's blocks were not found"
    assert all_of(first, second) == [expected] * 2

    store.signal(signal.SIGSTOP)
    begun = time.monotonic()
    assert all_of(first, second) == [expected] * 2
    assert time.monotonic() - begun < SLOW_S
    store.signal(signal.SIGCONT)

    async def killed_under_load() -> list[str]:
        await asyncio.gather(*map(forget, servers))
        tasks = [asyncio.create_task(complete(server, number)) for number in range(6) for server in servers]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        store.kill()
        return await asyncio.gather(*tasks)

    assert asyncio.run(killed_under_load()) == [text for text in expected for _ in servers]
    assert all_of(first, second) == [expected] * 2

    store.start()
    deadline = time.monotonic() + DEADLINE_S
    before = remote(first, "stored_blocks") + remote(second, "hits")
    while remote(first, "stored_blocks") + remote(second, "hits") < before + 100:
        assert time.monotonic() < deadline, "the store is not used again"
        assert all_of(first, second) == [expected] * 2
    for server in servers:
        assert server.process.poll() is None and "Traceback" not in server.text()
        assert len(re.findall("blocks that are there are computed", server.text())) <= 3, server.text()


def kill_engine(server: Server) -> None:
    (pid,) = (pid for pid, line in server.children().items() if "engine_core.process" in line)
    os.kill(pid, signal.SIGKILL)


def test_a_server_computes_prompts_and_another_goes_on(store: RedisProcess, tmp_path: Path) -> None:
    """As a router does that sends a request to the first with max_tokens 1, and then to the second."""
    with two_servers(store, tmp_path, "kv_producer", "kv_consumer") as (producer, consumer):
        (expected,) = all_of(producer)

        async def through_both(number: int) -> str:
            await complete(producer, number, max_tokens=1)
            return await complete(consumer, number)

        async def all_through_both(victim: Server | None = None) -> list[str]:
            await forget(producer)
            tasks = [asyncio.create_task(through_both(number)) for number in range(len(PROMPTS))]
            if victim is not None:
                await asyncio.sleep(0.5)
                kill_engine(victim)
            return list(await asyncio.gather(*tasks))

        assert asyncio.run(all_through_both()) == expected
        assert remote(consumer, "hits") > 300 and remote(consumer, "stored_blocks") == 0
        assert remote(producer, "stored_blocks") > 50 and remote(producer, "loaded_blocks") == 0
        for victim in (producer, consumer):
            assert asyncio.run(all_through_both(victim)) == expected
