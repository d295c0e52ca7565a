"""Upgrades in a row under load: does a request fail, does a text change, how do tokens come meanwhile?

    python -m tests.evaluation.upgrades --upgrades 20 --rate 50

A server with a tiny model is replaced again and again (--upgrade-from), with other flags each time, and with
another model for one of the servers. Meanwhile requests arrive at a fixed rate, whatever becomes of those
before: every second one is a stream, which is resumed where it breaks off. Some further streams last longer
than a server that is replaced waits for them: they cross upgrades, and are refused by name where the model
changes.

Every text must equal that of an undisturbed server with the model that may serve the request. The tool exits
with status 1 where one differs, where a request fails, or where tokens come much less evenly (see `--ratio`).
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from atom.benchmarks.chaos.streams import body_of, follow_all
from atom.shared.utils.open_files import raise_open_files_limit
from tests.helpers.servers.random_server import ARGS, MODEL_NAME, write_checkpoint
from tests.helpers.servers.server import Server, replaced, running_server

_TINY = {"hidden_size": 48, "intermediate_size": 64}
_LAYERS = {"first": 2, "second": 3}
"""The models by name, with their layers."""
_KINDS = 16
"""Different short requests."""
_SHORT_TOKENS = 12
_MOST_OPEN = 128
"""Short requests at a time. On a busy machine, which cannot take the rate, more would only wait longer than a
server that is replaced does for those that cannot be resumed."""
_SERVER = ("--api-server-count", "2", "--orphan-grace", "120", "--shutdown-timeout", "20")
_VARIANTS: Sequence[tuple[str, ...]] = (
    ("--max-num-seqs", "64"),
    ("--no-enable-prefix-caching",),
    ("-dp", "2"),
    ("--block-size", "32"),
    ("--max-num-batched-tokens", "512"),
)
"""Flags of one server after the other."""
_UNDISTURBED_S = 20.0
_DEADLINE_S = 120.0
_OTHER_MODEL = "begun before an upgrade to another model"


def main() -> None:
    """Run, print the figures, exit with status 1 where a promise did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--upgrades", type=int, default=20)
    parser.add_argument("--rate", type=float, default=50.0, help="short requests per second")
    parser.add_argument("--requests", type=int, default=2000, help="the fewest short requests")
    parser.add_argument("--long-streams", type=int, default=2, help="streams at a time that cross upgrades")
    parser.add_argument("--long-tokens", type=int, default=6000, help="tokens of each of these")
    parser.add_argument(
        "--ratio", type=float, default=2.0, help="largest p99 between tokens, in undisturbed ones"
    )
    args = parser.parse_args()
    raise_open_files_limit()
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        os.environ["TMPDIR"] = directory
        models = {
            name: str(write_checkpoint(Path(directory) / name, **_TINY, num_hidden_layers=layers))
            for name, layers in _LAYERS.items()
        }
        load = Load(args.rate, args.long_streams, args.long_tokens)
        asyncio.run(_learn(load, models))
        seconds = asyncio.run(_upgrade_under_load(load, models, args.upgrades, args.requests))
        if left := [path.name for path in Path(directory).glob("atom-*")]:
            load.problems.append(f"still there: {left}")
    print(load.text(seconds))
    sys.exit("\n".join(load.all_problems(args.ratio)) or None)


