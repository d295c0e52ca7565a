"""Structured output of a model of random weights: whatever it prefers, a finished output is valid.

The server splits prompts into chunks, preempts for lack of blocks and speculates, and requests have several
choices.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.helpers.json_schemas import is_valid, random_schema
from tests.helpers.random_server import ARGS, write_checkpoint
from tests.helpers.server import Server, running_server

pytestmark = pytest.mark.timeout(300)

_AT_ONCE = 16
_MAX_TOKENS = 700
_LIMITS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "48", "--num-kv-blocks", "150")
_DRAFTS = ("--method", "ngram", "--num-speculative-tokens", "3")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    directory = write_checkpoint(tmp_path_factory.mktemp("model") / "model", **small)
    with running_server("--model", str(directory), *ARGS, *_LIMITS, *_DRAFTS) as running:
        yield running


class Client:
    """Sends completion requests, some at a time."""

    def __init__(self, session: aiohttp.ClientSession):
        self._session = session
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def choices(self, **fields: Any) -> list[dict[str, Any]]:
        """The choices of a request that must succeed."""
        body = {"prompt": "one two three " * 9, "temperature": 2, "max_tokens": _MAX_TOKENS, **fields}
        async with self._slots, self._session.post("/v1/completions", json=body) as answer:
            content = await answer.json()
            assert answer.status == 200, (content, fields)
            choices: list[dict[str, Any]] = content["choices"]
            return choices


async def _finished_outputs(server: Server, schemas: list[dict[str, Any]]) -> int:
    """Generate for each schema; checks all outputs, and returns how many were finished."""
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=280)) as session:
        client = Client(session)

        async def check(seed: int, schema: dict[str, Any]) -> int:
            response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            choices = await client.choices(response_format=response_format, seed=seed, n=1 + seed % 2)
            finished = [choice["text"] for choice in choices if choice["finish_reason"] == "stop"]
            for text in finished:
                assert is_valid(json.loads(text), schema), (text, schema)
            return len(finished) / len(choices)

        return sum(await asyncio.gather(*(check(*one) for one in enumerate(schemas))))


def _schemas(count: int) -> list[dict[str, Any]]:
    draw = random.Random(7)
    return [random_schema(draw) for _ in range(count)]


def test_finished_outputs_are_valid(server: Server) -> None:
    assert asyncio.run(_finished_outputs(server, _schemas(20))) > 15


def test_messages_follow_a_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    body = {
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "one two"}],
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }

    async def run() -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(server.url) as session,
            session.post("/v1/messages", json=body) as answer,
        ):
            return answer.status, await answer.json()

    status, message = asyncio.run(run())
    assert status == 200, message
    assert message["stop_reason"] == "max_tokens" or is_valid(
        json.loads(message["content"][0]["text"]), schema
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_finished_outputs_of_500_schemas_are_valid(server: Server) -> None:
    assert asyncio.run(_finished_outputs(server, _schemas(500))) > 400
