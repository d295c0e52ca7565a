"""Looks at the server once a second, and tells the open status pages.

A page gets the whole state first, then a tick a second. All pages get the same bytes. A page that reads
too slowly for a tick gets the whole state instead of the ticks that it has missed, so nothing waits for it
and nothing is kept for it.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator

import msgspec

from atom.shared.messages.launch import FrontendLaunch
from atom.shared.utils.logger import get_logger
from frontend.engine_client.client import EngineClient
from frontend.errors import RequestError, UnavailableError
from frontend.http.lifecycle import Lifecycle
from frontend.metrics.metrics import RunningRequest
from frontend.metrics.shared_metrics import SharedMetrics
from frontend.status.events import EventLog
from frontend.status.history import RANGES, History
from frontend.status.layout import layout_of
from frontend.status.memory import MemoryWatch
from frontend.status.ranks import Ranks
from frontend.status.records import Event, RangeHistory, RequestRow, State, Tick

__all__ = ["MAX_LISTENERS", "StatusFeed"]

MAX_LISTENERS = 64
"""Open pages of one frontend."""
_INTERVAL_S = 1.0
_STATS_DEADLINE_S = 0.5
_TOTALS_DEADLINE_S = 5.0
_FIRST_TICK_S = 5.0
_EVENTS = 200
_STORED_PREFIX = "resp_"
_SHOWN_OF_HIDDEN = 12  # characters
_encode = msgspec.json.Encoder().encode


class StatusFeed:
    """The states of the last seconds; `run` fills it."""

    def __init__(
        self,
        launch: FrontendLaunch,
        model: str,
        client: EngineClient,
        metrics: SharedMetrics,
        lifecycle: Lifecycle,
    ):
        """`model` is the name in the API."""
        self.num_listeners = 0
        self._layout = layout_of(launch, model)
        self._started_at = launch.started_at or time.monotonic()
        self._client = client
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._ranks = Ranks(client)
        self._log = EventLog()
        self._memory = MemoryWatch(has_gpus=launch.config.device.device == "cuda")
        self._hides_stored = launch.server.max_stored_response_bytes > 0 and launch.num_frontends == 1
        self._history = History()
        self._events: deque[Event] = deque(maxlen=_EVENTS)
        self._number = 0  # of the last tick
        self._tick: Tick | None = None
        self._frame = b""
        self._state = b""  # at this tick; empty until it is wanted
        self._next = asyncio.Event()
        self._is_closed = False

    async def run(self) -> None:
        """Look at the server every second, until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        problem = ""
        while True:
            try:
                await self._look()
                problem = ""
            except Exception as error:  # the page is not worth a server
                if problem != (problem := str(error)):
                    get_logger().error("the status page does not change: %s", error, exc_info=True)
            due = max(due + _INTERVAL_S, loop.time())
            await asyncio.sleep(due - loop.time())

    def open(self) -> None:
        """Take pages again after `close`."""
        self._is_closed = False

    def close(self) -> None:
        """End the streams of all pages."""
        self._is_closed = True
        self._wake()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A place among the listeners for the block. Raises UnavailableError when all are taken."""
        if self.num_listeners >= MAX_LISTENERS:
            raise UnavailableError(f"{MAX_LISTENERS} status pages are open already: close one")
        self.num_listeners += 1
        try:
            yield
        finally:
            self.num_listeners -= 1

    async def state(self) -> bytes:
        """A State as JSON. Raises UnavailableError where there is none in time."""
        try:
            async with asyncio.timeout(_FIRST_TICK_S):
                while self._tick is None:
                    await self._next.wait()
        except TimeoutError:
            raise UnavailableError(
                "the status is not known yet; the server's log may have the reason"
            ) from None
        if not self._state:
            points = self._history.points("5m")
            self._state = _encode(State(self._layout, self._tick, points, list(self._events)))
        return self._state

    def history(self, name: str) -> bytes:
        """A RangeHistory as JSON. Raises RequestError (404) for a range that is not kept."""
        if name not in RANGES:
            ranges = ", ".join(RANGES)
            raise RequestError(f"there is no range {name!r:.50}: use one of {ranges}", "range", status=404)
        return _encode(RangeHistory(name, RANGES[name], self._history.points(name)))

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events until `close`: `state`, then `tick` about every second."""
        shown = 0
        while not self._is_closed:
            number = self._number
            if number == shown:
                await self._next.wait()
                continue
            if shown and number == shown + 1:
                yield self._frame
            else:
                yield b"event: state\ndata: %b\n\n" % await self.state()
            shown = number

    async def _look(self) -> None:
        stats, totals = await asyncio.gather(
            self._client.control.stats(_STATS_DEADLINE_S),
            self._metrics.totals(_TOTALS_DEADLINE_S, publish=False),
        )
        now = time.monotonic()
        at = time.time()
        ranks = self._ranks.read(stats, now)
        events = self._log.changes(at, ranks, totals.metrics)
        metrics = totals.metrics
        point = self._history.add(at, ranks, metrics)
        self._events.extend(events)
        limits = self._client.engines.limits
        finished: Counter[str] = Counter()
        for engine in metrics.engines.values():
            finished.update(engine.finish_reasons)
        self._publish(
            Tick(
                point=point,
                uptime=now - self._started_at,
                stopping=self._lifecycle.is_draining,
                max_model_len=None if limits is None else limits.max_model_len,
                ranks=ranks,
                requests=[self._row(request, now) for request in totals.oldest],
                num_requests=totals.live,
                finished=finished,
                refused=metrics.refused,
                responses=metrics.responses,
                memory=self._memory.latest(),
                events=events,
            )
        )

    def _row(self, request: RunningRequest, now: float) -> RequestRow:
        # Who knows the id of a stored response can read it, with the same key: its client alone shall.
        is_hidden = self._hides_stored and request.name.startswith(_STORED_PREFIX)
        return RequestRow(
            id=f"{request.name[:_SHOWN_OF_HIDDEN]}…" if is_hidden else request.name,
            rank=request.rank,
            prompt_tokens=request.prompt_tokens,
            tokens=request.tokens,
            age=now - request.arrived_at,
            queue=request.queue_s,
            rate=request.tokens_per_second,
            is_hidden=is_hidden,
        )

    def _publish(self, tick: Tick) -> None:
        self._tick = tick
        self._state = b""
        self._frame = b"event: tick\ndata: %b\n\n" % _encode(tick) if self.num_listeners else b""
        self._number += 1
        self._wake()

    def _wake(self) -> None:
        waited = self._next
        self._next = asyncio.Event()
        waited.set()
