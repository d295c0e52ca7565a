"""Two engines and two frontends under load, whose processes are killed: who loses what, and for how long?

    python -m tests.evaluation.kills --kills 10 --streams 1000

1. 200 mixed requests get the same text from two engines as from one, and from two whose workers and cores
   are killed meanwhile.
2. Random workers and cores of two engines are killed. No request may fail, not even one that is bound to
   the dead engine, which must come back; its directory, sockets and shared memory must be gone.
3. Of two frontends with 1,000 streams one is killed: all others' streams must finish.
4. Tokens a second with one and with two frontends, of a model that takes next to no time.

The tool exits with status 1 where one of these does not hold.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from atom.shared.utils.open_files import raise_open_files_limit
from tests.helpers.servers.edges import metrics_text
from tests.helpers.servers.random_server import ARGS, MODEL_NAME, write_checkpoint
from tests.helpers.servers.server import Server, is_alive, running_server
from tests.helpers.servers.shared_memory import SharedMemoryWatch

_TINY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
_DEADLINE_S = 120.0
_CLIENTS = 4
_ENGINE_MODULES = ("engine_core.process", "workers.main")


def main() -> None:
    """Run all parts, print the figures, exit with status 1 where a promise did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    raise_open_files_limit()
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        os.environ["TMPDIR"] = directory
        model = str(write_checkpoint(Path(directory) / "model", **_TINY))
        problems = compare_texts(model)
        problems += kill_engines(model, Path(directory), args.kills, random.Random(args.seed))
        problems += kill_a_frontend(model, args.streams)
        measure_frontends(model)
        if left := [path.name for path in Path(directory).glob("atom-*")]:
            problems.append(f"still there: {left}")
    sys.exit("\n".join(problems) or None)


def mixed_bodies() -> list[dict[str, Any]]:
    """Requests of all lengths, greedy and sampled."""
    chosen = random.Random(7)
    return [
        {
            "prompt": [chosen.randrange(3, 90) for _ in range(chosen.choice((1, 7, 40, 300)))],
            "max_tokens": chosen.choice((1, 40, 400)),
            "temperature": chosen.choice((0.0, 0.8)),
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(200)
    ]


async def texts_of(server: Server, bodies: list[dict[str, Any]]) -> list[str]:
    """Responses, with 32 requests at a time."""
    places = asyncio.Semaphore(32)
    timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)

    async def one(session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        body = {"model": MODEL_NAME, **body}
        async with places, session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return str((await response.json())["choices"][0]["text"])

    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        return await asyncio.gather(*(one(session, body) for body in bodies))


def compare_texts(model: str) -> list[str]:
    """Part 1."""
    problems, expected = [], []
    for engines, killing in (("1", False), ("2", False), ("2", True)):
        with running_server("--model", model, *ARGS, "-dp", engines) as server:
            texts, deaths = asyncio.run(_texts_under_kills(server, killing))
            server.terminate()
        expected = expected or texts
        differing = sum(one != two for one, two in zip(expected, texts, strict=True))
        name = f"200 mixed requests, engines: {engines}, kills: {deaths}"
        print(f"{name}: {differing} texts differ from one engine's", flush=True)
        problems += [f"{name}: {differing} texts differ"] if differing else []
    return problems


async def _texts_under_kills(server: Server, killing: bool) -> tuple[list[str], int]:
    """The texts, and how many processes were killed meanwhile, each once both engines were up again."""
    work = asyncio.create_task(texts_of(server, mixed_bodies()))
    chosen, kills = random.Random(3), 0
    while killing and not work.done():
        await _until_up(server, 0), await _until_up(server, 1)
        await asyncio.sleep(chosen.uniform(0, 0.2))
        pids = [pid for pid, line in server.children().items() if any(m in line for m in _ENGINE_MODULES)]
        if not work.done():
            os.kill(chosen.choice(sorted(pids)), 9)
            kills += 1
            await asyncio.sleep(0.5)
    return await work, kills


class Load:
    """Clients that send one streaming request after another to each engine."""

    def __init__(self, server: Server):
        self.ends: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}
        self.stopping = False
        self._server = server

    async def client(self, rank: int) -> None:
        """Requests on one engine until `stopping`."""
        timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)
        async with aiohttp.ClientSession(self._server.url, timeout=timeout) as session:
            while not self.stopping:
                end = await stream(session, max_tokens=60, data_parallel_rank=rank)
                self.ends[rank][end] += 1
                if end == "refused":
                    await asyncio.sleep(0.2)


async def stream(session: aiohttp.ClientSession, **fields: Any) -> str:
    """How one stream ended: finished, error, refused or cut off."""
    body = {"model": MODEL_NAME, "prompt": "once", "ignore_eos": True, "stream": True, **fields}
    end = "cut off"
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                return "refused"
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return "finished" if end == "cut off" else end
                if line.startswith(b"data: ") and "error" in json.loads(line[6:]):
                    end = "error"
    except aiohttp.ClientError:
        pass
    return end


