"""Runs one scenario: the streams again, with its events."""

import asyncio
import contextlib
import random
import re
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from atom.benchmarks.chaos.overload import overload
from atom.benchmarks.chaos.processes import (
    ChaosError,
    all_processes_of,
    forbid_growth,
    pause_at_random,
    processes_of,
    resident_bytes,
    restored_limits,
    send,
    wait_for_kind,
)
from atom.benchmarks.chaos.report import Report, judge, judge_overload
from atom.benchmarks.chaos.scenarios import Event, Scenario
from atom.benchmarks.chaos.streams import ClientStream, body_of, flood, follow_all, poison, stall

__all__ = ["Target", "run_scenario", "run_undisturbed"]

_READY_DEADLINE_S = 180.0
_NOTICE_S = 180.0
"""Longer than --hang-timeout."""
_RESTARTS = re.compile(r"^atom:(?:engine|frontend)_restarts_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """The server, and the load on it."""

    url: str
    supervisor: int
    """Its process id."""
    headers: dict[str, str]
    model: str
    clients: int
    tokens: int
    """Tokens of each stream."""
    seed: int = 0
    seconds: float = 60.0
    """Duration of an overload."""
    requests: int = 1
    """Streams of each client, one after another."""

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The requests of the streams."""
        return [body_of(self.model, number, self.tokens) for number in range(self.clients * self.requests)]


async def run_undisturbed(target: Target) -> list[ClientStream]:
    """The streams without events. Raises ChaosError if one fails."""
    await _until_ready(target)
    streams = await follow_all(target.url, target.headers, target.bodies, lambda count: None, target.requests)
    if errors := [stream.error for stream in streams if stream.error]:
        raise ChaosError(f"{len(errors)} of {len(streams)} streams failed without an event: {errors[0]}")
    return streams


async def run_scenario(
    target: Target, name: str, scenario: Scenario, undisturbed: Sequence[ClientStream]
) -> Report:
    """The streams with the events of a scenario, compared with `undisturbed`, which an overload ignores.

    Raises ChaosError for a server without the processes that the scenario needs.
    """
    counts = _counts(target, scenario)
    await _until_ready(target)
    named = (name, scenario.requirement, scenario.summary)
    if scenario.is_overload:
        figures, outcomes, grown = await overload(
            target.url, target.headers, target.model, target.clients, target.seconds, target.supervisor
        )
        return judge_overload(named, figures, outcomes, grown)
    restarts = await _restarts(target)
    before = resident_bytes(processes_of(target.supervisor, "frontend"))
    events = _Events(target, scenario.events)
    with restored_limits(target.supervisor):
        streams = await follow_all(
            target.url, target.headers, target.bodies, events.on_tokens, target.requests
        )
        outcomes = await events.end()
    changed = {event.target for event in scenario.events}
    grown = resident_bytes(processes_of(target.supervisor, "frontend")) - before
    for kind, count in counts.items():  # the next scenario begins with a whole server
        await asyncio.to_thread(wait_for_kind, target.supervisor, kind, count)
    await _until_ready(target)
    num_signals = sum(event.count for event in scenario.events if event.action in ("kill", "stop"))
    noticed = await _noticed(target, restarts + num_signals)
    report = judge(named, undisturbed, streams, events.times, 0 if "frontend" in changed else grown, outcomes)
    if not noticed:
        report.problems.append(
            f"the server has not restarted what was killed or stopped in {_NOTICE_S:.0f} s"
        )
    return report


@dataclass
class _Events:
    """The events of a scenario, each once the streams have got so many tokens."""

    target: Target
    left: tuple[Event, ...]
    times: list[float] = field(default_factory=list)
    """When each event took place (monotonic, seconds)."""
    num_tokens: int = 0
    tasks: list["asyncio.Task[Any]"] = field(default_factory=list)
    until: asyncio.Event = field(default_factory=asyncio.Event)

    def on_tokens(self, count: int) -> None:
        self.num_tokens += count
        expected = self.target.clients * self.target.requests * self.target.tokens
        while self.left and self.num_tokens >= self.left[0].at * expected:
            event = self.left[0]
            self.left = self.left[1:]
            self._do(event)
            self.times.append(time.monotonic())

    async def end(self) -> dict[str, int]:
        """Wait for what the events have begun; the outcomes of a flood."""
        self.until.set()
        outcomes: dict[str, int] = {}
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(result, dict):
                outcomes |= result
        return outcomes

    def _do(self, event: Event) -> None:
        target = self.target
        match event.action:
            case "kill":
                for pid in self._chosen(event):
                    send(pid, signal.SIGKILL)
            case "stop":
                for pid in self._chosen(event):
                    send(pid, signal.SIGSTOP)
            case "memory":
                for pid in self._chosen(event):
                    forbid_growth(pid, "memory")
            case "disk":
                for pid in (target.supervisor, *all_processes_of(target.supervisor)):
                    forbid_growth(pid, "disk")
            case "pause":
                self._begin(pause_at_random(target.supervisor, event.count, target.seed, self.until))
            case "poison":
                body = body_of(target.model, 0, target.tokens)
                self._begin(poison(target.url, target.headers, body, self._end_engine))
            case "stall":
                for number in range(event.count):
                    body = {**body_of(target.model, number, target.tokens), "return_token_ids": False}
                    self._begin(stall(target.url, target.headers, body, self.until))
            case "flood":
                body = body_of(target.model, 0, 1)
                self._begin(flood(target.url, target.headers, body, event.count))

    def _begin(self, task: Coroutine[Any, Any, Any]) -> None:
        self.tasks.append(asyncio.create_task(task))

    def _chosen(self, event: Event) -> list[int]:
        """Random processes of the event's kind."""
        assert event.target is not None
        pids = processes_of(self.target.supervisor, event.target)
        return random.Random(self.target.seed).sample(pids, min(event.count, len(pids)))

    def _end_engine(self) -> None:
        """Kill the workers of the first engine."""
        for pid in processes_of(self.target.supervisor, "worker", engine=0):
            send(pid, signal.SIGKILL)


def _counts(target: Target, scenario: Scenario) -> dict[str, int]:
    """How many processes of each kind there are. Raises ChaosError where an event has no target."""
    counts = {kind: len(processes_of(target.supervisor, kind)) for kind in ("worker", "core", "frontend")}
    for event in scenario.events:
        if event.target is not None and counts[event.target] < event.count:
            raise ChaosError(f"the server has {counts[event.target]} processes of: {event.target}")
    return counts


async def _restarts(target: Target) -> int:
    """How often an engine or a frontend has been started again."""
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(target.url, headers=target.headers, timeout=timeout) as session,
        session.get("/metrics") as response,
    ):
        found = _RESTARTS.findall(await response.text())
    return sum(int(float(value)) for value in found)


async def _noticed(target: Target, restarts: int) -> bool:
    """Wait until there were so many restarts; whether there were."""
    deadline = time.monotonic() + _NOTICE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            if await _restarts(target) >= restarts:
                return True
        await asyncio.sleep(0.5)
    return False


async def _until_ready(target: Target) -> None:
    deadline = time.monotonic() + _READY_DEADLINE_S
    timeout = aiohttp.ClientTimeout(total=5)
    async with aiohttp.ClientSession(target.url, timeout=timeout) as session:
        while time.monotonic() < deadline:
            try:
                async with session.get("/ready") as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.2)
    raise ChaosError(f"{target.url}/ready was not 200 within {_READY_DEADLINE_S:.0f} s")
