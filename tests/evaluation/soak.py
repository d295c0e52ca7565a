"""A mixed load on a real server for minutes: does anything grow?

    python -m tests.evaluation.soak --minutes 10
    python -m tests.evaluation.soak --minutes 10 --kill-every 40

Clients stream and do not stream, chat and complete, penalise, score prompts, leave early, and send
bodies that must be refused. With `--kill-every` there are two engines and two frontends, and a worker, a core
or a frontend is killed about as often; a client whose frontend dies is cut off, and no other notices.
Every ten seconds the tool reads resident memory, open descriptors and threads of each kind of process, of
the largest where there are several, and at the end it prints the memory of every half minute. Two things of
a worker are bounded, but come at any time, and are not counted: freed memory that its heap keeps on purpose,
which `atom:worker_heap_bytes` tells, and the two descriptors of each grammar that it has loaded (256 at
most). Processes that are younger than two minutes are left out. The first third of the samples is a warm-up.
The tool exits with status 1 where the medians of the last third are above those of the middle third by more
than 8 MiB, 2 descriptors or 2 threads, where a worker keeps more than 256 MiB of freed memory, and where a
request had an outcome that it should not have, or none.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
import urllib.error
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.helpers.servers.edges import Gauges, metrics_text, wait_until
from tests.helpers.servers.hostile import hostile_bodies
from tests.helpers.servers.loop_lag import lag_buckets
from tests.helpers.servers.random_server import ARGS, MODEL_NAME, write_checkpoint
from tests.helpers.servers.server import Server, running_server

_TINY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
_LIMITS = ("--max-model-len", "4096", "--num-kv-blocks", "700", "--max-queued-requests", "64")
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "fox", "dog", "jumps")
_SAMPLE_S = 10.0
_REQUEST_DEADLINE_S = 120.0
"""On a busy machine an engine may take a minute to start again."""
_PRINTED_S = 30.0
_WARM_S = 120.0
"""Age from which a process counts, unless the run is short."""
_CUT_S = 2.0
"""A client notices within so long that the frontend of its open connection has died."""
_FRONTEND = "frontend.main"
_VICTIMS = ("workers.main", "engine_core.process", _FRONTEND)
_MIN_MINUTES = 1.5  # three samples in each third
_MAX_FREE_MIB = 256
"""Freed memory that a worker's heap keeps, see `atom_ops.backend`."""
_GRAMMAR = "/memfd:atom-grammar-masks"
_DESCRIPTORS_OF_GRAMMAR = 2
_STACKS = re.compile(r"engine-(\d+)\.\d+/.*worker (\d+)\.stacks$")
"""A file that each worker has open: numbers of its engine and of the worker."""
_FREE_HEAP = re.compile(
    r'^atom:worker_heap_bytes\{engine="(\d+)",.*state="free",worker="(\d+)"\} (\S+)$', re.MULTILINE
)
_JUDGED = (("memory, MiB", 1 << 20, 8), ("descriptors", 1, 2), ("threads", 1, 2))
"""The columns of a sample: name, unit, and the growth that is allowed."""


