"""The link to one engine core, for all requests of this process.

One task reads the core's steps, turns them into text and wakes each stream at most once a
step. A stream keeps at most one pending update a choice: a lagging reader gets merged text,
and never makes anybody else wait.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from atom.messages.codec import Decoder, encode
from atom.messages.engine import (
    Abort,
    AddRequest,
    CoreDead,
    CoreReady,
    CoreStats,
    FromCore,
    GetStats,
    Hello,
    ToCore,
    TokenDeltas,
)
from atom.messages.profile import Profile, ProfileResult
from atom.utils.logger import get_logger
from frontend.admission import Admission
from frontend.errors import ApiError, EngineDeadError, EngineError, UnavailableError
from frontend.metrics import Metrics, Progress
from frontend.output_processor import OutputProcessor, TextOptions, Update

__all__ = ["EngineClient", "Stream"]

# A silent core is asked for a sign of life, and given up long after: on a CPU one step of a
# large model may take minutes, and the supervisor sees processes die by itself.
_PROBE_AFTER_S = 30.0
_GIVE_UP_AFTER_S = 1800.0
# Longer than the core's own: its words say more.
_PROFILE_DEADLINE_S = 330.0
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 30_000
# How long the core's own last message may trail the end of its connection.
_LAST_WORDS_S = 0.3
_ID_BITS = 40
_BYTES_PER_ID = 4


class Stream:
    """The updates of one HTTP request, over all its choices."""

    def __init__(self, request_ids: list[int], every_step: bool):
        self.open = set(request_ids)
        """Choices that have not ended."""
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self._every_step = every_step
        self._pending: dict[int, Update] = {}
        self._error: ApiError | None = None
        self._wake = asyncio.Event()

    def put(self, update: Update, now: float) -> None:
        """Add what is new; wakes the reader where it wants to know."""
        if update.token_ids:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        earlier = self._pending.get(update.request_id)
        if earlier is None:
            self._pending[update.request_id] = update
        else:
            earlier.merge(update)
        if update.finished:
            self.open.discard(update.request_id)
        if self._every_step or not self.open or update.error:
            self._wake.set()

    def fail(self, error: ApiError) -> None:
        """End the stream; the reader gets `error` after what is pending."""
        self._error = error
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[list[Update]]:
        return self

    async def __anext__(self) -> list[Update]:
        """At most one update a choice. Raises the error that `fail` was given."""
        if not self.open and not self._pending:
            raise StopAsyncIteration
        await self._wake.wait()  # bounded by the client's watch over the core
        if self._error is not None and not self._pending:
            raise self._error
        updates = list(self._pending.values())
        self._pending.clear()
        if self._error is None:
            self._wake.clear()
        return updates


@dataclass(slots=True)
class _Choice:
    """One request that the core has."""

    stream: Stream
    progress: Progress


class EngineClient:
    """Sends requests to the core at `endpoint` and hands its tokens out.

    `index` is this frontend's number, unique among those of the core; `capacity` bounds its
    choices in progress, through `admission`. `on_ready` is called with the core's limits once it
    can make tokens.
    """

    def __init__(
        self,
        endpoint: str,
        index: int,
        output: OutputProcessor,
        metrics: Metrics,
        capacity: int,
        on_ready: Callable[[CoreReady], None] = lambda ready: None,
    ):
        self.limits: CoreReady | None = None
        """What the core said when it was ready."""
        self.admission = Admission(capacity, self.__len__)
        self._endpoint = endpoint
        self._index = index
        self._output = output
        self._metrics = metrics
        self._on_ready = on_ready
        self._counter = itertools.count(index << _ID_BITS)
        self._choices: dict[int, _Choice] = {}
        self._scrapes: set[asyncio.Future[CoreStats]] = set()
        self._profiles: dict[int, asyncio.Future[ProfileResult]] = {}
        self._decoder = Decoder[FromCore](FromCore)
        self._ready = asyncio.Event()
        self._death: str | None = None
        self._last_sign = time.monotonic()

    def __len__(self) -> int:
        """Choices that the core has and that have not ended."""
        return len(self._choices)

    async def __aenter__(self) -> "EngineClient":
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Neither side may drop a message; what is in flight is bounded by the live requests.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._endpoint)
        self._send(Hello(self._index))
        self._tasks = [
            asyncio.create_task(self._guard(self._read()), name="core-reader"),
            asyncio.create_task(self._guard(self._watch_connection()), name="core-watch"),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all("the server is stopping")
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()

    def check_ready(self) -> None:
        """Raises UnavailableError while no token can be made."""
        if self._death is not None:
            raise UnavailableError(f"the engine is gone: {self._death}", code="engine_dead")
        if not self._ready.is_set():
            raise UnavailableError("the engine is still starting; try again shortly")

    @property
    def is_ready(self) -> bool:
        """Whether tokens can be made."""
        return self._ready.is_set() and self._death is None

    async def wait_ready(self) -> None:
        """Until the core can make tokens; the caller bounds the wait."""
        await self._ready.wait()

    async def stats(self, timeout_s: float) -> CoreStats | None:
        """The core's counters as of now; None when it does not answer in time."""
        if not self.is_ready:
            return None
        answer = asyncio.get_running_loop().create_future()
        self._scrapes.add(answer)
        self._send(GetStats())
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None
        finally:
            self._scrapes.discard(answer)

    async def profile(self, on: bool) -> ProfileResult:
        """Have the workers record what they compute, or stop and write it.

        Raises UnavailableError without an engine, EngineError when it does not answer.
        """
        self.check_ready()
        (number,) = self.new_ids(1)
        answer = asyncio.get_running_loop().create_future()
        self._profiles[number] = answer
        self._send(Profile(on, number))
        try:
            return await asyncio.wait_for(answer, _PROFILE_DEADLINE_S)
        except TimeoutError:
            raise EngineError(f"the engine core did not answer within {_PROFILE_DEADLINE_S:.0f} s") from None
        finally:
            del self._profiles[number]

    def new_ids(self, count: int) -> list[int]:
        """Request ids in ascending order, never used before."""
        return list(itertools.islice(self._counter, count))

    @contextlib.contextmanager
    def open(
        self, requests: list[AddRequest], text: TextOptions, every_step: bool = True
    ) -> Iterator[Stream]:
        """Send `requests`, and read them as one stream; leaving early aborts the rest.

        Without `every_step` the stream wakes its reader once, when all choices have ended.
        """
        self.check_ready()
        stream = Stream([request.request_id for request in requests], every_step)
        try:
            for request in requests:
                self._begin(request, text, stream)
            yield stream
        finally:
            self._abandon(sorted(stream.open))

    def _begin(self, request: AddRequest, text: TextOptions, stream: Stream) -> None:
        arrived_at = self.admission.begin(request.request_id)
        progress = Progress(arrived_at, len(request.prompt_ids) // _BYTES_PER_ID)
        self._choices[request.request_id] = _Choice(stream, progress)
        self._output.add(request, text)
        self._send(request)

    def _abandon(self, request_ids: list[int]) -> None:
        left = [request_id for request_id in request_ids if self._choices.pop(request_id, None)]
        self._output.forget(left)
        if left:
            self._metrics.aborted(len(left))
            self.admission.ended(len(left))
            if self._death is None:
                self._send(Abort(left))

    def _send(self, message: ToCore) -> None:
        # Done at once or an error at once: the send queue has no limit.
        sent = cast("asyncio.Future[None]", self._socket.send(encode(message), zmq.DONTWAIT))
        sent.result()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Whatever ends a task of the link ends the engine for the clients: nobody may hang."""
        try:
            await work
        except Exception as error:
            get_logger().exception("the link to the engine core failed")
            self._die(f"the link to the engine core failed: {error}")

    async def _read(self) -> None:
        while self._death is None:
            try:
                async with asyncio.timeout(_PROBE_AFTER_S):
                    frame = await self._socket.recv()
            except TimeoutError:
                self._probe()
                continue
            self._last_sign = time.monotonic()
            self._receive(self._decoder.decode(frame))

    def _receive(self, message: FromCore) -> None:
        match message:
            case TokenDeltas():
                self._deliver(message)
            case CoreReady():
                self.limits = message
                self._on_ready(message)
                self._ready.set()
            case CoreDead(reason):
                self._die(reason)
            case CoreStats():  # for a scrape, or as the sign of life that `_probe` asked for
                _answer_all(self._scrapes, message)
            case ProfileResult(number):
                answer = self._profiles.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _deliver(self, deltas: TokenDeltas) -> None:
        done = self._output.process(deltas)
        now, choices, metrics = self._last_sign, self._choices, self._metrics
        for first in deltas.first:
            if first.request_id in choices:
                metrics.admitted(first)
        for update in done.updates:
            choice = choices[update.request_id]
            if tokens := len(update.token_ids):
                metrics.advanced(choice.progress, tokens, now)
            choice.stream.put(update, now)
            if update.finished:
                self._end(update, choice, now)
        if done.aborts:
            self._send(Abort(done.aborts))

    def _end(self, update: Update, choice: _Choice, now: float) -> None:
        assert update.reason is not None
        del self._choices[update.request_id]
        self._metrics.finished(choice.progress, update.reason, now)
        self.admission.ended()

    def _probe(self) -> None:
        silence = time.monotonic() - self._last_sign
        if silence > _GIVE_UP_AFTER_S:
            self._die(f"no sign of life from the engine core for {silence:.0f} s")
        elif self._choices:
            self._send(GetStats())
        else:
            self._last_sign = time.monotonic()  # an idle core has nothing to say

    async def _watch_connection(self) -> None:
        while self._death is None:
            await recv_monitor_message(self._monitor)  # only disconnections are monitored
            if self._ready.is_set():
                await asyncio.sleep(_LAST_WORDS_S)
                self._die("the engine core closed its connection")

    def _die(self, reason: str) -> None:
        if self._death is None:
            get_logger().error("the engine is gone: %s", reason)
            self._death = reason
            self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        streams = {choice.stream for choice in self._choices.values()}
        self._metrics.failed(len(self._choices))
        self._output.forget(self._choices)
        self._choices.clear()
        for stream in streams:
            stream.fail(EngineDeadError(reason))
        for answer in self._profiles.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))


def _answer_all(waiting: Iterable["asyncio.Future[CoreStats]"], stats: CoreStats) -> None:
    for answer in waiting:
        if not answer.done():
            answer.set_result(stats)
