"""Questions to engine cores: their counters, profiles and administration."""

import asyncio
from collections.abc import Callable, Iterator
from typing import TypeVar

from atom.shared.messages.admin import (
    AbortNamed,
    Answer,
    Done,
    GetRequests,
    LogLevel,
    Question,
    RequestInfos,
    ResetPrefixCache,
    SetLogLevel,
)
from atom.shared.messages.engine import CoreStats, GetStats
from atom.shared.messages.profile import Profile, ProfileResult
from frontend.engine_client.engine_connection import EngineConnection
from frontend.engine_client.engine_link import LinkState
from frontend.engine_client.engine_queries import Queries
from frontend.engine_client.engine_set import EngineSet

__all__ = ["EngineControl"]

A = TypeVar("A", bound=Answer)

_ANSWER_DEADLINE_S = 5.0
# Longer than the core's own deadline, whose error message is more specific.
_PROFILE_DEADLINE_S = 330.0


class EngineControl:
    """Asks `engines`; the owner passes on their answers and their ends.

    Each question has one of `numbers`, which its answers repeat.
    """

    def __init__(self, engines: EngineSet, numbers: Iterator[int]):
        self._engines = engines
        self._numbers = numbers
        self._stats: dict[EngineConnection, asyncio.Future[CoreStats]] = {}
        self._profiles: Queries[ProfileResult] = Queries()
        self._queries: Queries[Answer] = Queries()
        self._log_level: LogLevel | None = None  # that of the configuration, which the engines start with

    async def stats(self, timeout_s: float) -> dict[int, CoreStats]:
        """The current counters of each rank whose core responds in time."""
        ready = [engine for engine in self._engines if engine.link.is_ready]
        waiting = {engine.rank: self._request_stats(engine) for engine in ready}
        if waiting:
            await asyncio.wait(waiting.values(), timeout=timeout_s)
        return {
            rank: response.result()
            for rank, response in waiting.items()
            if response.done() and not response.cancelled() and response.exception() is None
        }

    def _request_stats(self, engine: EngineConnection) -> "asyncio.Future[CoreStats]":
        response = self._stats.get(engine)
        if response is None or response.done():
            response = self._stats[engine] = asyncio.get_running_loop().create_future()
            engine.link.send(GetStats())
        return response

    async def profile(self, on: bool) -> list[tuple[int, ProfileResult]]:
        """Start recording traces on all workers, or stop and write them; (rank, result) of each engine.

        Raises UnavailableError without an engine, EngineError when one does not respond.
        """
        ranks = self._engines.ready_ranks()
        profiles = [
            self._profiles.ask(self._engines[rank], number, Profile(on, number), _PROFILE_DEADLINE_S)
            for rank, number in zip(ranks, self._numbers, strict=False)  # the numbers have no end
        ]
        results = await asyncio.gather(*profiles)
        return list(zip(ranks, results, strict=True))

    async def requests(self, name: str = "") -> list[tuple[int, RequestInfos]]:
        """(rank, sequences) of every engine: of the request `name`, or all running ones."""
        return await self._ask_all(lambda number: GetRequests(number, name), RequestInfos)

    async def abort_named(self, names: list[str], everything: bool = False, tenant: str | None = None) -> int:
        """End these requests, or all, on all engines; returns how many sequences.

        With `tenant` only those of its API key.
        """
        answers = await self._ask_all(lambda number: AbortNamed(number, names, everything, tenant), Done)
        return sum(answer.count for _, answer in answers)

    async def reset_prefix_cache(self) -> int:
        """Uncache all blocks of all engines; returns how many were cached."""
        answers = await self._ask_all(ResetPrefixCache, Done)
        return sum(answer.count for _, answer in answers)

    async def _ask_all(self, question: Callable[[int], Question], kind: type[A]) -> list[tuple[int, A]]:
        """Ask every ready engine. Raises EngineError when one does not answer."""
        ranks = self._engines.ready_ranks()
        questions = [
            self._queries.ask(self._engines[rank], number, question(number), _ANSWER_DEADLINE_S)
            for rank, number in zip(ranks, self._numbers, strict=False)  # the numbers have no end
        ]
        answers = await asyncio.gather(*questions)
        pairs = zip(ranks, answers, strict=True)
        return [(rank, answer) for rank, answer in pairs if isinstance(answer, kind)]

    @property
    def log_level(self) -> LogLevel | None:
        """The level that the engines were told to log from; None: none."""
        return self._log_level

    @log_level.setter
    def log_level(self, level: LogLevel) -> None:
        if level != self._log_level:
            self._log_level = level
            for engine in self._engines:
                if engine.link.state is not LinkState.DEAD:  # its socket may be closed
                    engine.link.send(SetLogLevel(level))

    # From the owner

    def connected(self, engine: EngineConnection) -> None:
        """Send the log level to an engine that has become ready."""
        if self._log_level is not None:
            engine.link.send(SetLogLevel(self._log_level))

    def answered(self, engine: EngineConnection, answer: CoreStats | ProfileResult | Answer) -> None:
        """Hand an answer to the caller that waits for it."""
        match answer:
            case CoreStats():
                response = self._stats.pop(engine, None)
                if response is not None and not response.done():
                    response.set_result(answer)
            case ProfileResult(number):
                self._profiles.answer(number, answer)
            case RequestInfos(number) | Done(number):
                self._queries.answer(number, answer)

    def lost(self, engine: EngineConnection, reason: str) -> None:
        """Fail what waits for answers over a connection that has ended."""
        if (stats := self._stats.pop(engine, None)) is not None:
            stats.cancel()
        self._profiles.fail(engine, reason)
        self._queries.fail(engine, reason)
