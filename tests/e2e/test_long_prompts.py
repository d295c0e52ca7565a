"""Texts of 200,000 tokens: the event loop, and so the streams of all others, go on while they are read."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.helpers.servers.loop_lag import lag_buckets, longest_hold
from tests.helpers.servers.random_server import ARGS, MODEL_NAME, write_checkpoint
from tests.helpers.servers.server import Server, running_server

pytestmark = pytest.mark.timeout(300)

TOKENS = 200_000
LIMIT_S = 0.05
TRIES = 5
"""Other processes of a busy machine delay the loop as well, but not each time."""
WORDS = "The quick brown fox jumps over the lazy dog. Hello world, hello there!\n"
TEXT = WORDS * (TOKENS // 27)  # of so many tokens each
TURNS = [
    {"role": ("user", "assistant")[number % 2], "content": TEXT[: len(TEXT) // 500]} for number in range(501)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=1,
        max_position_embeddings=1 << 18,
    )
    with running_server("--model", str(directory), *ARGS) as running:
        yield running


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/chat/completions", {"messages": TURNS}),
        ("/v1/messages", {"messages": TURNS}),
        ("/v1/completions", {"prompt": TEXT}),
    ],
)
def test_the_event_loop_is_not_held(server: Server, path: str, fields: dict[str, Any]) -> None:
    body = json.dumps({"model": MODEL_NAME, "max_tokens": 1, "stream": True, **fields}).encode()

    async def hold() -> float:
        """Until the request is with the engine, which is left to compute no more of it."""
        async with aiohttp.ClientSession(server.url) as session:
            before = await _metrics(session)
            async with session.post(path, data=body) as response:
                assert response.status == 200, await response.text()
            await asyncio.sleep(0.1)  # the next ticks of the watch
            return longest_hold(lag_buckets(before), lag_buckets(await _metrics(session)))

    holds = []
    while not holds or (min(holds) > LIMIT_S and len(holds) < TRIES):
        holds.append(asyncio.run(hold()))
    assert min(holds) <= LIMIT_S, f"the loop was held for {holds} s"


async def _metrics(session: aiohttp.ClientSession) -> str:
    async with session.get("/metrics") as response:
        return await response.text()
