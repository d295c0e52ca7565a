"""A server whose tokens come by the clock: what a client reports about it is known beforehand.

    python -m tests.helpers.servers.token_clock --ttft-ms 200 --itl-ms 50

Token i of a response is written `ttft + i * itl` after its request has been read, by the clock and
not by sleeping between tokens, so that delays do not add up. It speaks as much HTTP as a stream of
`/v1/completions` needs, in one process, so that it can feed thousands of streams.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import uvloop

from atom.shared.utils.open_files import raise_open_files_limit

_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Cache-Control: no-cache\r\n\r\n"
)
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class Clock:
    """Seconds."""

    ttft: float
    itl: float


class _Stream(asyncio.Protocol):
    """One connection, one request after another."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._received = b""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        length = _content_length(head)
        if not blank or len(body) < length:
            return
        self._received = body[length:]
        if b"completions" in head.split(b"\r\n", 1)[0]:
            self._answer(json.loads(body[:length]))
        else:
            self._write(_NOT_FOUND)

    def _answer(self, request: dict[str, object]) -> None:
        tokens = request["max_tokens"]
        assert isinstance(tokens, int)
        prompt = request["prompt"]
        usage = {"prompt_tokens": len(prompt) if isinstance(prompt, list) else 0, "completion_tokens": tokens}
        self._write(_HEAD)
        first = self._loop.time() + self._clock.ttft
        event = _chunk({"choices": [{"index": 0, "text": " word", "finish_reason": None}], "usage": None})
        end = _chunk({"choices": [], "usage": usage}) + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._loop.call_at(first, self._tick, 0, tokens, first, (event, end))

    def _tick(self, done: int, tokens: int, first: float, texts: tuple[bytes, bytes]) -> None:
        event, end = texts
        if done + 1 == tokens:
            self._write(event + end)
            return
        self._write(event)
        following = first + (done + 1) * self._clock.itl
        self._loop.call_at(following, self._tick, done + 1, tokens, first, texts)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _chunk(event: object) -> bytes:
    return _framed(b"data: " + json.dumps(event).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@contextlib.contextmanager
def running_clock(ttft_ms: float, itl_ms: float) -> Iterator[str]:
    """The URL of a server in a process of its own, which ends with the block."""
    command = [sys.executable, "-m", "tests.helpers.servers.token_clock"]
    flags = ["--ttft-ms", str(ttft_ms), "--itl-ms", str(itl_ms)]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


async def _serve(clock: Clock) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: _Stream(clock), "127.0.0.1", 0, backlog=4096
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ttft-ms", type=float, required=True)
    parser.add_argument("--itl-ms", type=float, required=True)
    args = parser.parse_args()
    raise_open_files_limit()
    uvloop.run(_serve(Clock(args.ttft_ms / 1e3, args.itl_ms / 1e3)))


if __name__ == "__main__":
    main()
