"""Requests to a server of several nodes, and the same ones to the library in one process."""

import asyncio
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from atom import LLMEngine, SamplingParams
from tests.helpers.servers.random_server import MODEL_NAME

DEADLINE_S = 120.0
_AT_ONCE = 32
_VOCABULARY = 200


@dataclass(frozen=True)
class Wanted:
    """One request: greedy, or sampled with a seed."""

    prompt: list[int]
    seed: int | None
    max_tokens: int = 8

    def body(self) -> dict[str, Any]:
        sampling = {"temperature": 0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return {
            "model": MODEL_NAME,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **sampling,
        }

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.0 if self.seed is None else 1.0,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=True,
        )


def some_requests(count: int) -> list[Wanted]:
    """Every second one is sampled; a third have a prefix in common."""
    chooser = random.Random(count)
    shared = chooser.choices(range(4, _VOCABULARY), k=40)
    made = []
    for number in range(count):
        own = chooser.choices(range(4, _VOCABULARY), k=chooser.randint(1, 60))
        prompt = shared + own if number % 3 == 0 else own
        made.append(Wanted(prompt, number if number % 2 else None, chooser.randint(1, 12)))
    return made


def expected_ids(model: str, requests: list[Wanted], **options: Any) -> list[list[int]]:
    """What one engine with one worker generates, in this process's children alone."""
    with LLMEngine(model=model, device="cpu", dtype="float32", **options) as engine:
        outputs = engine.generate([each.prompt for each in requests], [each.params() for each in requests])
    return [output["token_ids"] for output in outputs]


async def ids_of(url: str, requests: list[Wanted], **fields: Any) -> list[list[int]]:
    """The ids that the server generates, some requests at once. `fields` are further ones of all requests."""
    turns = asyncio.Semaphore(_AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)

    async def one(session: aiohttp.ClientSession, wanted: Wanted) -> list[int]:
        async with turns, session.post("/v1/completions", json=wanted.body() | fields) as response:
            found = await response.json()
            assert response.status == 200, found
            ids: list[int] = found["choices"][0]["token_ids"]
            return ids

    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        return await asyncio.gather(*(one(session, wanted) for wanted in requests))


async def engines_up(url: str) -> int:
    """Engines that can generate, as /metrics tells."""
    async with aiohttp.ClientSession(url) as session, session.get("/metrics") as response:
        return len(re.findall(r"^atom:engine_up.* 1\.0$", await response.text(), re.MULTILINE))


async def until_up(url: str, engines: int) -> float:
    """Seconds until so many engines can generate."""
    begun = time.monotonic()
    async with asyncio.timeout(DEADLINE_S):
        while await engines_up(url) != engines:
            await asyncio.sleep(0.1)
    return time.monotonic() - begun


@dataclass
class ReadyWatch:
    """Polls /ready while its block runs."""

    url: str
    statuses: Counter[int] = field(default_factory=Counter)

    async def __aenter__(self) -> "ReadyWatch":
        self._task = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _poll(self) -> None:
        async with aiohttp.ClientSession(self.url) as session:
            while True:
                async with session.get("/ready") as response:
                    self.statuses[response.status] += 1
                await asyncio.sleep(0.1)
