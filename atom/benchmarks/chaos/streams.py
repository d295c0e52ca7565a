"""Clients that keep the ids of their tokens with the time of each, and resume streams that break."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

__all__ = ["ClientStream", "body_of", "flood", "follow_all", "stall"]

_PATH = "/v1/completions"
_RETRY_S = 0.2
_READ_DEADLINE_S = 180.0


@dataclass
class ClientStream:
    """What one client got."""

    sent: float
    """When its request was sent (monotonic, seconds)."""
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each of the ids came (monotonic, seconds)."""
    resumptions: int = 0
    error: str = ""
    """Why the stream has failed; empty if it is complete."""

    def pause(self, since: float) -> float | None:
        """The longest time without a token after a moment, in seconds.

        None for a stream whose request had not been sent then, or that had ended.
        """
        if not self.times or not self.sent < since < self.times[-1]:
            return None
        later = [since, *(moment for moment in self.times if moment > since)]
        return max(after - before for before, after in pairwise(later))


def body_of(model: str, number: int, tokens: int) -> dict[str, Any]:
    """The request of stream `number`: every second one is greedy, the others are sampled with a seed.

    Prompts are token ids, which a server without a tokenizer takes, too.
    """
    return {
        "model": model,
        "prompt": [10 + number % 90, *[11, 12, 13, 14] * (1 + number % 7)],
        "max_tokens": tokens,
        "temperature": 0.8 * (number % 2),
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


async def follow_all(
    url: str,
    headers: dict[str, str],
    bodies: list[dict[str, Any]],
    on_tokens: Callable[[int], None],
    each: int = 1,
) -> list[ClientStream]:
    """Read all streams, with a client for `each` of them in a row; `on_tokens` gets the number of new ids."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_READ_DEADLINE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout, connector=connector) as session:

        async def client(requests: list[dict[str, Any]]) -> list[ClientStream]:
            return [await _follow(session, body, on_tokens) for body in requests]

        rows = [bodies[first : first + each] for first in range(0, len(bodies), each)]
        return [stream for row in await asyncio.gather(*map(client, rows)) for stream in row]


async def _follow(
    session: aiohttp.ClientSession, body: dict[str, Any], on_tokens: Callable[[int], None]
) -> ClientStream:
    stream = ClientStream(time.monotonic())
    headers = {"X-Resumable-Stream": "true"}
    deadline = time.monotonic() + _READ_DEADLINE_S
    while True:
        last = ""
        data = b""
        has_broken = False
        try:
            async with session.post(_PATH, json=body, headers=headers) as response:
                if response.status != 200:
                    stream.error = f"{response.status}: {(await response.text())[:200]}"
                else:
                    async for line in response.content:
                        if line.startswith(b"id: "):
                            last = line[4:].decode().strip()
                        elif line.startswith(b"data: "):
                            data = line[6:]
                        elif line == b"\n" and data:  # the event is complete
                            if _add(stream, data, on_tokens):
                                return stream
                            data = b""
                            headers = {"Last-Event-ID": last}
                            deadline = time.monotonic() + _READ_DEADLINE_S
        except aiohttp.ClientError as error:
            stream.error = f"{type(error).__name__}: {error}"
            has_broken = True  # without an event so far, the same request is sent again
        can_repeat = has_broken or "Last-Event-ID" in headers
        if not can_repeat or stream.error[:3] in ("400", "404") or time.monotonic() > deadline:
            stream.error = stream.error or "the stream has ended early"
            return stream
        stream.error = ""
        stream.resumptions += 1
        await asyncio.sleep(_RETRY_S)


def _add(stream: ClientStream, data: bytes, on_tokens: Callable[[int], None]) -> bool:
    """Add the ids of an event; whether it was the last one."""
    if data.startswith(b"[DONE]"):
        return True
    event = json.loads(data)
    if "error" in event:
        stream.error = str(event["error"].get("message", event["error"]))[:200]
        return True
    new = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    stream.ids += new
    stream.times += [time.monotonic()] * len(new)
    on_tokens(len(new))
    return False


async def poison(
    url: str, headers: dict[str, str], body: dict[str, Any], strike: Callable[[], None]
) -> dict[str, int]:
    """Read a stream of the first engine and strike at each of its tokens, until it ends; how it has ended."""
    try:
        ended = await _struck(url, headers, {**body, "data_parallel_rank": 0}, strike)
    except (aiohttp.ClientError, TimeoutError) as error:
        ended = type(error).__name__
    return {f"poison {ended}": 1}


async def _struck(url: str, headers: dict[str, str], body: dict[str, Any], strike: Callable[[], None]) -> str:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_READ_DEADLINE_S)
    async with (
        aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session,
        session.post(_PATH, json=body) as response,
    ):
        if response.status != 200:
            return str(response.status)
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return str(event["error"].get("code"))
                strike()
    return "complete"


async def stall(url: str, headers: dict[str, str], body: dict[str, Any], until: asyncio.Event) -> None:
    """Begin a stream and read nothing of it."""
    async with (
        aiohttp.ClientSession(url, headers=headers, read_bufsize=1) as session,
        session.post(_PATH, json=body),
    ):
        await until.wait()


async def flood(url: str, headers: dict[str, str], body: dict[str, Any], count: int) -> dict[str, int]:
    """Send many short requests at once; how many had each outcome: a status, or no response."""
    outcomes: dict[str, int] = {}
    body = {**body, "stream": False, "max_tokens": 1}
    timeout = aiohttp.ClientTimeout(total=_READ_DEADLINE_S)

    async def one(session: aiohttp.ClientSession) -> None:
        try:
            async with session.post(_PATH, json=body) as response:
                await response.read()
                lacks = response.status == 429 and "Retry-After" not in response.headers
                outcome = f"{response.status}{' without Retry-After' if lacks else ''}"
        except (aiohttp.ClientError, TimeoutError):
            outcome = "no response"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(one(session) for _ in range(count)))
    return outcomes
