"""Processes are killed at each of the first 64 tokens of seeded streams with tool calls and drafts."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.servers.edges import Gauges
from tests.helpers.servers.random_server import ARGS, write_tools_checkpoint
from tests.helpers.servers.resuming import Resumed, read
from tests.helpers.servers.server import Server, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLED_AT = range(1, 65)
STREAMS = 128
LENGTH = 100
LAST = 90
"""Tokens of the first stream after which any of the wanted numbers will do."""
DRAFTS = ("--method", "ngram", "--num-speculative-tokens", "3", "--prompt-lookup-min", "1")
LIMITS = ("--max-replays", "100", "--max-restarts", "100", "--api-server-count", "2", "--orphan-grace", "150")
DEADLINE_S = 300

_PATH = "/v1/chat/completions"
_CITIES = {"type": "array", "minItems": 40, "items": {"enum": ["x", "yz"]}}
_WEATHER = {"type": "object", "properties": {"cities": _CITIES}, "required": ["cities"]}


def _body(number: int) -> dict[str, Any]:
    return {
        "model": "random",
        "messages": [{"role": "user", "content": "one two"}],
        "stream": True,
        "seed": number,
        "temperature": 0.8,
        "max_tokens": LENGTH,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": _WEATHER}}],
        "tool_choice": "required",
        "return_token_ids": True,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = write_tools_checkpoint(tmp_path_factory.mktemp("model") / "model")
    with running_server("--model", str(directory), *ARGS, *DRAFTS, *LIMITS) as running:
        yield running


class Round:
    """All streams, until each has ended; they begin one after the other, as the first one gets its tokens.

    So they are at different tokens when the processes `victims` are killed: once two thirds of the `wanted`
    numbers are such that a stream has got so many. On a busy machine the first one may get all of its tokens
    before another begins.
    """

    def __init__(self, server: Server, wanted: set[int], victims: str):
        self.killed_at: set[int] = set()
        """The wanted numbers that were so."""
        self._server = server
        self._wanted = wanted
        self._victims = victims
        self._counts = [0] * STREAMS
        self._advanced = asyncio.Event()

    async def run(self) -> list[Resumed]:
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(*(self._follow(number) for number in range(STREAMS)))

    async def _follow(self, number: int) -> Resumed:
        while self._counts[0] < number * KILLED_AT.stop / STREAMS:
            await self._advanced.wait()

        def on_event(resumed: Resumed) -> None:
            self._counts[number] += _num_tokens(resumed.events[-1])
            if number == 0:
                self._advanced.set()
                self._advanced = asyncio.Event()
            if self._victims:
                self._kill_if_due()

        resumed = Resumed()
        while not await read(self._server.url, _PATH, _body(number), resumed, on_event):
            resumed.resumptions += 1
            await asyncio.sleep(0.1)
        return resumed

    def _kill_if_due(self) -> None:
        found = self._wanted.intersection(self._counts)
        if not found or (3 * len(found) < 2 * len(self._wanted) and self._counts[0] < LAST):
            return
        for pid, line in self._server.children().items():
            if self._victims in line:
                os.kill(pid, signal.SIGKILL)
        self._victims = ""
        self.killed_at = found


def _num_tokens(event: str) -> int:
    if not event.startswith("{"):
        return 0
    return sum(len(choice.get("token_ids") or ()) for choice in json.loads(event)["choices"])


@pytest.mark.parametrize(
    "kinds", [("workers.main", "engine_core.process"), ("frontend.main",)], ids=["engine", "frontends"]
)
def test_tool_calls_survive_a_kill_at_every_token(server: Server, kinds: tuple[str, ...]) -> None:
    """With the events of an undisturbed run. All frontends die at once: the next ones are asked."""
    undisturbed = asyncio.run(Round(server, set(), "").run())
    assert all(sum(map(_num_tokens, each.events)) == LENGTH for each in undisturbed)
    assert Gauges(server)["spec_decode_num_accepted_tokens_total"] > 0
    wanted, rounds = set(KILLED_AT), 0
    while wanted:
        killing = Round(server, wanted, kinds[rounds % len(kinds)])
        streams = asyncio.run(killing.run())
        assert [each.events for each in streams] == [each.events for each in undisturbed]
        assert killing.killed_at
        if "frontend" in kinds[0]:
            assert sum(each.resumptions > 0 for each in streams) > len(killing.killed_at)
        wanted -= killing.killed_at
        rounds += 1
        print(f"round {rounds}: {len(killing.killed_at)} more", flush=True)