def main() -> None:
    """Run, print the table, exit with status 1 where something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--model", help="a real model's directory; a tiny one with random weights when absent"
    )
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds; 0: nothing is killed")
    args = parser.parse_args()
    if args.minutes < _MIN_MINUTES:
        parser.error(f"--minutes must be at least {_MIN_MINUTES}: fewer samples show no growth")
    with tempfile.TemporaryDirectory() as directory:
        flags = _flags(args.model, Path(directory))
        if args.kill_every:
            flags += ("-dp", "2", "--api-server-count", "2")
        with running_server(*flags, *_LIMITS) as server:
            soak = Soak(server, args.clients, args.seed)
            asyncio.run(soak.run(args.minutes * 60, args.kill_every))
            wait_until(server, Gauges.is_idle, "idle again")
            soak.take_sample()
            problems = soak.report()
            if problems:
                print(server.text())
    sys.exit("\n".join(problems) or None)


def _flags(model: str | None, directory: Path) -> tuple[str, ...]:
    if model is not None:
        return ("--model", model, "--served-model-name", MODEL_NAME, "--device", "cpu")
    return ("--model", str(write_checkpoint(directory, **_TINY)), *ARGS)


class Soak:
    """Clients of one server, and samples of its processes."""

    def __init__(self, server: Server, clients: int, seed: int):
        self._server = server
        self._clients = clients
        self._seed = seed
        self._outcomes: Counter[str] = Counter()
        self._unexpected: list[str] = []
        self._sent = 0
        self._kills: Counter[str] = Counter()
        """By the module of the process."""
        self._most_free = 0
        """Bytes that the heap of a worker has kept at most."""
        self._warm_s = _WARM_S
        self._cut_at = -_CUT_S
        """When a frontend was killed last (monotonic, seconds): its clients are cut off."""
        self._began = time.monotonic()
        self._samples: list[tuple[float, dict[str, tuple[int, ...]]]] = []
        """Seconds since the start and, by kind of process, resident bytes, descriptors and threads."""

    async def run(self, seconds: float, kill_every: float) -> None:
        """Keep the clients busy for so long; kill a process every `kill_every` seconds, if that is not 0."""
        end = time.monotonic() + seconds
        self._warm_s = min(_WARM_S, seconds / 6)
        timeout = aiohttp.ClientTimeout(total=_REQUEST_DEADLINE_S)
        async with (
            aiohttp.ClientSession(self._server.url, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._clients):
                group.create_task(self._client(session, random.Random(self._seed + number), end))
            group.create_task(self._sample_until(end))
            if kill_every:
                group.create_task(self._kill_until(end - _REQUEST_DEADLINE_S / 2, kill_every))

    def take_sample(self) -> None:
        """Read the processes' figures now. A kind without one that is warm has those of the sample before."""
        figures = dict(self._samples[-1][1]) if self._samples else {}
        found: dict[str, list[tuple[int, ...]]] = {}
        young: dict[str, list[tuple[int, ...]]] = {}
        free = self._free_heaps()
        for pid in (self._server.process.pid, *self._server.children()):
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                sample = _figures(process, free)
                is_warm = time.time() - process.create_time() >= self._warm_s
                (found if is_warm else young).setdefault(_name_of(process), []).append(sample)
        found |= {name: each for name, each in young.items() if name not in found and name not in figures}
        figures |= {name: tuple(map(max, zip(*each, strict=True))) for name, each in found.items()}
        self._samples.append((time.monotonic() - self._began, figures))

    def _free_heaps(self) -> dict[tuple[str, str], int]:
        """By engine and worker: bytes that are free and kept. Empty if no frontend responds."""
        try:
            text = metrics_text(self._server)
        except (OSError, http.client.HTTPException):
            return {}
        found = {(engine, worker): int(float(size)) for engine, worker, size in _FREE_HEAP.findall(text)}
        self._most_free = max(self._most_free, *found.values(), 0)
        return found

    def report(self) -> list[str]:
        """Print the figures; returns what should not have happened."""
        print("\nrequests:", ", ".join(f"{count} {name}" for name, count in self._outcomes.most_common()))
        print("killed:", ", ".join(f"{count} {name}" for name, count in self._kills.items()) or "nothing")
        buckets = lag_buckets(metrics_text(self._server))
        counts = [
            count - before for (_, count), (_, before) in zip(buckets, [(0.0, 0.0), *buckets], strict=False)
        ]
        shown = (
            f"<= {bound * 1000:g}: {count:.0f}"
            for (bound, _), count in zip(buckets, counts, strict=True)
            if count
        )
        print("lag of the frontend's event loop, ms: times:", ", ".join(shown))
        names = list(self._samples[0][1])
        most_free = self._most_free >> 20
        print(f"\nfreed memory that a worker's heap has kept, at most: {most_free} MiB")
        print("\nresident memory but for that, MiB")
        print(_line("minute", names))
        for moment, figures in self._samples[:: int(_PRINTED_S / _SAMPLE_S)]:
            print(_line(f"{moment / 60:.1f}", [f"{figures[name][0] / (1 << 20):.0f}" for name in names]))
        third = len(self._samples) // 3
        middle, last = self._samples[third : 2 * third], self._samples[-third:]
        problems = [f"unexpected: {text}" for text in self._unexpected[:10]]
        if most_free > _MAX_FREE_MIB:
            problems.append(f"the heap of a worker has kept {most_free} MiB of freed memory")
        if self._sent != self._outcomes.total():
            problems.append(f"{self._sent} requests were sent, and {self._outcomes.total()} have an outcome")
        print("\nmedians of the middle third -> the last third")
        print(_line("", names))
        for column, (what, unit, _) in enumerate(_JUDGED):
            before, after = (
                [statistics.median(figures[name][column] for _, figures in part) / unit for name in names]
                for part in (middle, last)
            )
            print(_line(what, [f"{old:.0f} -> {new:.0f}" for old, new in zip(before, after, strict=True)]))
            problems += growth(column, names, before, after)
        return problems

    async def _sample_until(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.to_thread(self.take_sample)
            await asyncio.sleep(_SAMPLE_S)

    async def _client(self, session: aiohttp.ClientSession, source: random.Random, end: float) -> None:
        hostile = hostile_bodies(source.randrange(1 << 30), 1 << 20)
        while time.monotonic() < end:
            kind = source.randrange(10)
            self._sent += 1
            begun = time.monotonic()
            path, body = next(hostile) if kind == 0 else _request(source)
            try:
                if isinstance(body, bytes):
                    await self._refused(session, path, body)
                else:
                    await self._generate(session, path, body, source.random() * 0.5 if kind <= 2 else None)
            except (aiohttp.ClientError, TimeoutError) as error:
                if isinstance(error, aiohttp.ClientError) and self._cut_at > begun - _CUT_S:
                    self._outcomes["cut off with a frontend"] += 1
                else:
                    self._fail(error, begun, f"{path} {body!r:.300}")

    def _fail(self, error: Exception, begun: float, what: str) -> None:
        self._outcomes["failed"] += 1
        minute, since = (time.monotonic() - self._began) / 60, begun - self._cut_at
        self._unexpected.append(
            f"{type(error).__name__} at minute {minute:.1f}, of a request that was sent {since:.0f} s after "
            f"the last end of a frontend: {error}: {what}"
        )

    def _is_whole(self) -> bool:
        """Whether both engines can serve."""
        try:
            text = metrics_text(self._server)
        except urllib.error.HTTPError:  # the frontend was too busy to read the files of all
            return False
        return len(re.findall(r"^atom:engine_up.* 1\.0$", text, re.MULTILINE)) == 2

    async def _kill_until(self, end: float, every: float) -> None:
        """Kill one process after another, of each kind in turn."""
        source = random.Random(self._seed)
        while True:
            await asyncio.sleep(source.uniform(0.5, 1.5) * every)
            while not await asyncio.to_thread(self._is_whole):
                await asyncio.sleep(1)
            if time.monotonic() > end:
                return
            module = _VICTIMS[self._kills.total() % len(_VICTIMS)]
            if pids := [pid for pid, line in self._server.children().items() if module in line]:
                os.kill(source.choice(pids), signal.SIGKILL)
                self._kills[module] += 1
                print(f"minute {(time.monotonic() - self._began) / 60:.1f}: killed {module}", flush=True)
                if module == _FRONTEND:
                    self._cut_at = time.monotonic()

    async def _refused(self, session: aiohttp.ClientSession, path: str, body: bytes) -> None:
        async with session.post(path, data=body) as answer:
            await answer.read()
            self._count(answer.status, f"{path} {body[:200]!r}")

    async def _generate(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], leaves_after_s: float | None
    ) -> None:
        async with session.post(path, json=body) as answer:
            if leaves_after_s is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(answer.content.readany(), leaves_after_s)
                self._outcomes["left"] += 1
                return
            text = await answer.text()
            self._count(answer.status, f"{path} {json.dumps(body)[:200]}")
            if answer.status == 200 and body["stream"] and not text.endswith("data: [DONE]\n\n"):
                self._unexpected.append(f"{path}: a stream without its end: {text[-200:]!r}")

    def _count(self, status: int, what: str) -> None:
        self._outcomes[str(status)] += 1
        if status >= 500:
            self._unexpected.append(f"{status} for {what}")


