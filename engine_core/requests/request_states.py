"""The unfinished requests of a scheduler, and every transition between their states.

        WAITING --> PREFILLING --> DECODING --> DRAINING --> ENDED
           ^------------+-------------'    preempted, or HELD for a time before; every state --> ENDED by an
           '--> HELD                       abort or a failure

A request that ends while steps in flight still use its row and blocks keeps both until the last of
these steps is done: the workers will write to them.
"""

import math
from collections import deque
from collections.abc import Iterator

from engine_core.batch.decode_batch import DecodeBatch
from engine_core.batch.draft_batch import DraftBatch
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.requests.request import NEVER_LATE, NO_ROW, Request, State
from engine_core.requests.request_queue import RequestQueue
from engine_core.step import Step


class RequestStates:
    """Requests by state, the free rows of the workers' batch, and the steps in flight."""

    def __init__(
        self, kv: KVCacheManager, queue: RequestQueue, decode_batch: DecodeBatch | DraftBatch, num_rows: int
    ):
        self.requests: dict[int, Request] = {}
        """All that have not ended, by id."""
        self.queue = queue
        """The waiting ones."""
        self.held: dict[int, tuple[Request, float]] = {}
        """Those that were late for a step or wait for a KV tier, and when they return to the queue.

        Infinity: once a grammar that the workers have lost is loaded again.
        """
        self.prefilling: dict[int, Request] = {}
        self.decode_batch = decode_batch
        """The decoding ones."""
        self.free_rows = list(range(num_rows))[::-1]
        self.in_flight: deque[Step] = deque()
        """Steps without a result, oldest first."""
        self.last_step = 0
        """Number of the last scheduled step."""
        self.last_completed = 0
        """Number of the last step whose result has been processed."""
        self.ended: list[Request] = []
        """Ended requests whose row and blocks are not freed yet."""
        self._kv = kv
        self._num_rows = num_rows

    def add(self, request: Request) -> None:
        """Put a new request in the queue."""
        self.requests[request.request_id] = request
        self.queue.add(request)

    def admit(self, request: Request) -> None:
        """Give a waiting request a row; its blocks are allocated already."""
        self.queue.remove(request)
        request.row = self.free_rows.pop()
        request.state = State.PREFILLING
        self.prefilling[request.request_id] = request

    def finish_prefill(self, request: Request) -> bool:
        """Add a request to the decode batch; False when this step samples its last token already."""
        del self.prefilling[request.request_id]
        if request.num_computed_tokens + 1 == request.max_length:
            return False
        request.state = State.DECODING
        self.decode_batch.add(request)
        return True

    def drain(self, request: Request) -> None:
        """Leave a request out of further steps: its last tokens are in flight."""
        request.state = State.DRAINING
        request.last_step = self.last_step

    def return_to_queue(self, request: Request) -> None:
        """Free row and blocks of a request, to recompute it.

        Steps in flight still write to the blocks. Workers execute steps in order, so a later step that
        uses them again writes after these.
        """
        self._stop_running(request)
        self._free(request)
        request.state = State.WAITING
        self.queue.add(request)

    def hold(self, request: Request, until: float) -> None:
        """Free row and blocks of a request that was late, and keep it out of the queue until then.

        What it samples in steps in flight is dropped.
        """
        if request.state is not State.HELD:
            request.discarded_until = self.last_step
            self.mark_stale(self.last_step)
            if request.state is State.WAITING:
                self.queue.remove(request)  # preempted since
            else:
                self._stop_running(request)
                self._free(request)
            request.state = State.HELD
        self.held[request.request_id] = request, until

    def hold_until_loaded(self, request: Request) -> None:
        """Hold a request whose grammar the workers have lost; `release_loaded` ends this."""
        request.late = NEVER_LATE
        self.hold(request, math.inf)

    def release_loaded(self, request: Request) -> None:
        """Let the next `release` return a request to the queue: its grammar is loaded again."""
        if self.held.get(request.request_id) == (request, math.inf):
            self.held[request.request_id] = request, -math.inf

    def wait_for_tier(self, request: Request, until: float) -> None:
        """Keep a waiting request out of the queue while its blocks are loaded, until then at most."""
        self.queue.remove(request)
        request.state = State.HELD
        self.held[request.request_id] = request, until

    def end_wait(self, request: Request, until: float) -> None:
        """Return a request to the queue that waits for a tier until then, unless it has gone on since."""
        if self.held.get(request.request_id) == (request, until):
            del self.held[request.request_id]
            request.state = State.WAITING
            self.queue.add(request)

    def release(self, now: float) -> None:
        """Return the held requests to the queue whose time has come."""
        for request in [request for request, until in self.held.values() if until <= now]:
            del self.held[request.request_id]
            request.state = State.WAITING
            self.queue.add(request)

    def end(self, request: Request) -> None:
        """End a request of which no further token is wanted; `free_ended` frees what it holds."""
        del self.requests[request.request_id]
        self.queue.charge(request, request.num_generated)  # also where a frontend has found a stop string
        self._kv.leave_peer(request.blocks)
        if request.state is State.WAITING:
            self.queue.remove(request)
        elif request.state is State.HELD:
            del self.held[request.request_id]
        else:
            self._stop_running(request)
            self.ended.append(request)
        request.state = State.ENDED
        self.mark_stale(request.last_step)

    def mark_stale(self, last_step: int) -> None:
        """Tokens of some requests must be dropped from the results of the steps up to this one."""
        for step in self.in_flight:
            step.is_stale |= step.number <= last_step

    def free_ended(self) -> None:
        """Free row and blocks of ended requests that no step in flight uses."""
        if not self.ended:
            return
        ended = self.ended
        self.ended = []
        for request in ended:
            if request.last_step <= self.last_completed:
                self._free(request)
            else:
                self.ended.append(request)

    def check_integrity(self) -> Iterator[None]:
        """Raises AssertionError unless queue, decode batch, rows and blocks are consistent.

        Yields at intervals; the caller may do the rest later, if nothing has changed.
        """
        requests = self.requests.values()
        without_row = (State.WAITING, State.HELD)
        with_row = [r for r in requests if r.state not in without_row] + self.ended
        rows = [request.row for request in with_row] + self.free_rows
        assert sorted(rows) == list(range(self._num_rows)), "rows are lost or shared"
        decoding = sum(r.state is State.DECODING for r in requests)
        assert len(self.decode_batch) == decoding, "decode batch and states differ"
        waiting = sum(r.state is State.WAITING for r in requests)
        assert len(self.queue) == waiting, "queue and states differ"
        assert len(self.held) == sum(r.state is State.HELD for r in requests), "held ones and states differ"
        assert all(r.state is State.PREFILLING for r in self.prefilling.values())
        assert all(r.state is State.ENDED for r in self.ended)
        if isinstance(self.decode_batch, DraftBatch):
            self.decode_batch.check_integrity(self.in_flight)
        else:
            self.decode_batch.check_integrity()
        for request in self.decode_batch.requests():
            self._kv.check_covers(request.blocks, self.decode_batch.num_covered(request))
        yield
        yield from self._kv.check_integrity([request.blocks for request in with_row])

    def _stop_running(self, request: Request) -> None:
        """Schedule no further step of a request that has a row."""
        if request.state is State.DECODING:
            self.decode_batch.remove(request)
        elif request.state is State.PREFILLING:
            del self.prefilling[request.request_id]
        if request.state is not State.DRAINING:
            request.last_step = self.last_step

    def _free(self, request: Request) -> None:
        """Free row and blocks; the blocks stay cached."""
        if request.is_cacheable:
            # Ids that are still on the device cannot be hashed.
            num_hashable = min(request.num_computed_tokens, request.num_tokens)
            self._kv.cache(request.blocks, num_hashable, self.last_step)
        self._kv.free(request.blocks)
        self.free_rows.append(request.row)
        request.row = NO_ROW
        request.num_computed_tokens = 0
