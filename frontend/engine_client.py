"""The link to one engine core, for all requests of this process.

One task receives the tokens of each step, detokenizes them and wakes each stream at most once a
step. A stream keeps at most one pending update for each sequence: a slow reader gets merged text
and delays no other request.
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

# After this silence the core is sent a GetStats. The limit is far longer: on a CPU one step of a
# large model may take minutes, and the supervisor detects dead processes by itself.
_PROBE_AFTER_S = 30.0
_GIVE_UP_AFTER_S = 1800.0
# Longer than the core's own deadline, whose error message is more specific.
_PROFILE_DEADLINE_S = 330.0
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 30_000
# How long the core's last message may arrive after the end of its connection.
_FINAL_MESSAGE_S = 0.3
_ID_BITS = 40
_BYTES_PER_ID = 4


class Stream:
    """The updates of one HTTP request, over all its sequences."""

    def __init__(self, request_ids: list[int], every_step: bool):
        self.open = set(request_ids)
        """Ids of the sequences that have not ended."""
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self._every_step = every_step
        self._pending: dict[int, Update] = {}
        self._error: ApiError | None = None
        self._wake = asyncio.Event()

    def put(self, update: Update, now: float) -> None:
        """Add an update, and wake the reader if it waits for every step or all sequences have ended."""
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
        """End the stream; the reader gets the pending updates and then `error`."""
        self._error = error
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[list[Update]]:
        return self

    async def __anext__(self) -> list[Update]:
        """At most one update for each sequence. Raises the error given to `fail`."""
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
class _Sequence:
    """One sequence that the core generates."""

    stream: Stream
    progress: Progress


class EngineClient:
    """Sends requests to the core at `endpoint` and distributes its tokens to streams.

    `index` is this frontend's number, unique among the frontends of the core; `capacity` bounds the
    sequences in progress, through `admission`. `on_ready` is called with the core's limits once it
    is ready.
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
        """The core's limits; None until it is ready."""
        self.admission = Admission(capacity, self.__len__)
        self._endpoint = endpoint
        self._index = index
        self._output = output
        self._metrics = metrics
        self._on_ready = on_ready
        self._counter = itertools.count(index << _ID_BITS)
        self._sequences: dict[int, _Sequence] = {}
        self._scrapes: set[asyncio.Future[CoreStats]] = set()
        self._profiles: dict[int, asyncio.Future[ProfileResult]] = {}
        self._decoder = Decoder[FromCore](FromCore)
        self._ready = asyncio.Event()
        self._death: str | None = None
        self._last_received = time.monotonic()

    def __len__(self) -> int:
        """Number of sequences in progress."""
        return len(self._sequences)

    async def __aenter__(self) -> "EngineClient":
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # No message may be dropped; the number in flight is bounded by the running requests.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._endpoint)
        self._send(Hello(self._index))
        self._tasks = [
            asyncio.create_task(self._fail_on_error(self._read()), name="core-reader"),
            asyncio.create_task(self._fail_on_error(self._watch_connection()), name="core-watch"),
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
        """Raises UnavailableError while the engine cannot generate."""
        if self._death is not None:
            raise UnavailableError(f"the engine is gone: {self._death}", code="engine_dead")
        if not self._ready.is_set():
            raise UnavailableError("the engine is still starting; try again shortly")

    @property
    def is_ready(self) -> bool:
        """Whether the engine can generate."""
        return self._ready.is_set() and self._death is None

    async def wait_ready(self) -> None:
        """Wait until the core is ready; the caller bounds the wait."""
        await self._ready.wait()

    async def stats(self, timeout_s: float) -> CoreStats | None:
        """The core's current counters; None when it does not respond in time."""
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
        """Start recording profiler traces on all workers, or stop and write them.

        Raises UnavailableError without an engine, EngineError when it does not respond.
        """
        self.check_ready()
        (number,) = self.new_ids(1)
        answer = asyncio.get_running_loop().create_future()
        self._profiles[number] = answer
        self._send(Profile(on, number))
        try:
            return await asyncio.wait_for(answer, _PROFILE_DEADLINE_S)
        except TimeoutError:
            raise EngineError(f"the engine core did not respond within {_PROFILE_DEADLINE_S:.0f} s") from None
        finally:
            del self._profiles[number]

    def new_ids(self, count: int) -> list[int]:
        """New unique request ids, ascending."""
        return list(itertools.islice(self._counter, count))

    @contextlib.contextmanager
    def open(
        self, requests: list[AddRequest], text: TextOptions, every_step: bool = True
    ) -> Iterator[Stream]:
        """Send `requests` and read their results as one stream; on exit unfinished ones are aborted.

        Without `every_step` the stream wakes its reader once, when all sequences have ended.
        """
        self.check_ready()
        stream = Stream([one for request in requests for one in request.request_ids], every_step)
        try:
            for request in requests:
                self._submit(request, text, stream)
            yield stream
        finally:
            self._abort(sorted(stream.open))

    def _submit(self, request: AddRequest, text: TextOptions, stream: Stream) -> None:
        num_prompt_tokens = len(request.prompt_ids) // _BYTES_PER_ID
        for request_id in request.request_ids:
            progress = Progress(self.admission.begin(request_id), num_prompt_tokens)
            self._sequences[request_id] = _Sequence(stream, progress)
        self._output.add(request, text)
        self._send(request)

    def _abort(self, request_ids: list[int]) -> None:
        running = [request_id for request_id in request_ids if self._sequences.pop(request_id, None)]
        self._output.forget(running)
        if running:
            self._metrics.aborted(len(running))
            self.admission.ended(len(running))
            if self._death is None:
                self._send(Abort(running))

    def _send(self, message: ToCore) -> None:
        # Never waits: the send queue has no limit.
        sent = cast("asyncio.Future[None]", self._socket.send(encode(message), zmq.DONTWAIT))
        sent.result()

    async def _fail_on_error(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task of the link; an error in it fails all streams, so that no client hangs."""
        try:
            await work
        except Exception as error:
            get_logger().exception("the link to the engine core failed")
            self._mark_dead(f"the link to the engine core failed: {error}")

    async def _read(self) -> None:
        while self._death is None:
            try:
                async with asyncio.timeout(_PROBE_AFTER_S):
                    frame = await self._socket.recv()
            except TimeoutError:
                self._probe()
                continue
            self._last_received = time.monotonic()
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
                self._mark_dead(reason)
            case CoreStats():  # of a scrape, or of a `_probe`
                _resolve(self._scrapes, message)
            case ProfileResult(number):
                answer = self._profiles.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _deliver(self, deltas: TokenDeltas) -> None:
        done = self._output.process(deltas)
        now, sequences, metrics = self._last_received, self._sequences, self._metrics
        for first in deltas.first:
            if first.request_id in sequences:
                metrics.admitted(first)
        for update in done.updates:
            sequence = sequences[update.request_id]
            if tokens := len(update.token_ids):
                metrics.advanced(sequence.progress, tokens, now)
            sequence.stream.put(update, now)
            if update.finished:
                self._finish(update, sequence, now)
        if done.aborts:
            self._send(Abort(done.aborts))

    def _finish(self, update: Update, sequence: _Sequence, now: float) -> None:
        assert update.reason is not None
        del self._sequences[update.request_id]
        self._metrics.finished(sequence.progress, update.reason, now)
        self.admission.ended()

    def _probe(self) -> None:
        silence = time.monotonic() - self._last_received
        if silence > _GIVE_UP_AFTER_S:
            self._mark_dead(f"no sign of life from the engine core for {silence:.0f} s")
        elif self._sequences:
            self._send(GetStats())
        else:
            self._last_received = time.monotonic()  # an idle core sends nothing

    async def _watch_connection(self) -> None:
        while self._death is None:
            await recv_monitor_message(self._monitor)  # only disconnections are monitored
            if self._ready.is_set():
                await asyncio.sleep(_FINAL_MESSAGE_S)
                self._mark_dead("the engine core closed its connection")

    def _mark_dead(self, reason: str) -> None:
        if self._death is None:
            get_logger().error("the engine is gone: %s", reason)
            self._death = reason
            self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        streams = {sequence.stream for sequence in self._sequences.values()}
        self._metrics.failed(len(self._sequences))
        self._output.forget(self._sequences)
        self._sequences.clear()
        for stream in streams:
            stream.fail(EngineDeadError(reason))
        for answer in self._profiles.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))


def _resolve(waiting: Iterable["asyncio.Future[CoreStats]"], stats: CoreStats) -> None:
    for answer in waiting:
        if not answer.done():
            answer.set_result(stats)
