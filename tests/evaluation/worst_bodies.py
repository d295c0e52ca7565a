"""The event loop's longest hold while a server receives the worst request bodies.

python -m tests.evaluation.worst_bodies [--repeats N] [--only TEXT]

Starts a real server with a tiny random model, sends each body of the catalogue and prints its status, its
time, the longest hold of the event loop (the upper bound of the highest bucket of
atom:event_loop_lag_seconds with a new value; the least of all repeats) and the frontend's RSS. Exits with 1
if a hold exceeds 50 ms or a status is unexpected.
"""

import argparse
import asyncio
import io
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil

from tests.helpers.servers.loop_lag import Buckets, lag_buckets, longest_hold
from tests.helpers.servers.random_server import ARGS, write_checkpoint
from tests.helpers.servers.server import running_server
from tests.helpers.servers.worst_bodies import Case, worst_bodies

LIMIT_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="bodies whose name contains this text")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory), hidden_size=48, intermediate_size=64, num_hidden_layers=1)
        with running_server("--model", str(model), *ARGS) as server:
            pid = next(pid for pid, line in server.children().items() if "frontend.main" in line)
            is_good = asyncio.run(_measure(server.url, psutil.Process(pid), args.repeats, args.only))
    sys.exit(0 if is_good else 1)


async def _measure(url: str, frontend: psutil.Process, repeats: int, only: str) -> bool:
    is_good, longest = True, 0.0
    print(f"{'body':40} {'MiB':>6} {'status':>6} {'s':>6} {'hold ms':>8} {'RSS MiB':>8}")
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        for case in worst_bodies():
            if only not in case.name:
                continue
            runs = [await _one(session, case) for _ in range(repeats)]
            status, seconds, hold = min(runs, key=lambda run: run[2])
            rss = frontend.memory_info().rss >> 20
            wrong = hold > LIMIT_S or any(run[0] not in case.statuses for run in runs)
            longest, is_good = max(longest, hold), is_good and not wrong
            print(
                f"{case.name:40} {len(case.body) / 2**20:6.2f} {status:6} {seconds:6.2f} {hold * 1000:8.1f} "
                f"{rss:8}{'  <-' if wrong else ''}",
                flush=True,
            )
    print(f"longest hold: at most {longest * 1000:.1f} ms")
    return is_good


async def _one(session: aiohttp.ClientSession, case: Case) -> tuple[int, float, float]:
    """(status, seconds, longest hold in seconds)."""
    before = await _buckets(session)
    headers = {"Content-Encoding": case.encoding} if case.encoding else {}
    data = io.BytesIO(case.body) if case.chunk_size is None else _pieces(case.body, case.chunk_size)
    begun = time.monotonic()
    async with session.post(case.path, data=data, headers=headers) as response:
        await response.read()
    seconds = time.monotonic() - begun
    await asyncio.sleep(0.05)  # the next tick of the watch
    after = await _buckets(session)
    return response.status, seconds, longest_hold(before, after)


async def _pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1 << 16):
        piece = body[start : start + (1 << 16)]
        for position in range(0, len(piece), size):
            yield piece[position : position + size]


async def _buckets(session: aiohttp.ClientSession) -> Buckets:
    async with session.get("/metrics") as response:
        return lag_buckets(await response.text())


if __name__ == "__main__":
    main()
