"""A client that resumes its streams, whatever ends their connections."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

DEADLINE_S = 150.0
_RETRY_S = 0.2
_VARYING = re.compile(
    r'"(id|created|created_at|ttft_s|tpot_s|latency_s|cached_tokens|item_id|response_id|call_id)":("[^"]*"|[\d.]+)'
)


def without_times(event: str) -> str:
    """The data of an event, without ids and times."""
    return _VARYING.sub(r'"\1":0', event)


@dataclass
class Resumed:
    """What a client got of one stream."""

    events: list[str] = field(default_factory=list)
    """The data of each event, without ids and times."""
    ids: list[str] = field(default_factory=list)
    resumptions: int = 0

    @property
    def texts(self) -> dict[int, str]:
        """By sequence: all new text, reasoning and arguments."""
        found: dict[int, str] = {}
        for event in self.events:
            for index, text in _new_texts(event):
                found[index] = found.get(index, "") + text
        return found


OnEvent = Callable[[Resumed], None]


async def follow(
    url: str, path: str, body: dict[str, Any], on_event: OnEvent = lambda resumed: None
) -> Resumed:
    """Read a resumable stream to its end."""
    resumed = Resumed()
    async with asyncio.timeout(DEADLINE_S):
        while not await read(url, path, body, resumed, on_event):
            resumed.resumptions += 1
    return resumed


async def read(
    url: str, path: str, body: dict[str, Any], resumed: Resumed, on_event: OnEvent = lambda resumed: None
) -> bool:
    """Begin a stream, or go on with it, until it ends, True, or its connection does, or it has to wait."""
    async with aiohttp.ClientSession(url) as session:
        if resumed.ids:
            last = resumed.ids[-1]
            key = last.partition("/")[0]
            request = session.get(f"/v1/streams/{key}", headers={"Last-Event-ID": last})
        else:
            request = session.post(path, json=body, headers={"X-Resumable-Stream": "true"})
        try:
            async with request as response:
                if response.status == 503:  # an engine starts again
                    await asyncio.sleep(_RETRY_S)
                    return False
                assert response.status == 200, await response.text()
                event_id = ""
                async for line in response.content:
                    if line.startswith(b"id: "):
                        event_id = line[4:].decode().strip()
                    elif line.startswith(b"data: "):
                        resumed.events.append(without_times(line[6:].decode().strip()))
                        resumed.ids.append(event_id)
                        on_event(resumed)
                return _is_last(resumed.events)
        except (aiohttp.ClientError, ConnectionError):
            return False


def _is_last(events: list[str]) -> bool:
    last = events[-1] if events else ""
    return (
        last == "[DONE]"
        or ('"type":"response.' in last[:60] and '"usage":{' in last)
        or "message_stop" in last
    )


def _new_texts(event: str) -> Iterator[tuple[int, str]]:
    if not event.startswith("{"):
        return
    content = json.loads(event)
    for choice in content.get("choices", ()):
        delta = choice.get("delta", {})
        found = [choice.get("text"), delta.get("content"), delta.get("reasoning")]
        found += [call["function"].get("arguments") for call in delta.get("tool_calls", ())]
        yield choice["index"], "".join(filter(None, found))
    if isinstance(delta := content.get("delta"), str):
        yield 0, delta
    elif isinstance(delta, dict):
        yield 0, delta.get("text", "") + delta.get("partial_json", "") + delta.get("thinking", "")
