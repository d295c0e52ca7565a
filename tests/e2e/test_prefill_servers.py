"""Two servers and a router as vLLM has them: one computes prompts, the other reads their blocks."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import aiohttp
import pytest

from tests.helpers.checkpoints.tiny_models import prompt_of
from tests.helpers.servers.prompt_router import (
    DEADLINE_S,
    Router,
    StartingError,
    counter,
    free_ports,
    loaded,
    post,
    text_of,
)
from tests.helpers.servers.random_server import ARGS, write_checkpoint
from tests.helpers.servers.server import Server, running_server

pytestmark = [
    pytest.mark.timeout(480),
    pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed"),
]

PROMPTS = [prompt_of(40 + 30 * number, number) for number in range(4)]
LIMITS = ("--max-model-len", "512", "--max-num-seqs", "4", "--num-kv-blocks", "96")


def body_of(number: int) -> dict[str, Any]:
    return {"prompt": PROMPTS[number], "max_tokens": 16, "temperature": 0, "ignore_eos": True}


async def forget(server: Server) -> None:
    (path,) = re.findall(r"--admin-socket (\S+)", " ".join(server.process.args))
    async with (
        aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path)) as session,
        session.post("/reset_prefix_cache") as response,
    ):
        if response.status == 503:
            raise StartingError
        assert response.status == 200


async def until_nothing_is_kept(server: Server) -> None:
    """Long before the deadline of a lease."""
    async with asyncio.timeout(15):
        while counter(server, "kv_blocks_used"):
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    directory = tmp_path_factory.mktemp("servers")
    model = write_checkpoint(directory / "tiny")
    port = free_ports(2)
    with ExitStack() as stack:
        servers = []
        for role, flags in (
            ("kv_producer", ("--kv-transfer-port", str(port), "--kv-offload-memory", "16M")),
            ("kv_consumer", ("--kv-transfer-peers", f"127.0.0.1:{port}")),
        ):
            transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
            args = ("--model", str(model), *ARGS, *LIMITS, "--kv-transfer-config", transfer, *flags)
            admin = str(directory / f"admin-{role}")
            servers.append(stack.enter_context(running_server(*args, "--admin-socket", admin)))
        yield Router(*servers)


@pytest.fixture(scope="module")
def expected(router: Router) -> list[str]:
    """The outputs of one server."""

    async def run() -> list[str]:
        found = [text_of(await post(router.producer, body_of(number))) for number in range(len(PROMPTS))]
        await forget(router.producer)
        return found

    return asyncio.run(run())


def test_outputs_are_those_of_one_server(router: Router, expected: list[str]) -> None:
    async def run() -> None:
        before = loaded(router.consumer)
        found = await asyncio.gather(*(router.run(body_of(number)) for number in range(len(PROMPTS))))
        assert [text_of(each) for each in found] == expected
        assert loaded(router.consumer) - before == sum(len(prompt) // 16 for prompt in PROMPTS)
        assert all(each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found)
        assert not any("kv_transfer_params" in each for each in found)
        await forget(router.consumer)
        assert text_of(await router.run(body_of(3) | {"stream": True})) == expected[3]
        await until_nothing_is_kept(router.producer)

    asyncio.run(run())


CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello " * 40}],
    "max_tokens": 12,
    "temperature": 1.0,
    "seed": 5,
    "ignore_eos": True,
}


def test_chat_completions(router: Router) -> None:
    async def run() -> None:
        path = "/v1/chat/completions"
        alone = await post(router.producer, CHAT, path)
        before = loaded(router.consumer)
        both = await router.run(CHAT, path)
        assert both["choices"][0]["message"] == alone["choices"][0]["message"]
        assert loaded(router.consumer) > before
        await until_nothing_is_kept(router.producer)

    asyncio.run(run())


async def computed(router: Router, number: int, params: Any, expected: list[str]) -> None:
    """With these parameters, which name no blocks of the prompt, it is computed, and cached as it must be."""
    await forget(router.consumer)
    before = loaded(router.consumer)
    for fields in ({"kv_transfer_params": params}, {}):
        assert text_of(await post(router.consumer, body_of(number) | fields)) == expected[number]
    assert loaded(router.consumer) == before


def test_what_clients_change_is_never_used(router: Router, expected: list[str]) -> None:
    async def run() -> None:
        own, other = await router.prompt(body_of(2)), await router.prompt(body_of(3))
        forged = own | {"remote_block_ids": other["remote_block_ids"]}
        await computed(
            router, 2, forged | {"remote_block_ids": [forged["remote_block_ids"][0][:6]]}, expected
        )
        assert "has not granted the lease" in router.consumer.text()
        await computed(router, 2, other, expected)
        assert "are those of other tokens" in router.consumer.text()
        await computed(router, 2, own | {"remote_engine_id": "0" * 32}, expected)
        elsewhere = body_of(2) | {"kv_transfer_params": own | {"remote_host": "127.0.0.9"}}
        await post(router.consumer, elsewhere, status=400)
        await forget(router.consumer)  # the lease is still there
        before = loaded(router.consumer)
        response = await post(router.consumer, body_of(2) | {"kv_transfer_params": own})
        assert text_of(response) == expected[2] and loaded(router.consumer) > before
        await post(router.consumer, body_of(3) | {"kv_transfer_params": other})
        await until_nothing_is_kept(router.producer)

    asyncio.run(run())


def test_prompts_that_nobody_fetches_make_room(router: Router, expected: list[str]) -> None:
    async def run() -> None:
        flood = [body_of(0) | {"prompt": prompt_of(160, 50 + number)} for number in range(12)]
        await asyncio.gather(*map(router.prompt, flood))
        begun = time.monotonic()
        assert text_of(await post(router.producer, body_of(3))) == expected[3]
        assert time.monotonic() - begun < 30
        await forget(router.producer)

    asyncio.run(run())


async def kill_engine(server: Server) -> None:
    """Returns once its worker has ended, too, which others could still read."""
    children = server.children()
    (core,) = (pid for pid, line in children.items() if "engine_core.process" in line)
    (worker,) = (pid for pid, line in children.items() if "workers.main" in line)
    os.kill(core, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        while worker in server.children():
            await asyncio.sleep(0.05)


async def until_it_reads_again(router: Router, expected: list[str]) -> None:
    """A new life of an engine that was killed: requests are refused until it is there."""
    before = loaded(router.consumer)
    async with asyncio.timeout(DEADLINE_S):
        while loaded(router.consumer) <= before:
            with contextlib.suppress(StartingError):
                await forget(router.consumer)
                assert text_of(await router.run(body_of(3))) == expected[3]
            await asyncio.sleep(0.5)


@pytest.mark.slow
def test_ends_of_engines_and_servers(router: Router, expected: list[str]) -> None:
    async def run() -> None:
        params = await router.prompt(body_of(3))
        await kill_engine(router.producer)
        await computed(router, 3, params, expected)
        await until_it_reads_again(router, expected)
        await computed(router, 3, params, expected)
        stale = await router.prompt(body_of(2))
        running = [asyncio.create_task(router.run(body_of(number))) for number in (0, 1, 3)]
        await asyncio.sleep(0.2)
        await kill_engine(router.consumer)
        found = [text_of(each) for each in await asyncio.gather(*running)]
        assert found == [expected[number] for number in (0, 1, 3)]
        await until_it_reads_again(router, expected)
        router.producer.kill()
        await computed(router, 2, stale, expected)
        assert "Traceback" not in router.consumer.text()

    asyncio.run(run())
