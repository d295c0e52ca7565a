"""Kills at each of the first tokens of sampled streams of tool calls with drafts: their texts do not change.

Many streams are under way at once, each at another token, so that one kill interrupts all of them. More kills
follow, when they are at enough other tokens.
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.random_server import ARGS, MODEL_NAME, write_checkpoint
from tests.helpers.resuming import Resumed, follow
from tests.helpers.server import Server, running_server
from tests.helpers.tiny_tokenizer import TEMPLATE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOKENS = set(range(1, 65))
STREAMS = 32
ROUNDS = 20
DEADLINE_S = 400.0
PATH = "/v1/chat/completions"
STRING = {"enum": ["x", "yz", "xyx"]}
CITIES = {"type": "array", "minItems": 20, "maxItems": 24, "items": STRING}
WEATHER = {"type": "object", "properties": {"cities": CITIES}, "required": ["cities"]}
TOOLS = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
FLAGS = (
    *("--method", "ngram", "--num-speculative-tokens", "3", "--prompt-lookup-min", "1"),
    *("--api-server-count", "2", "--orphan-grace", "150"),
    *("--max-replays", "100", "--max-restarts", "100"),
)


def body(seed: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "one two"}],
        "stream": True,
        "seed": seed,
        "temperature": 0.8,
        "max_tokens": 500,
        "return_token_ids": True,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }


def num_tokens(resumed: Resumed) -> int:
    """Tokens that a client has got."""
    chunks = (json.loads(event) for event in resumed.events if event.startswith("{"))
    return sum(len(choice.get("token_ids") or ()) for chunk in chunks for choice in chunk["choices"])


class Round:
    """All streams once, each a few tokens after the one before, and kills while they are at chosen tokens."""

    def __init__(self, url: str, kill: Callable[[], bool], missing: set[int], least: int):
        """`kill` is called where `least` of the tokens in `missing` are hit, which are removed if it does."""
        self._least = least
        self._url = url
        self._kill = kill
        self._missing = missing
        self._counts = dict.fromkeys(range(STREAMS), 0)
        self._can_begin = [asyncio.Event() for _ in range(STREAMS + 1)]
        self._can_begin[0].set()

    async def run(self) -> list[Resumed]:
        """What the clients got."""
        return await asyncio.gather(*map(self._stream, range(STREAMS)))

    async def _stream(self, number: int) -> Resumed:
        def on_event(resumed: Resumed) -> None:
            self._counts[number] = num_tokens(resumed)
            if self._counts[number] > 1:
                self._can_begin[number + 1].set()
            hit = self._missing.intersection(self._counts.values())
            if self._can_begin[-1].is_set() and len(hit) >= self._least and self._kill():
                self._missing -= hit

        await self._can_begin[number].wait()
        resumed = await follow(self._url, PATH, body(number), on_event, DEADLINE_S)
        self._counts[number] = 0
        return resumed


@pytest.mark.parametrize("victim", ["workers.main", "engine_core.process", "frontend.main"])
def test_kills_at_every_token(tmp_path_factory: pytest.TempPathFactory, victim: str) -> None:
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    model = write_checkpoint(tmp_path_factory.mktemp("model") / "model", **small)
    (model / "chat_template.jinja").write_text(TOOLS + TEMPLATE, encoding="utf-8")
    with running_server("--model", str(model), *ARGS, *FLAGS) as server:
        expected = asyncio.run(_undisturbed(server))
        missing = set(TOKENS)
        killed = set[int]()
        for number in range(ROUNDS):
            least = max(len(missing) // (8 + 4 * number), 1)
            one = Round(server.url, lambda: _kill(server, victim, killed), missing, least)
            got = asyncio.run(one.run())
            assert [each.texts for each in got] == [each.texts for each in expected]
            if not missing:
                break
    assert not missing


async def _undisturbed(server: Server) -> list[Resumed]:
    work = (follow(server.url, PATH, body(number), deadline_s=DEADLINE_S) for number in range(STREAMS))
    found = await asyncio.gather(*work)
    for each in found:
        assert each.resumptions == 0 and num_tokens(each) > max(TOKENS)
        assert 20 <= len(json.loads(each.texts[0])["cities"]) <= 24
    return found


def _kill(server: Server, module: str, killed: set[int]) -> bool:
    """Kill the processes of a module; False if none was started since the last time."""
    pids = {pid for pid, line in server.children().items() if module in line} - killed
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    killed |= pids
    return bool(pids)
