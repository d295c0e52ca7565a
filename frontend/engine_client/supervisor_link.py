"""The frontend's control connection to its supervisor, which says which engines there are."""

import asyncio
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from atom.shared.messages.admin import ServerState
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.resume import Claimed, GetStream, HandedStream, LeaveStream
from atom.shared.messages.supervisor import (
    Engines,
    FromControl,
    GetEngines,
    RestartEngines,
    SetServerState,
    ToControl,
    WantTrial,
    control_identity,
)
from atom.shared.utils.logger import get_logger
from frontend.errors import EngineError

__all__ = ["SupervisorLink"]

_ANSWER_DEADLINE_S = 5.0


class SupervisorLink:
    """`control` is the supervisor's endpoint, `index` the number of this frontend."""

    def __init__(self, control: str, index: int, state: ServerState):
        self.state = state
        """State of the server, as the supervisor has sent it last."""
        self.to_restart: list[int] = []
        """As in `Engines`, as the supervisor has sent it last."""
        self._numbers = itertools.count(1)
        self._questions: dict[int, asyncio.Future[HandedStream]] = {}
        self._control = control
        self._index = index
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._changing = asyncio.Lock()
        self._socket: zmq.asyncio.Socket | None = None
        self._wanted_trial = 0
        self._sending: set[asyncio.Future[Any]] = set()

    async def follow(self, update: Callable[[Engines], None]) -> None:
        """Call `update` with each list of engines that the supervisor sends, until cancelled.

        A failure ends the process: without these messages it would send requests to engines that have ended.
        """
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, control_identity(self._index))
        decoder = Decoder[FromControl](FromControl)
        try:
            self._socket.connect(self._control)
            await self._socket.send(encode(GetEngines(self._index)))
            if self._wanted_trial:
                self.want_trial(self._wanted_trial)
            while True:
                message = decoder.decode(await self._socket.recv())  # bounded by the supervisor's life
                if isinstance(message, HandedStream):
                    if (question := self._questions.get(message.number)) is not None and not question.done():
                        question.set_result(message)
                    continue
                self.state = message.state
                self.to_restart = message.to_restart
                update(message)
                self._wake()
        except Exception:
            get_logger().critical("the frontend cannot follow the supervisor", exc_info=True)
            os._exit(1)
        finally:
            self._socket.close(0)
            self._socket = None
            context.term()

    def want_trial(self, number: int) -> None:
        """Ask for turn `number` of trying requests, or end the turn with 0: see TrialTurn.

        Before `follow` has connected, the wish is kept until then.
        """
        self._wanted_trial = number
        if self._socket is not None:
            self._send(WantTrial(self._index, number))

    def _send(self, message: ToControl) -> None:
        assert self._socket is not None, "the application follows the supervisor"
        sending = asyncio.ensure_future(self._socket.send(encode(message)))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def handed_stream(self, key: str, tenant: str) -> HandedStream:
        """Take a stream of the server that this one replaces; one that does not answer in time has none."""
        if self._socket is None:
            return HandedStream(0)
        try:
            return await self._ask(lambda number: GetStream(self._index, number, key, tenant))
        except TimeoutError:
            return HandedStream(0)

    async def leave_streams(self, streams: list[Claimed]) -> None:
        """Give the supervisor streams that another server goes on with."""
        for claimed in streams:
            try:
                await self._ask(partial(LeaveStream, self._index, claimed=claimed))
            except TimeoutError:
                get_logger().error("the supervisor does not take streams without an engine: they end")
                return

    async def _ask(self, question: Callable[[int], GetStream | LeaveStream]) -> HandedStream:
        """The response to a question, which gets its number. Raises TimeoutError after some seconds."""
        number = next(self._numbers)
        response: asyncio.Future[HandedStream] = asyncio.get_running_loop().create_future()
        self._questions[number] = response
        try:
            self._send(question(number))
            async with asyncio.timeout(_ANSWER_DEADLINE_S):
                return await response
        finally:
            del self._questions[number]

    async def restart_engines(self) -> list[int]:
        """Restart all engines, one after the other; the ranks that are left. Raises EngineError."""
        self._send(RestartEngines())
        await self._wait(lambda: bool(self.to_restart))
        return self.to_restart

    async def change_state(self, **values: Any) -> ServerState:
        """Set fields of the state of the whole server; returns it once this frontend has got it.

        Raises EngineError.
        """
        async with self._changing:  # a change that begins meanwhile would undo this one
            wanted = msgspec.structs.replace(self.state, **values)
            self._send(SetServerState(wanted))
            await self._wait(lambda: self.state == wanted)
            return wanted

    async def _wait(self, has_happened: Callable[[], bool]) -> None:
        """Wait until a message of the supervisor says so. Raises EngineError after some seconds."""
        if has_happened():
            return
        waiting = (has_happened, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(_ANSWER_DEADLINE_S):
                await waiting[1]
        except TimeoutError:
            text = f"the supervisor did not respond within {_ANSWER_DEADLINE_S:.0f} s"
            raise EngineError(text) from None
        finally:
            self._waiting.remove(waiting)

    def _wake(self) -> None:
        """Wake those for whom the message has come: the next one, read in the same turn, may hide it."""
        for has_happened, future in self._waiting:
            if not future.done() and has_happened():
                future.set_result(None)
