"""Questions and commands to engine cores that wait for their answers."""

import asyncio
from typing import Any, Generic, TypeVar

import msgspec

from frontend.engine_client.engine_connection import EngineConnection
from frontend.errors import EngineError, EngineLostError

__all__ = ["Queries"]

A = TypeVar("A", bound=msgspec.Struct)


class Queries(Generic[A]):
    """The messages that wait for an answer of type A, which repeats their number."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[EngineConnection, asyncio.Future[A]]] = {}

    async def ask(self, engine: EngineConnection, number: int, message: Any, deadline_s: float) -> A:
        """Send `message`, which contains `number`, and return the answer.

        Raises EngineError when none arrives in time, EngineLostError when the engine ends before.
        """
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting[number] = engine, answer
        engine.link.send(message)
        try:
            return await asyncio.wait_for(answer, deadline_s)
        except TimeoutError:
            raise EngineError(
                f"engine core {engine.rank} did not respond within {deadline_s:.0f} s"
            ) from None
        finally:
            del self._waiting[number]

    def answer(self, number: int, message: A) -> None:
        """Hand an answer to its query; it is dropped if the query is over."""
        if (entry := self._waiting.get(number)) is not None and not entry[1].done():
            entry[1].set_result(message)

    def fail(self, engine: EngineConnection, reason: str) -> None:
        """`engine` has ended: it answers no more."""
        for owner, answer in self._waiting.values():
            if owner is engine and not answer.done():
                answer.set_exception(EngineLostError(reason))
