"""Clients of several fake engine cores, and their streams."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atom.shared.messages.engine import AddRequest, FinishReason, Sampling, pack_ids
from frontend.engine_client.client import EngineClient
from frontend.engine_client.client_settings import ClientHooks, ClientSettings
from frontend.engine_client.dp_router import DPRouter, Policy
from frontend.engine_client.streams import Stream
from frontend.metrics.metrics import Metrics
from frontend.text.output_processor import OutputProcessor, TextOptions
from tests.helpers.servers.fake_core import FakeCore, Script

DEADLINE_S = 60.0
IDS = list(range(40))
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
Start = Callable[..., FakeCore]
"""Starts the core of a rank and life."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_core(rank: int, life: int = 0, endless: bool = False, **fields: object) -> FakeCore:
            script = Script(IDS * 1000, None) if endless else Script(IDS, FinishReason.MAX_TOKENS)
            settings: dict[str, Any] = {"script": lambda _: script, "step_s": 0.002} | fields
            core = FakeCore(tmp_path, rank=rank, life=life, **settings)
            return stack.enter_context(core)

        yield start_core


@asynccontextmanager
async def connected(
    cores: list[FakeCore],
    policy: Policy = "round_robin",
    hooks: ClientHooks = ClientHooks(),  # noqa: B008 (it is frozen)
    **settings: Any,
) -> AsyncIterator[EngineClient]:
    """Ready on all engines."""
    made = ClientSettings(**{"num_ranks": len(cores), "hang_timeout": 600.0} | settings)
    router = DPRouter(policy, len(cores), block_size=16)
    addresses = [core.address for core in cores]
    client = EngineClient(addresses, made, router, OutputProcessor(None), Metrics(), hooks)
    async with client:
        await until(lambda: all(client.engines.up.values()))
        yield client
        assert sum(client._placement._router.load(rank)[0] for rank in range(len(cores))) == len(client)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def request(client: EngineClient, n: int = 1) -> AddRequest:
    return AddRequest(client.new_ids(n), pack_ids([1, 2, 3]), len(IDS), GREEDY)


async def read(stream: Stream) -> list[int]:
    ids: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        async for updates in stream:
            for update in updates:
                ids += update.token_ids
    return ids


async def generate(client: EngineClient, rank: int | None = None, n: int = 1) -> list[int]:
    async with client.open([request(client, n)], TextOptions(), rank=rank) as stream:
        return await read(stream)


def received(core: FakeCore) -> int:
    return len({one.request_ids[0] for one in core.requests})


async def running(client: EngineClient, rank: int) -> tuple["asyncio.Task[list[int]]", Stream]:
    """A reader of a stream on that rank that has begun."""
    opened: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

    async def run() -> list[int]:
        async with client.open([request(client)], TextOptions(), rank=rank) as stream:
            opened.set_result(stream)
            return await read(stream)

    reader = asyncio.create_task(run())
    stream = await opened
    await until(lambda: stream.first_token_at)
    return reader, stream
