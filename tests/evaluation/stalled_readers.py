"""Do clients that do not read slow the streams of others, and what memory do they cost?

    python -m tests.evaluation.stalled_readers

A few streams run alone, then next to 500 streams whose clients have stopped reading, and so on in turn. The
kernel keeps 2 to 4 MB for a connection, more than most replies have, so that a server notices few of such
clients: here its send buffers are as small as possible, and each stalled stream has output that waits in the
frontend. Its tokens are generated before the others are measured, so that the engine does the same work each
time. It prints the time between two tokens of all running streams, the CPU time of the frontend for a token,
which other work on the machine hardly changes, and its memory. It exits with status 1 where 500 cost 50 MiB
or more, where the 99th percentile is more than 1.25 times as long in the median of the rounds, or where a
stalled client does not get its whole stream once it reads.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import socket
import statistics
import sys
import tempfile
import time
import urllib.error
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.helpers.servers.edges import Gauges
from tests.helpers.servers.random_server import ARGS, MODEL_NAME, write_checkpoint
from tests.helpers.servers.server import Server, running_server
from tests.helpers.servers.wire import post_head

_TINY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
_LIMITS = ("--max-num-seqs", "600", "--max-model-len", "1024")
_PIDFD_GETFD = 438
_BUFFER = 4096
_STALLED_TOKENS = 80
_READ_DEADLINE_S = 120.0
_MOST_BYTES = 50 << 20
_MOST_SLOWER = 1.25


def main() -> None:
    """Run, print a line for each round, exit with status 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stalled", type=int, default=500)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory), **_TINY)
        with running_server("--model", str(model), *ARGS, *_LIMITS) as server:
            _shrink_send_buffers(server)
            asyncio.run(_round(server, args, 0))  # a warm-up
            pairs = [
                (asyncio.run(_round(server, args, 0)), asyncio.run(_round(server, args, args.stalled)))
                for _ in range(args.rounds)
            ]
    ratio = statistics.median(stalled.p99 / alone.p99 for alone, stalled in pairs)
    grown = max(stalled.grown_bytes for _, stalled in pairs)
    cpu = statistics.median(stalled.cpu_s / alone.cpu_s for alone, stalled in pairs)
    print(f"next to stalled clients: p99 {ratio:.2f} times, CPU {cpu:.2f} times; memory +{grown >> 20} MiB")
    sys.exit(int(ratio > _MOST_SLOWER or grown >= _MOST_BYTES))


class Figures:
    """One round: the times between two tokens of all streams, and CPU time for a token, in seconds."""

    def __init__(self, gaps: list[float], cpu_s: float, grown_bytes: int):
        self.cpu_s = cpu_s
        self.grown_bytes = grown_bytes
        self.median = statistics.median(gaps)
        self.p99 = statistics.quantiles(gaps, n=100)[98]
        self.longest = max(gaps)


async def _round(server: Server, args: argparse.Namespace, num_stalled: int) -> Figures:
    frontend = psutil.Process(_frontend(server))
    before = frontend.memory_info().rss
    stalled = [await _stalled(server) for _ in range(num_stalled)]
    await asyncio.to_thread(_wait_until_generated, server)
    cpu_s = sum(frontend.cpu_times()[:2])
    streams = await asyncio.gather(*(_read(server, args.tokens) for _ in range(args.streams)))
    found = Figures(
        [after - before for times in streams for before, after in pairwise(times)],
        (sum(frontend.cpu_times()[:2]) - cpu_s) / (args.streams * args.tokens),
        frontend.memory_info().rss - before,
    )
    whole = await asyncio.gather(*map(_is_whole, stalled))
    print(
        f"{num_stalled:4} stalled: median {found.median * 1000:.1f} ms, p99 {found.p99 * 1000:.1f} ms, "
        f"longest {found.longest * 1000:.0f} ms; {found.cpu_s * 1e6:.0f} us of CPU; "
        f"memory +{found.grown_bytes / (1 << 20):.1f} MiB",
        flush=True,
    )
    assert all(whole), f"{whole.count(False)} stalled clients have not got their streams"
    return found


def _frontend(server: Server) -> int:
    return next(pid for pid, line in server.children().items() if "frontend.main" in line)


def _wait_until_generated(server: Server) -> None:
    """Until no sequence runs; a busy frontend or engine may not answer in time."""
    deadline = time.monotonic() + _READ_DEADLINE_S
    while True:
        with contextlib.suppress(urllib.error.HTTPError, KeyError):  # no response of the engine
            gauges = Gauges(server)
            if not (gauges["num_requests_running"] or gauges["num_requests_waiting"]):
                return
        assert time.monotonic() < deadline, "the stalled streams have not been generated in time"
        time.sleep(0.2)


def _shrink_send_buffers(server: Server) -> None:
    """Those of all connections that the server accepts from now on: its listening socket decides."""
    port = urlsplit(server.url).port
    pid = _frontend(server)
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                continue
            descriptor = libc.syscall(_PIDFD_GETFD, handle, int(name), 0)
            if descriptor < 0:
                raise OSError(ctypes.get_errno(), "the descriptors of a child cannot be read")
            with socket.socket(fileno=descriptor) as found:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and found.family == socket.AF_INET and found.getsockname()[1] == port:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
                    return
    finally:
        os.close(handle)
    raise LookupError(f"no process listens on port {port}")


async def _open(
    server: Server, tokens: int, buffer: int | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent a request for a stream."""
    place = urlsplit(server.url)
    client = socket.socket()
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (place.hostname, place.port))
    reader, writer = await asyncio.open_connection(sock=client)
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": "one two", "max_tokens": tokens, "stream": True}
    encoded = json.dumps(body | {"temperature": 0, "ignore_eos": True, "return_token_ids": True}).encode()
    writer.write(post_head(len(encoded)) + encoded)
    return reader, writer


async def _stalled(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await _open(server, _STALLED_TOKENS, _BUFFER)
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket
    return reader, writer


async def _is_whole(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    reader, writer = connection
    writer.transport.resume_reading()  # type: ignore[attr-defined]  # of a socket
    received = b""
    async with asyncio.timeout(_READ_DEADLINE_S):
        while b"data: [DONE]" not in received and (piece := await reader.read(1 << 16)):
            received += piece
    writer.close()
    events = [line[6:] for line in received.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return sum(len(choice["token_ids"]) for choice in choices) == _STALLED_TOKENS


async def _read(server: Server, tokens: int) -> list[float]:
    """When each token came."""
    reader, writer = await _open(server, tokens)
    times = []
    async with asyncio.timeout(_READ_DEADLINE_S):
        async for line in reader:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
            elif line.startswith(b"data: [DONE]"):
                break
    writer.close()
    return times


if __name__ == "__main__":
    main()
