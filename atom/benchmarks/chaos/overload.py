"""Ten times the load that a server can take: what it still gives, what it costs, how soon it is over.

peak        as many clients as the scenario has streams, each with one request after the other
overload    requests at ten times the rate at which these ended, whatever becomes of them
recovery    one request after the other, until one is served

A server has hundreds of requests in progress at the end of an overload, far more than at the peak: those
that ended within its time would tell little. So goodput is counted in tokens that were generated meanwhile,
without those of requests that were not served in the end, which were wasted. Memory must not grow in its
second half, or after the first refusal if that is later: the queue is full then, and grows no more.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from atom.benchmarks.chaos.processes import ChaosError, processes_of, resident_bytes
from atom.benchmarks.chaos.report import OverloadFigures
from atom.benchmarks.chaos.streams import body_of

__all__ = ["Load", "overload"]

_PATH = "/v1/completions"
_FACTOR = 10
_TOKENS = 32
_PEAK_SHARE = 3
"""The peak is measured for a third of the time of the overload."""
_MOST_OPEN = 4096
"""Requests of this tool at a time: more of them would measure the tool."""
_RECOVERY_DEADLINE_S = 60.0
_METRICS_DEADLINE_S = 60.0
_POLL_S = 0.1
_GENERATED = re.compile(r"^atom:generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)
_timeout = aiohttp.ClientTimeout(total=180)


@dataclass
class Load:
    """Requests to one server, and what became of them."""

    session: aiohttp.ClientSession
    model: str
    outcomes: Counter[str] = field(default_factory=Counter)
    """By status, or `no response`."""
    served: int = 0
    """Requests with status 200 since the last `reset`."""
    number: int = 0

    async def one(self) -> bool:
        """One request; whether it was served."""
        self.number += 1
        body: dict[str, Any] = {**body_of(self.model, self.number, _TOKENS), "stream": False}
        try:
            async with self.session.post(_PATH, json=body) as response:
                await response.read()
                lacks = response.status == 429 and "Retry-After" not in response.headers
                outcome = f"{response.status}{' without Retry-After' if lacks else ''}"
        except (aiohttp.ClientError, TimeoutError):
            outcome = "no response"
        self.outcomes[outcome] += 1
        self.served += outcome == "200"
        return outcome == "200"

    def reset(self) -> None:
        """Begin to count anew."""
        self.served = 0

    async def closed(self, clients: int, seconds: float) -> float:
        """Requests per second that `clients` get, each after the one before."""
        begun = time.monotonic()

        async def client() -> None:
            while time.monotonic() < begun + seconds:
                await self.one()

        self.reset()
        await asyncio.gather(*(client() for _ in range(clients)))
        return self.served / (time.monotonic() - begun)

    async def open(
        self, rate: float, seconds: float, at_half: Callable[[], None] = lambda: None
    ) -> tuple[float, int, int]:
        """Let `rate` requests arrive per second.

        `at_half` is called once half of the time has passed and requests are refused, if that comes to pass.

        Returns tokens per second meanwhile, and of all these requests the tokens and the wasted tokens.
        """
        before = await self._generated()
        tasks: set[asyncio.Task[bool]] = set()
        begun = time.monotonic()
        sent = 0
        self.reset()
        is_first_half = True
        while (passed := time.monotonic() - begun) < seconds:
            if is_first_half and passed >= seconds / 2 and self.outcomes["429"]:
                is_first_half = False
                at_half()
            while sent < passed * rate and len(tasks) < _MOST_OPEN:
                task = asyncio.create_task(self.one())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                sent += 1
            await asyncio.sleep(1 / rate)
        tokens_per_s = (await self._generated() - before) / (time.monotonic() - begun)
        await asyncio.gather(*tasks)
        tokens = await self._generated() - before
        return tokens_per_s, tokens, max(tokens - _TOKENS * self.served, 0)

    async def _generated(self) -> int:
        """Tokens that the server has generated since its start. Raises ChaosError."""
        begun = time.monotonic()
        while time.monotonic() < begun + _METRICS_DEADLINE_S:
            async with self.session.get("/metrics") as response:
                text = await response.text()
                if response.status == 200:  # else a busy frontend could not read those of the others in time
                    return sum(int(float(value)) for value in _GENERATED.findall(text))
            await asyncio.sleep(_POLL_S)
        raise ChaosError(f"/metrics could not be read for {_METRICS_DEADLINE_S:.0f} s: {text:.200}")

    async def recovery_s(self) -> float:
        """Seconds until a request is served."""
        begun = time.monotonic()
        while not await self.one() and time.monotonic() < begun + _RECOVERY_DEADLINE_S:
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - begun


async def overload(
    url: str, headers: dict[str, str], model: str, clients: int, seconds: float, supervisor: int
) -> tuple[OverloadFigures, dict[str, int], int]:
    """(figures, outcomes of the requests, bytes that the frontends have gained in the second half)."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, headers=headers, timeout=_timeout, connector=connector) as session:
        load = Load(session, model)
        peak = await load.closed(clients, seconds / _PEAK_SHARE)
        resident = [resident_bytes(processes_of(supervisor, "frontend"))]

        def sample() -> None:
            resident.append(resident_bytes(processes_of(supervisor, "frontend")))

        tokens_per_s, tokens, wasted = await load.open(max(_FACTOR * peak, 1.0), seconds, sample)
        sample()
        begin, half, end = resident[0], resident[1], resident[-1]
        goodput = tokens_per_s / _TOKENS * (1 - wasted / max(tokens, 1))
        figures = OverloadFigures(peak, goodput, await load.recovery_s(), tokens, wasted, half - begin)
    return figures, dict(load.outcomes), end - half
