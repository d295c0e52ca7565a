"""Raw clients of a real server, and its metrics."""

import asyncio
import contextlib
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tests.helpers.servers.server import Server

DEADLINE_S = 60.0


def metrics_text(server: Server) -> str:
    """The first scrape of /metrics that has the counters of all engines that are up.

    A scrape waits a second for an engine, and then leaves its counters out. One that cannot read what other
    frontends have counted within a second is a 503.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        text = ""
        try:
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=DEADLINE_S) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
        up = set(re.findall(r'^atom:engine_up\{.*engine="(\d+)".* 1\.0$', text, re.MULTILINE))
        if text and up <= set(re.findall(r'^atom:engine_steps_total\{.*engine="(\d+)"', text, re.MULTILINE)):
            return text
        assert time.monotonic() < deadline, f"an engine that is up does not answer:\n{text}"


class Gauges:
    """One scrape of /metrics: values by name, summed over labels."""

    def __init__(self, server: Server):
        text = metrics_text(server)
        # A metric has no value before a label's first.
        self._values = dict.fromkeys(re.findall(r"^# TYPE (atom:\w+)", text, re.MULTILINE), 0.0)
        for name, value in re.findall(r"^(atom:\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            self._values[name] = self._values.get(name, 0.0) + float(value)

    def __getitem__(self, name: str) -> float:
        return self._values[f"atom:{name}"]

    def is_idle(self) -> bool:
        """No sequence is live, and no KV block is in use."""
        names = ("num_requests_running", "num_requests_waiting", "choices_live", "kv_blocks_used")
        return not any(self[name] for name in names)


def wait_until(server: Server, condition: Callable[["Gauges"], bool], what: str) -> Gauges:
    """The first scrape for which `condition` holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition(gauges := Gauges(server)):
        assert time.monotonic() < deadline, f"never {what}: {vars(gauges)}"
        time.sleep(0.01)
    return gauges


class Peer:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, server: Server) -> "Peer":
        place = urlsplit(server.url)
        return cls(*await asyncio.open_connection(place.hostname, place.port))

    async def send(self, body: dict[str, Any], share: float = 1.0) -> None:
        """A completion request; only the first `share` of its body."""
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data[: int(len(data) * share)])
        await self._writer.drain()

    async def read_frames(self, count: int) -> bytes:
        """Read until `count` frames or the end of the stream."""
        received = b""
        async with asyncio.timeout(DEADLINE_S):
            while received.count(b"data: ") < count and b"[DONE]" not in received:
                piece = await self._reader.read(65536)
                assert piece, f"the stream ended after {received!r}"
                received += piece
        return received

    async def close(self, abruptly: bool = False) -> None:
        """Close the connection, or reset it if `abruptly`."""
        if abruptly:
            self._writer.transport.abort()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
