"""A router as vLLM has it: it sends a request to a server for prompts, and then to one that generates."""

import asyncio
import json
import os
import re
import socket
from contextlib import ExitStack
from typing import Any

import aiohttp

from tests.helpers.servers.edges import metrics_text
from tests.helpers.servers.random_server import MODEL_NAME
from tests.helpers.servers.server import ServerProcess

FIRST_LEG: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
DEADLINE_S = 120.0


def free_ports(count: int) -> int:
    """The first of so many ports in a row."""
    for first in range(20_000 + os.getpid() % 5000, 30_000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no ports are free")


class Router:
    """Sends each request to both servers."""

    def __init__(self, producer: ServerProcess, consumer: ServerProcess):
        self.producer = producer
        self.consumer = consumer

    async def prompt(self, body: dict[str, Any], path: str = "/v1/completions") -> Any:
        """What the server for prompts says of the blocks."""
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": FIRST_LEG}
        return (await post(self.producer, first, path))["kv_transfer_params"]

    async def run(self, body: dict[str, Any], path: str = "/v1/completions") -> Any:
        params = await self.prompt(body, path)
        return await post(self.consumer, body | {"kv_transfer_params": params}, path)


class StartingError(Exception):
    """The server has no engine now."""


async def post(
    server: ServerProcess, body: dict[str, Any], path: str = "/v1/completions", status: int = 200
) -> Any:
    async with (
        asyncio.timeout(DEADLINE_S),
        aiohttp.ClientSession(server.url) as session,
        session.post(path, json={"model": MODEL_NAME, **body}) as response,
    ):
        text = await response.text()
        if response.status == 503:
            raise StartingError(text)
        assert response.status == status, text
        return text if body.get("stream") else json.loads(text)


def text_of(response: Any) -> str:
    if isinstance(response, str):  # a stream
        events = [json.loads(line) for line in re.findall(r"^data: (\{.*)$", response, re.MULTILINE)]
        return "".join(event["choices"][0]["text"] for event in events)
    return str(response["choices"][0]["text"])


def counter(server: ServerProcess, name: str) -> int:
    found = re.findall(rf"^atom:{name}\{{.*\}} (\S+)$", metrics_text(server), re.MULTILINE)
    return sum(int(float(each)) for each in found)


def loaded(server: ServerProcess) -> int:
    """Blocks that were read from the other server."""
    return counter(server, "kv_tier_loaded_blocks_total")
