"""The link to one engine core, for all requests of this process.

One task receives the tokens of each step, detokenizes them and wakes each stream at most once a
step. A stream keeps at most one pending update for each sequence: a slow reader gets merged text
and delays no other request.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from atom.messages.engine import (
    Abort,
    AddRequest,
    CoreDead,
    CoreReady,
    CoreStats,
    FromCore,
    GetStats,
    TokenDeltas,
)
from atom.messages.profile import Profile, ProfileResult
from atom.utils.liveness import PeerMonitor, beat_interval
from atom.utils.logger import get_logger
from frontend.admission import Admission
from frontend.core_link import CoreLink, LinkState
from frontend.errors import ApiError, EngineDeadError, EngineError, UnavailableError
from frontend.metrics import Metrics, Progress
from frontend.output_processor import OutputProcessor, TextOptions, Update

__all__ = ["EngineClient", "Stream"]

# Longer than the core's own deadline, whose error message is more specific.
_PROFILE_DEADLINE_S = 330.0
# How long the core's last message may arrive after the end of its connection.
_FINAL_MESSAGE_S = 0.3
# Between the end of a connection and the next one.
_RECONNECT_S = 1.0
# Longest time without a turn for other tasks while messages wait.
_YIELD_S = 0.01
_CORE = "the engine core"
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

    While the core is silent, running streams wait; after `hang_timeout` they fail and the client
    connects again. So it does after every end of the connection.
    """

    def __init__(
        self,
        endpoint: str,
        index: int,
        output: OutputProcessor,
        metrics: Metrics,
        capacity: int,
        on_ready: Callable[[CoreReady], None] = lambda ready: None,
        hang_timeout: float = 60.0,
    ):
        self.admission = Admission(capacity, self.__len__)
        self._context = zmq.asyncio.Context()
        self._link = CoreLink(self._context, endpoint, index)
        self._hang_timeout_s = hang_timeout
        self._output = output
        self._metrics = metrics
        self._on_ready = on_ready
        self._counter = itertools.count(index << _ID_BITS)
        self._sequences: dict[int, _Sequence] = {}
        self._scrapes: set[asyncio.Future[CoreStats]] = set()
        self._profiles: dict[int, asyncio.Future[ProfileResult]] = {}
        self._ready = asyncio.Event()
        self._received_at = 0.0
        self._core_monitor = PeerMonitor(hang_timeout)

    def __len__(self) -> int:
        """Number of sequences in progress."""
        return len(self._sequences)

    async def __aenter__(self) -> "EngineClient":
        self._link.connect()
        self._task = asyncio.create_task(self._run(), name="core-link")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all("the server is stopping")
        self._link.close()
        self._context.term()

    @property
    def limits(self) -> CoreReady | None:
        """The core's limits; None until it was ready for the first time."""
        return self._link.limits

    def check_ready(self) -> None:
        """Raises UnavailableError while the engine cannot generate."""
        self._link.check_ready()

    @property
    def is_ready(self) -> bool:
        """Whether the engine can generate."""
        return self._link.is_ready

    async def wait_ready(self) -> None:
        """Wait until the core is ready; the caller bounds the wait."""
        await self._ready.wait()

    async def stats(self, timeout_s: float) -> CoreStats | None:
        """The core's current counters; None when it does not respond in time."""
        if not self.is_ready:
            return None
        answer = asyncio.get_running_loop().create_future()
        self._scrapes.add(answer)
        self._link.send(GetStats())
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
        self._link.send(Profile(on, number))
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

        Without `every_step` the stream wakes its reader once, when all sequences have ended. If the
        engine is not ready any more, the stream fails at once.
        """
        stream = Stream([one for request in requests for one in request.request_ids], every_step)
        try:
            try:
                self.check_ready()
            except UnavailableError as error:
                self._metrics.failed(len(stream.open))
                stream.fail(error)
            else:
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
        self._link.send(request)

    def _abort(self, request_ids: list[int]) -> None:
        running = [request_id for request_id in request_ids if self._sequences.pop(request_id, None)]
        self._output.remove(running)
        if running:
            self._metrics.aborted(len(running))
            self.admission.ended(len(running))
            self._link.send(Abort(running))

    async def _run(self) -> None:
        """Keep a connection to the core: the end of one fails its requests and opens the next."""
        try:
            while True:
                reason = await self._serve_connection()
                get_logger().error("the connection to the engine core has ended: %s", reason)
                self._link.mark_dead(reason)
                self._link.close()
                self._fail_all(reason)
                await asyncio.sleep(_RECONNECT_S)
                self._link.connect()
        except asyncio.CancelledError:
            raise
        except BaseException:  # streams would wait for ever: end the process, and so the server
            get_logger().critical("the frontend cannot recover its link to the engine core", exc_info=True)
            os._exit(1)

    async def _serve_connection(self) -> str:
        """Process messages until the connection ends; returns the reason."""
        self._core_monitor = PeerMonitor(self._hang_timeout_s)
        work = (self._read(), self._wait_until_closed(), self._watch_silence())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(_reason(task) for task in tasks if task.done())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> str:
        yielded_at = time.monotonic()
        while True:
            message = self._link.decode(await self._link.socket.recv())
            self._received_at = time.monotonic()
            self._core_monitor.seen(_CORE)
            if isinstance(message, CoreDead):
                return message.reason
            self._process(message)
            if time.monotonic() - yielded_at > _YIELD_S:  # `recv` does not yield while messages wait
                await asyncio.sleep(0)
                yielded_at = time.monotonic()

    async def _wait_until_closed(self) -> str:
        monitor = self._link.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            await recv_monitor_message(monitor)
            await asyncio.sleep(_FINAL_MESSAGE_S)
        finally:
            self._link.socket.disable_monitor()
            monitor.close(0)
        return f"{_CORE} closed its connection"

    async def _watch_silence(self) -> str:
        """Ask the core for its counters about every second: a core that runs responds at once."""
        while not (reason := self._core_monitor.hung()):
            await asyncio.sleep(beat_interval(self._hang_timeout_s))
            if self._link.state is not LinkState.CONNECTING:
                self._link.send(GetStats())
                self._core_monitor.update()
                self._link.silence = self._core_monitor.unresponsive
        return reason

    def _process(self, message: FromCore) -> None:
        match message:
            case TokenDeltas():
                self._deliver(message)
            case CoreReady():
                self._on_ready(message)
                self._ready.set()
            case CoreStats():
                _resolve(self._scrapes, message)
            case ProfileResult(number):
                answer = self._profiles.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _deliver(self, deltas: TokenDeltas) -> None:
        done = self._output.process(deltas)
        now, sequences, metrics = self._received_at, self._sequences, self._metrics
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
            self._link.send(Abort(done.aborts))

    def _finish(self, update: Update, sequence: _Sequence, now: float) -> None:
        assert update.reason is not None
        del self._sequences[update.request_id]
        self._metrics.finished(sequence.progress, update.reason, now)
        self.admission.ended()

    def _fail_all(self, reason: str) -> None:
        streams = {sequence.stream for sequence in self._sequences.values()}
        self._metrics.failed(len(self._sequences))
        self._output.remove(self._sequences)
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


def _reason(task: "asyncio.Task[str]") -> str:
    """Why a task of a connection ended; an error is logged, of whatever type.

    A panic of a native extension is a BaseException, but no Exception.
    """
    error = task.exception()
    if error is None:
        return task.result()
    get_logger().error("processing the engine core's messages failed", exc_info=error)
    return "an internal error of the frontend; the server's log has the details"
