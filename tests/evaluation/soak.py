"""A mixed load on a real server for minutes: does anything grow?

    python -m tests.evaluation.soak --minutes 10

Clients stream and do not stream, chat and complete, penalise, score prompts, leave early, and send
bodies that must be refused. Every ten seconds the tool reads each process's resident memory, open
descriptors and threads. Once the load has ended and the server is idle, it compares the last third
of these samples with the middle third, and exits with status 1 where something grew or a request
had an outcome that it should not have.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.helpers.edges import Gauges, wait_until
from tests.helpers.hostile import hostile_bodies
from tests.helpers.random_server import ARGS, MODEL_NAME, write_checkpoint
from tests.helpers.server import Server, running_server

_TINY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
_LIMITS = ("--max-model-len", "4096", "--num-kv-blocks", "700", "--max-queued-requests", "64")
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "fox", "dog", "jumps")
_SAMPLE_S = 10.0
_REQUEST_DEADLINE_S = 120.0
_GROWTH_BYTES = 8 << 20
_GROWTH_COUNT = 2


def main() -> None:
    """Run, print the table, exit with status 1 where something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--model", help="a real model's directory; a tiny one with random weights when absent"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        flags = _flags(args.model, Path(directory))
        with running_server(*flags, *_LIMITS) as server:
            soak = Soak(server, args.clients, args.seed)
            asyncio.run(soak.run(args.minutes * 60))
            wait_until(server, Gauges.is_idle, "idle again")
            soak.take_sample()
            problems = soak.report()
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
        self._processes = [psutil.Process(pid) for pid in (server.process.pid, *server.children())]
        self._samples: list[list[tuple[int, int, int]]] = []
        """For each moment and process: resident bytes, descriptors, threads."""

    async def run(self, seconds: float) -> None:
        """Keep the clients busy for so long."""
        end = time.monotonic() + seconds
        timeout = aiohttp.ClientTimeout(total=_REQUEST_DEADLINE_S)
        async with (
            aiohttp.ClientSession(self._server.url, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._clients):
                group.create_task(self._client(session, random.Random(self._seed + number), end))
            group.create_task(self._sample_until(end))

    def take_sample(self) -> None:
        """Read the processes' figures now."""
        self._samples.append(
            [
                (process.memory_info().rss, process.num_fds(), process.num_threads())
                for process in self._processes
            ]
        )

    def report(self) -> list[str]:
        """Print the table; returns what should not have happened."""
        print("\nrequests:", ", ".join(f"{count} {name}" for name, count in self._outcomes.most_common()))
        with contextlib.suppress(KeyError):
            lag = Gauges(self._server)["event_loop_lag_seconds_max"]
            print(f"longest hold of the frontend's event loop: {lag * 1000:.0f} ms")
        problems = [f"unexpected: {text}" for text in self._unexpected[:10]]
        third = max(len(self._samples) // 3, 1)
        print(f"{'process':<12}{'MiB: first third':>24}{'second':>10}{'last':>10}{'fds':>14}{'threads':>12}")
        for index, process in enumerate(self._processes):
            columns = [
                [statistics.median(sample[index][k] for sample in part) for k in range(3)]
                for part in (self._samples[:third], self._samples[third : 2 * third], self._samples[-third:])
            ]
            name = _name_of(process)
            memory = [column[0] / (1 << 20) for column in columns]
            fds, threads = ([f"{column[k]:.0f}" for column in columns] for k in (1, 2))
            print(
                f"{name:<12}{memory[0]:>24.1f}{memory[1]:>10.1f}{memory[2]:>10.1f}"
                f"{'/'.join(fds):>14}{'/'.join(threads):>12}"
            )
            problems += _growth(name, columns[1], columns[2])
        return problems

    async def _sample_until(self, end: float) -> None:
        while time.monotonic() < end:
            self.take_sample()
            await asyncio.sleep(_SAMPLE_S)

    async def _client(self, session: aiohttp.ClientSession, source: random.Random, end: float) -> None:
        hostile = hostile_bodies(source.randrange(1 << 30), 1 << 20)
        while time.monotonic() < end:
            kind = source.randrange(10)
            try:
                if kind == 0:
                    path, body = next(hostile)
                    await self._refused(session, path, body)
                else:
                    await self._generate(session, source, leaves=kind <= 2)
            except (aiohttp.ClientError, TimeoutError) as error:
                self._outcomes["failed"] += 1
                self._unexpected.append(f"{type(error).__name__}: {error}")

    async def _refused(self, session: aiohttp.ClientSession, path: str, body: bytes) -> None:
        async with session.post(path, data=body) as answer:
            await answer.read()
            self._count(answer.status, f"{path} {body[:200]!r}")

    async def _generate(self, session: aiohttp.ClientSession, source: random.Random, leaves: bool) -> None:
        path, body = _request(source)
        async with session.post(path, json=body) as answer:
            if leaves:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(answer.content.readany(), source.random() * 0.5)
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


def _growth(name: str, before: Sequence[float], after: Sequence[float]) -> list[str]:
    grown = []
    if after[0] - before[0] > _GROWTH_BYTES:
        grown.append(f"{name}: memory grew by {(after[0] - before[0]) / (1 << 20):.1f} MiB")
    for column, what in ((1, "descriptors"), (2, "threads")):
        if after[column] - before[column] > _GROWTH_COUNT:
            grown.append(f"{name}: {what} grew from {before[column]:.0f} to {after[column]:.0f}")
    return grown


def _name_of(process: psutil.Process) -> str:
    module = next((part for part in process.cmdline() if "." in part and not part.startswith(os.sep)), "")
    return module.removesuffix(".main").removesuffix(".process").replace("atom.entrypoints.", "") or "process"


if __name__ == "__main__":
    main()