def kill_engines(model: str, directory: Path, kills: int, chosen: random.Random) -> list[str]:
    """Part 2."""
    problems: list[str] = []
    shared_memory = SharedMemoryWatch()
    with running_server("--model", model, *ARGS, "-dp", "2") as server:
        load = Load(server)
        times = asyncio.run(_kill_under_load(server, load, kills, chosen, problems))
        lives = sorted(path.name for path in directory.glob("atom-run-*/*") if path.is_dir())
        if len(lives) != 3:
            problems.append(f"directories of earlier lives: {lives}")
        children = list(server.children())
        if server.terminate() != 0 or any(is_alive(pid) for pid in children):
            problems.append("the server did not end cleanly")
    if left := shared_memory.end():
        problems.append(f"shared memory is still there: {left}")
    print(f"{kills} kills; requests by engine: {[dict(ends) for ends in load.ends.values()]}; {lives}")
    print(
        f"seconds until back: {', '.join(f'{t:.1f}' for t in times)}; median {statistics.median(times):.1f}"
    )
    return problems


async def _kill_under_load(
    server: Server, load: Load, kills: int, chosen: random.Random, problems: list[str]
) -> list[float]:
    """Seconds that each killed engine was away."""
    await _until_up(server, 0), await _until_up(server, 1)
    children = server.children().items()
    starting = [pid for pid, line in children if any(m in line for m in _ENGINE_MODULES)]
    pids = {0: starting[:2], 1: starting[2:]}
    clients = [asyncio.create_task(load.client(rank)) for rank in (0, 1) for _ in range(_CLIENTS)]
    times = []
    for _ in range(kills):
        await asyncio.sleep(chosen.uniform(0.5, 2))
        rank = chosen.randrange(2)
        other, before = load.ends[1 - rank].copy(), set(server.children())
        begun = time.monotonic()
        os.kill(chosen.choice(pids[rank]), 9)
        await asyncio.sleep(1)
        await _until_up(server, rank)
        times.append(time.monotonic() - begun)
        pids[rank] = list(set(server.children()) - before)
        if load.ends[1 - rank]["finished"] == other["finished"]:
            problems.append(f"engine {rank} was killed, and the other one finished nothing")
    load.stopping = True
    await asyncio.gather(*clients)
    for rank, ends in load.ends.items():
        if lost := {end: count for end, count in ends.items() if end not in ("finished", "refused")}:
            problems.append(f"requests that ended otherwise on engine {rank}: {lost}")
    return times


async def _until_up(server: Server, rank: int) -> None:
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            text = await asyncio.to_thread(metrics_text, server)
            if any("engine_up" in line and f'engine="{rank}"' in line and line.endswith(" 1.0")
                   for line in text.splitlines()):  # fmt: skip
                return
            await asyncio.sleep(0.1)


def kill_a_frontend(model: str, streams: int) -> list[str]:
    """Part 3."""
    flags = ("--api-server-count", "2", "--max-queued-requests", str(4 * streams))
    with running_server("--model", model, *ARGS, *flags) as server:
        ends = asyncio.run(_kill_with_streams(server, streams))
        ended = server.terminate()
    print(f"{streams} streams over two frontends, one killed: {dict(ends)}", flush=True)
    share = ends["cut off"] / streams
    problems = [] if set(ends) == {"finished", "cut off"} and ended == 0 else [f"streams: {dict(ends)}"]
    return problems + ([] if 0.3 < share < 0.7 else [f"{share:.0%} of the streams were on one of two"])


async def _kill_with_streams(server: Server, streams: int) -> Counter[str]:
    timeout, connector = aiohttp.ClientTimeout(total=10 * _DEADLINE_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as session:
        tasks = [asyncio.create_task(stream(session, max_tokens=100)) for _ in range(streams)]
        async with asyncio.timeout(_DEADLINE_S):
            while f'atom:choices_live{{model_name="{MODEL_NAME}"}} {streams}.0' not in (
                await asyncio.to_thread(metrics_text, server)
            ):
                await asyncio.sleep(0.2)
        os.kill(next(pid for pid, line in server.children().items() if "frontend.main" in line), 9)
        return Counter(await asyncio.gather(*tasks))


def measure_frontends(model: str) -> None:
    """Part 4. The client shares the host's cores with the server: more of them show more."""
    for frontends in ("1", "2"):
        with running_server("--model", model, *ARGS, "--api-server-count", frontends) as server:
            begun = time.monotonic()
            ends = asyncio.run(_stream_all(server, 256, 64))
            seconds = time.monotonic() - begun
            print(f"{frontends} frontends: {256 * 64 / seconds:,.0f} tokens/s, {dict(ends)}", flush=True)
            server.terminate()


async def _stream_all(server: Server, streams: int, tokens: int) -> Counter[str]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:
        tasks = (stream(session, max_tokens=tokens) for _ in range(streams))
        return Counter(await asyncio.gather(*tasks))


if __name__ == "__main__":
    main()