def _request(source: random.Random) -> tuple[str, dict[str, Any]]:
    """A legal request of any kind; lengths are spread over three orders of magnitude."""
    words = " ".join(source.choices(_WORDS, k=int(10 ** source.uniform(0, 2.8))))
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "max_tokens": int(10 ** source.uniform(0, 2.2)),
        "temperature": source.choice([0, 0.7, 1.3]),
        "stream": source.random() < 0.6,
        "n": source.choice([1, 1, 1, 2, 5]),
    }
    options: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9, "top_k": 20},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"logit_bias": {"5": 3, "7": -100}},
        {"min_tokens": 3, "stop": [" fox", "dog"]},
        {"ignore_eos": True},
    ]
    body |= source.choice(options)
    if source.random() < 0.4:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}
    if source.random() < 0.15:
        body |= {"stream": False, "echo": True, "logprobs": 3}
    return "/v1/completions", body | {"prompt": words}


def _figures(process: psutil.Process, free: Mapping[tuple[str, str], int]) -> tuple[int, ...]:
    """The columns of `_JUDGED`, without what is bounded otherwise. `free` as of `Soak._free_heaps`."""
    memory, descriptors = process.memory_info().rss, process.num_fds()
    for number in os.listdir(f"/proc/{process.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{process.pid}/fd/{number}")
            if target.startswith(_GRAMMAR):
                descriptors -= _DESCRIPTORS_OF_GRAMMAR
            elif worker := _STACKS.search(target):
                memory -= free.get((worker[1], worker[2]), 0)
    return memory, descriptors, process.num_threads()


def growth(column: int, names: Sequence[str], before: Sequence[float], after: Sequence[float]) -> list[str]:
    """A sentence for each process whose figure grew by more than `_JUDGED` allows."""
    what, _, allowed = _JUDGED[column]
    return [
        f"{name}: {what} grew from {old:.0f} to {new:.0f}"
        for name, old, new in zip(names, before, after, strict=True)
        if new - old > allowed
    ]


def _line(first: str, columns: Sequence[str]) -> str:
    return f"{first:<12}" + "".join(f"{column:>16}" for column in columns)


def _name_of(process: psutil.Process) -> str:
    module = next((part for part in process.cmdline() if "." in part and not part.startswith(os.sep)), "")
    return module.removesuffix(".main").removesuffix(".process").replace("atom.entrypoints.", "") or "process"


if __name__ == "__main__":
    main()