class Load:
    """Requests at a fixed rate, and long streams, compared with what each model gives undisturbed."""

    def __init__(self, rate: float, long_streams: int, long_tokens: int):
        self.serving = frozenset(_LAYERS)
        """The models that may serve a request now."""
        self.sent = 0
        """Short requests since `begin`."""
        self.problems: list[str] = []
        self.disturbed_at = float("inf")
        """Start of the first upgrade (monotonic, seconds): times between tokens are kept apart."""
        self._rate = rate
        self._long_streams = long_streams
        self._expected: dict[str, dict[str, list[int]]] = {}
        self._bodies = {str(number): body_of(MODEL_NAME, number, _SHORT_TOKENS) for number in range(_KINDS)}
        self._bodies |= {
            f"long {number}": body_of(MODEL_NAME, number, long_tokens) for number in range(long_streams)
        }
        self._outcomes: Counter[str] = Counter()
        self._gaps: dict[bool, list[float]] = {False: [], True: []}
        self._began = time.monotonic()
        self._stopped = False

    async def learn(self, url: str, model: str) -> None:
        """Keep what this undisturbed model gives."""
        streams = await follow_all(url, {}, list(self._bodies.values()), lambda count: None)
        for name, stream in zip(self._bodies, streams, strict=True):
            assert not stream.error, stream.error
            self._expected.setdefault(name, {})[model] = stream.ids

    async def run(self, url: str, work: Coroutine[Any, Any, list[float]]) -> list[float]:
        """Send requests until `work`, a coroutine, ends; its result."""
        self._began = time.monotonic()
        tasks = [asyncio.create_task(self._arrivals(url))]
        tasks += [asyncio.create_task(self._long(url, number)) for number in range(self._long_streams)]
        try:
            return await work
        finally:
            self._stopped = True
            await asyncio.gather(*tasks)

    async def _arrivals(self, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=_DEADLINE_S)
        tasks: set[asyncio.Task[None]] = set()
        async with aiohttp.ClientSession(url, timeout=timeout) as session:
            while not self._stopped:
                due = (time.monotonic() - self._began) * self._rate
                while self.sent < due and len(tasks) < _MOST_OPEN:
                    name = str(self.sent % _KINDS)
                    work = self._plain(session, name) if self.sent % 2 else self._stream(url, name)
                    tasks.add(task := asyncio.create_task(work))
                    task.add_done_callback(tasks.discard)
                    self.sent += 1
                await asyncio.sleep(0.5 / self._rate)
            await asyncio.gather(*tasks)

    async def _plain(self, session: aiohttp.ClientSession, name: str) -> None:
        models = self.serving
        body = {**self._bodies[name], "stream": False}
        for attempt in range(2):
            try:
                async with session.post("/v1/completions", json=body) as response:
                    reply = await response.json()
                    if response.status != 200:
                        return self._fail(f"a request: {response.status}: {reply}")
                    return self._compare(name, models, reply["choices"][0]["token_ids"], "short")
            except aiohttp.ServerDisconnectedError as error:
                # An idle connection that was closed in this moment: no byte of a response has come.
                self._outcomes["sent again"] += 1
                if attempt:
                    self._fail(f"a request: {error!r}")
            except (aiohttp.ClientError, TimeoutError) as error:
                return self._fail(f"a request: {error!r}")
        return None

    async def _stream(self, url: str, name: str) -> None:
        models = self.serving
        [stream] = await follow_all(url, {}, [self._bodies[name]], lambda count: None)
        for before, after in pairwise(stream.times):
            self._gaps[after > self.disturbed_at].append(after - before)
        self._outcomes["resumptions"] += stream.resumptions
        kind = "long" if name.startswith("long") else "short"
        if not stream.error:
            self._compare(name, models, stream.ids, kind)
        elif kind == "long" and _OTHER_MODEL in stream.error and len(models | self.serving) > 1:
            self._outcomes["refused by name"] += 1
        else:
            self._fail(f"a {kind} stream: {stream.error}")

    async def _long(self, url: str, number: int) -> None:
        while not self._stopped:
            await self._stream(url, f"long {number}")

    def _compare(self, name: str, models: frozenset[str], ids: list[int], kind: str) -> None:
        self._outcomes[kind] += 1
        if ids not in [self._expected[name][model] for model in models | self.serving]:
            self._outcomes["other texts"] += 1

    def _fail(self, what: str) -> None:
        self._outcomes["failed"] += 1
        self.problems.append(what)

    def text(self, seconds: Sequence[float]) -> str:
        """The figures, in some lines; `seconds` is that of each upgrade."""
        passed = time.monotonic() - self._began
        each = ", ".join(f"{count} {name}" for name, count in sorted(self._outcomes.items()))
        lines = [
            f"{len(seconds)} upgrades, each in {statistics.median(seconds):.1f} s (median; at most "
            f"{max(seconds):.1f} s); {self.sent} requests, {self.sent / passed:.1f} a second",
            f"requests: {each}",
        ]
        for is_disturbed, name in ((False, "undisturbed"), (True, "during upgrades")):
            gaps = self._gaps[is_disturbed]
            shares = (f"p{share} {1000 * _percentile(gaps, share):.1f} ms" for share in (50, 99, 99.9))
            longest = f"longest {max(gaps, default=0):.2f} s, {len(gaps)} tokens"
            lines.append(f"time between tokens, {name}: {', '.join(shares)}, {longest}")
        return "\n".join(lines)

    def all_problems(self, ratio: float) -> list[str]:
        """What did not hold, in lines."""
        found = [f"{count} x {what}" for what, count in Counter(self.problems).most_common(10)]
        if other := self._outcomes["other texts"]:
            found.append(f"{other} texts differ from those of undisturbed servers")
        before, meanwhile = (_percentile(self._gaps[key], 99) for key in (False, True))
        if meanwhile > ratio * before:
            found.append(f"p99 between tokens: {1000 * meanwhile:.1f} ms, {1000 * before:.1f} ms undisturbed")
        return found


async def _learn(load: Load, models: dict[str, str]) -> None:
    for name, path in models.items():
        with running_server("--model", path, *ARGS) as server:
            await load.learn(server.url, name)
            server.terminate()


async def _upgrade_under_load(
    load: Load, models: dict[str, str], upgrades: int, requests: int
) -> list[float]:
    """Seconds of each upgrade."""
    servers = [Server("--model", models["first"], *ARGS, *_SERVER)]
    try:
        await asyncio.to_thread(servers[0].wait_ready)
        load.serving = frozenset(["first"])
        url = servers[0].url
        seconds = await load.run(url, _upgrades(load, models, servers, upgrades, requests))
        servers[-1].terminate()
        return seconds
    finally:
        for server in servers:
            server.kill()


async def _upgrades(
    load: Load, models: dict[str, str], servers: list[Server], upgrades: int, requests: int
) -> list[float]:
    await asyncio.sleep(_UNDISTURBED_S)
    load.disturbed_at = time.monotonic()
    seconds = []
    for number in range(upgrades):
        model = "second" if number == upgrades // 2 else "first"
        load.serving |= {model}
        begun = time.monotonic()
        flags = _VARIANTS[number % len(_VARIANTS)]
        servers.append(await replaced(servers[-1], "--model", models[model], *ARGS, *_SERVER, *flags))
        seconds.append(time.monotonic() - begun)
        load.serving = frozenset([model])
        print(f"upgrade {number + 1}, {model} model, {' '.join(flags)}: {seconds[-1]:.1f} s", flush=True)
    while load.sent < requests:
        await asyncio.sleep(0.1)
    return seconds


def _percentile(values: Sequence[float], share: float) -> float:
    """In the unit of the values; 0 without any."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share / 100))] if values else 0.0


if __name__ == "__main__":
    main()
