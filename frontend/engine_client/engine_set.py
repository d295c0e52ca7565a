"""The engines that there are: one connection for each rank, opened and closed as the supervisor says."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import Any

import zmq

from atom.shared.messages.engine import CoreReady, FromCore
from atom.shared.messages.launch import EngineAddress
from atom.shared.messages.supervisor import EngineEnded
from frontend.engine_client.client_settings import ClientSettings
from frontend.engine_client.engine_connection import EngineConnection
from frontend.engine_client.engine_link import EngineLink, LinkState
from frontend.errors import RequestError, UnavailableError

__all__ = ["EngineSet"]

# States of engines that are not ready, the one that may soon be ready first.
_SOONEST_FIRST = (LinkState.STALLED, LinkState.READY, LinkState.CONNECTING, LinkState.DEAD)


class EngineSet:
    """The connection to the engine of each rank that lives or starts; iteration gives all of them.

    `on_message` and `on_loss` get what EngineConnection reports. `on_close` gets an engine that is left out
    of the list of `change_to`, and the reason, while its connection is still open.
    """

    def __init__(
        self,
        settings: ClientSettings,
        on_message: Callable[[EngineConnection, FromCore], None],
        on_loss: Callable[[EngineConnection, str, bool], None],
        on_close: Callable[[EngineConnection, str], None],
    ):
        self._settings = settings
        self._on_message = on_message
        self._on_loss = on_loss
        self._on_close = on_close
        self.restarts = dict.fromkeys(range(settings.num_ranks), 0)
        """By rank: restarts since the start of the server."""
        self.ended_reasons: dict[int, str] = {}
        """By rank: why its last life has ended; without ranks where none has."""
        self.final: dict[int, str] = {}
        """By rank: why an engine has ended that is not started again."""
        self.planned: set[tuple[int, int]] = set()
        """Rank and life of engines whose end was planned: no request has caused it."""
        self._started = asyncio.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self._by_rank: dict[int, EngineConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[EngineConnection]:
        return iter(self._by_rank.values())

    def __getitem__(self, rank: int) -> EngineConnection:
        return self._by_rank[rank]

    def get(self, rank: int) -> EngineConnection | None:
        """The engine of a rank; None while it has none."""
        return self._by_rank.get(rank)

    def change_to(self, engines: Collection[EngineAddress], ended: Collection[EngineEnded]) -> None:
        """Open the links of new lives, and close those of lives that are not among `engines`."""
        lives = {(address.rank, address.life) for address in engines}
        reasons = {(end.rank, end.life): end.reason for end in ended}
        self.planned = {(end.rank, end.life) for end in ended if end.is_planned}
        self.ended_reasons.update({rank: reason for (rank, _), reason in reasons.items()})
        self.restarts |= dict(sorted([*reasons, *lives]))
        for engine in list(self):
            if (engine.rank, engine.life) not in lives:
                reason = reasons.get((engine.rank, engine.life), f"engine {engine.rank} was stopped")
                self._close(engine, reason)
        for address in engines:
            if address.rank not in self._by_rank:
                self._open(address)
        self.final = {end.rank: end.reason for end in ended if end.is_final}
        self.note_ready()

    def close_all(self, reason: str) -> None:
        """Close all links; `wait_closed` waits for that."""
        for engine in list(self):
            self._close(engine, reason)

    async def wait_closed(self) -> None:
        """Wait until the sockets of all closed links are closed, at the end."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._context.term()

    def _open(self, address: EngineAddress) -> None:
        link = EngineLink(self._context, address.endpoint, self._settings.index)
        engine = EngineConnection(address, link, self._settings.hang_timeout, self._on_message, self._on_loss)
        self._by_rank[address.rank] = engine
        engine.open()

    def _close(self, engine: EngineConnection, reason: str) -> None:
        del self._by_rank[engine.rank]
        self.ended_reasons[engine.rank] = reason
        self._on_close(engine, reason)
        closing = engine.close()
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    @property
    def limits(self) -> CoreReady | None:
        """The limits of the engine with the smallest max_model_len; None until one was ready."""
        known = [engine.link.limits for engine in self if engine.link.limits]
        return min(known, key=lambda limits: limits.max_model_len, default=None)

    @property
    def is_ready(self) -> bool:
        """Whether an engine can generate."""
        return any(engine.link.is_ready for engine in self)

    @property
    def up(self) -> dict[int, bool]:
        """By rank: whether its engine can generate."""
        ready = {engine.rank for engine in self if engine.link.is_ready}
        return {rank: rank in ready for rank in range(self._settings.num_ranks)}

    @property
    def capacity(self) -> int:
        """Sequences that may be in progress in this frontend while these engines are ready."""
        return self._settings.capacity(sum(engine.link.is_ready for engine in self))

    @property
    def running_capacity(self) -> float:
        """Sequences of this frontend that these engines run at once."""
        return self._settings.running(sum(engine.link.is_ready for engine in self))

    def check_ready(self, rank: int | None, can_wait: bool) -> None:
        """Raises UnavailableError while no engine can generate, or not that of `rank`.

        With `can_wait` a request for `rank` waits for an engine that is started again, while others serve.
        RequestError for a rank that does not exist.
        """
        try:
            self.ready_ranks(rank)
        except UnavailableError:
            if not (can_wait and self.is_ready) or rank in self.final:
                raise

    @property
    def _starting(self) -> list[int]:
        """Ranks whose engine has not been ready since the start of the server, and has not ended either."""
        return [
            engine.rank
            for engine in self
            if engine.link.state is LinkState.CONNECTING
            and engine.link.limits is None
            and engine.rank not in self.ended_reasons
        ]

    def check_started(self) -> None:
        """Raises UnavailableError until every engine was ready, or has ended: a restart has no effect."""
        if ranks := self._starting:
            raise UnavailableError(f"engine {ranks[0]} is still starting; try again shortly")

    async def wait_started(self) -> None:
        """Wait until an engine is ready and `check_started` holds; the caller bounds the wait."""
        await self._started.wait()

    def note_ready(self) -> None:
        """Let `wait_started` end if it may; to be called when an engine has become ready."""
        if self.is_ready and not self._starting:
            self._started.set()

    def ready_ranks(self, rank: int | None = None) -> list[int]:
        """The ranks whose engines can generate, or `rank` alone; never empty.

        Raises UnavailableError without any, RequestError for a rank that does not exist.
        """
        num_ranks = self._settings.num_ranks
        if rank is not None and not 0 <= rank < num_ranks:
            raise RequestError(
                f"data_parallel_rank {rank} is none of this server's {num_ranks} ranks: "
                f"use 0 to {num_ranks - 1}, or leave it out",
                param="data_parallel_rank",
            )
        wanted = [engine for engine in self if rank in (None, engine.rank)]
        if ready := [engine.rank for engine in wanted if engine.link.is_ready]:
            return ready
        if wanted:
            min(wanted, key=lambda engine: _SOONEST_FIRST.index(engine.link.state)).link.check_ready()
        reasons = [reason for number, reason in self.ended_reasons.items() if rank in (None, number)]
        raise UnavailableError(f"the engine is gone: {'; '.join(reasons)}", code="engine_dead")
