"""Which tokens of which requests run in the next step.

One rule: computed tokens catch up with known tokens, under a budget of tokens a step. Whoever
runs comes first, then the queue. There is no prefill phase and no decode phase; a prompt, a
preempted request and a prompt hit in the prefix cache are all "some known tokens to compute".

Steps are handed out before the results of the previous one are in (`MAX_IN_FLIGHT`). A request
in decode is scheduled without knowing its last id, which never leaves the device. Its length
limit is known ahead and never passed; a stop id is seen a step late, and what the later step
drew is dropped.

Workers execute steps in order. So blocks given back while a step in flight still touches them
can serve the next step, and a block is shareable as soon as the step that fills it is certain.

Who asks for the log probabilities of its prompt must have every position of it computed, since
no cache keeps logits. Until that is handed out it hits no cached prefix; its own blocks are
shared like anybody's.

        WAITING --> PREFILLING --> DECODING --> DRAINING --> ENDED
           ^------------+-------------'    preempted; ENDED also from every state, by abort
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from atom.messages.engine import Finished, FinishReason, FirstToken, PromptLogprobs, unpack_ids
from atom.messages.worker import BatchResult, MoreBlocks, NewRow, ScheduledBatch
from engine_core.decode_batch import DecodeBatch
from engine_core.kv_cache_manager import KVCacheManager
from engine_core.request import NO_ROW, Request, State
from engine_core.request_queue import RequestQueue
from engine_core.sampled_tokens import SampledTokens, fits, is_whole
from engine_core.stats import Counters

MAX_IN_FLIGHT = 2


@dataclass(frozen=True)
class Limits:
    """Bounds of a step, and who goes first."""

    max_num_seqs: int
    """Requests that run at a time: the rows of the workers' batch."""
    max_num_batched_tokens: int
    """Tokens computed in one step."""
    policy: str = "fcfs"
    delay_factor: float = 0.0
    """While others run, a new prompt waits this multiple of the last prompt step's time."""


@dataclass(slots=True)
class _Plan:
    """What one `schedule` call has decided so far; preempting a request takes its part out again."""

    chunks: dict[int, tuple[Request, int]] = field(default_factory=dict)
    """Tokens to compute of everybody outside the cohort, by request id."""
    more_blocks: dict[int, MoreBlocks] = field(default_factory=dict)
    new_rows: list[NewRow] = field(default_factory=list)
    preempted: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.chunks.values())


@dataclass(slots=True)
class _Step:
    """A batch in flight: what its result will mean."""

    number: int
    sampled: list[Request]
    """Who sampled a token, in batch order."""
    stop_ids: frozenset[int]
    """Every id that ends any of them."""
    prefilled: list[Request]
    """Those of `sampled` whose known tokens are all computed by this step."""
    ending: list[Request]
    """Those of `sampled` that reach their length limit."""
    wants_prompt_logprobs: dict[int, Request]
    """By row, who gets log probabilities of its prompt; the row may be another's when they come."""
    has_chunks: bool
    sent_at: float
    stale: bool = False
    """Some of `sampled` may have ended since."""


@dataclass(slots=True, frozen=True)
class StepOutcome:
    """What one step's result brought."""

    step: int
    sampled: SampledTokens
    first: list[tuple[Request, FirstToken]]
    finished: list[tuple[Request, Finished]]
    prompt_logprobs: list[tuple[Request, PromptLogprobs]]

    @property
    def has_output(self) -> bool:
        """A step of prompt chunks alone usually brings nothing."""
        return bool(self.sampled.requests or self.prompt_logprobs)


class Scheduler:
    """Owns every live request, the queue, the rows and, through the manager, the KV blocks."""

    def __init__(self, limits: Limits, kv: KVCacheManager, clock: Callable[[], float] = time.monotonic):
        """Raises ValueError for an unknown policy or limits below one."""
        if limits.max_num_seqs < 1 or limits.max_num_batched_tokens < 1:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
        self.requests: dict[int, Request] = {}
        self.counters = Counters()
        self._limits = limits
        self._kv = kv
        self._clock = clock
        self._queue = RequestQueue(limits.policy)
        self._decode_batch = DecodeBatch(kv.block_size)
        self._prefilling: dict[int, Request] = {}
        self._free_rows = list(range(limits.max_num_seqs))[::-1]
        self._in_flight: deque[_Step] = deque()
        self._ended: list[Request] = []  # ended; row and blocks still to be given back
        self._last_step = 0
        self._completed = 0
        self._completed_at = clock()
        self._num_arrivals = 0
        self._prompt_step_s = 0.0
        self._no_room: tuple[Request, int] | None = None  # who did not fit, after how many releases

    @property
    def num_running(self) -> int:
        """Requests with tokens left to schedule that own a row."""
        return len(self._decode_batch) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def num_in_flight(self) -> int:
        """Steps whose result is not in."""
        return len(self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request that fits; its id must not be live."""
        request.arrival = self._num_arrivals
        request.arrived_at = self._clock()
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self._queue.add(request)

    def abort(self, request_id: int) -> None:
        """End a request in whatever state; nothing happens if it has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request)
            self._free_ended()

    def schedule(self) -> ScheduledBatch | None:
        """The next step; None when there is nothing to run or `MAX_IN_FLIGHT` steps are out."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            return None
        plan = _Plan()
        self._extend_decodes(plan)
        self._continue_prefills(plan)
        for request, count in plan.chunks.values():  # from here on nobody is preempted
            self._kv.cache(request.blocks, request.token_ids, request.computed + count)
        if not plan.preempted:
            self._admit_waiting(plan)
        if not plan.chunks and not self._decode_batch:
            return None
        return self._dispatch(plan)

    def update(self, result: BatchResult) -> StepOutcome:
        """Take in what the oldest step in flight drew.

        Raises ValueError when that does not belong to that step.
        """
        if not self._in_flight or self._in_flight[0].number != result.step:
            raise ValueError(f"result of step {result.step} came out of order")
        step = self._in_flight.popleft()
        sampled = SampledTokens(step.sampled, unpack_ids(result.token_ids), result.logprobs)
        _check_fit(step, sampled)
        now = self._clock()
        self._completed = step.number
        self._time_prompts(step, now)
        chunks = _prompt_logprobs_of(step, result.prompt_logprobs) if result.prompt_logprobs else []
        if step.stale:
            alive = [place for place, r in enumerate(step.sampled) if r.state is not State.ENDED]
            sampled = sampled.select(alive)
        for request, token_id in zip(sampled.requests, sampled.token_ids, strict=True):
            request.token_ids.append(token_id)
        self.counters.generated_tokens += len(sampled.token_ids)
        first = _first_tokens(step.prefilled, now)
        finished = self._finish(step, sampled)
        self._free_ended()
        return StepOutcome(step.number, sampled, first, finished, chunks)

    def check_integrity(self) -> None:
        """Raises AssertionError unless queue, cohort, rows and blocks agree."""
        live = self.requests.values()
        holding = [r for r in live if r.state is not State.WAITING] + list(self._ended)
        rows = [request.row for request in holding] + self._free_rows
        assert sorted(rows) == list(range(self._limits.max_num_seqs)), "rows are lost or shared"
        assert len(self._decode_batch) == sum(r.state is State.DECODING for r in live), (
            "cohort and states differ"
        )
        assert len(self._queue) == sum(r.state is State.WAITING for r in live), "queue and states differ"
        assert all(r.state is State.PREFILLING for r in self._prefilling.values())
        assert all(r.state is State.ENDED for r in self._ended)
        self._decode_batch.check_integrity()
        for member in self._decode_batch.requests():
            self._kv.check_covers(member.blocks, self._decode_batch.computed(member))
        self._kv.check_integrity([request.blocks for request in holding])

    # Planning a step

    def _extend_decodes(self, plan: _Plan) -> None:
        """Give a block to each member of the cohort that begins one, and share the one it filled."""
        for request in self._decode_batch.needing_block():
            if request.state is not State.DECODING:
                continue  # preempted a moment ago, for another's block
            computed = self._decode_batch.computed(request)
            # At most one step is in flight, so every id before `computed` is known.
            self._kv.cache(request.blocks, request.token_ids, computed)
            self._extend(request, computed, 1, plan)

    def _continue_prefills(self, plan: _Plan) -> None:
        for request in list(self._prefilling.values()):
            budget = self._budget(plan)
            if budget == 0:
                break
            if request.state is not State.PREFILLING:
                continue
            count = min(len(request.token_ids) - request.computed, budget)
            if self._extend(request, request.computed, count, plan):
                plan.chunks[request.request_id] = request, count

    def _admit_waiting(self, plan: _Plan) -> None:
        budget = self._budget(plan)
        while budget:
            request = self._queue.first()
            if request is None or not self._free_rows or not self._may_be_admitted(request):
                return
            may_hit = request.prompt_logprobs < 0
            cached = self._kv.admit(request.blocks, request.token_ids, may_hit)
            if cached is None:
                self._no_room = request, self._kv.num_frees
                return
            budget -= self._admit(request, cached, budget, plan)

    def _may_be_admitted(self, request: Request) -> bool:
        if request.last_step > self._completed:
            return False  # some of its tokens are still under way
        if self._no_room == (request, self._kv.num_frees):
            return False
        is_new = request.cached_tokens is None
        return not (is_new and self._limits.delay_factor > 0 and self._delays_new_prompts())

    def _delays_new_prompts(self) -> bool:
        waited = self._clock() - self._queue.oldest_arrival()
        return self.num_running > 0 and waited <= self._limits.delay_factor * self._prompt_step_s

    def _admit(self, request: Request, cached: int, budget: int, plan: _Plan) -> int:
        """Start a request whose first `cached` tokens are in its blocks; returns the tokens it computes."""
        self._queue.remove(request)
        count = min(len(request.token_ids) - cached, budget)
        added = self._kv.extend(request.blocks, cached, cached + count)
        assert added is not None, "admitted without room"
        self._kv.cache(request.blocks, request.token_ids, cached + count)
        request.row = self._free_rows.pop()
        request.state = State.PREFILLING
        request.computed = cached
        self._prefilling[request.request_id] = request
        plan.chunks[request.request_id] = request, count
        plan.new_rows.append(_new_row(request, cached))
        if request.cached_tokens is None:
            self._count_admission(request, cached)
        return count

    def _count_admission(self, request: Request, cached: int) -> None:
        """A request runs for the first time."""
        request.cached_tokens = cached
        request.admitted_at = self._clock()
        self.counters.prompt_tokens += request.prompt_length
        if request.prompt_logprobs < 0:
            self.counters.prefix_queries += request.prompt_length
            self.counters.prefix_hits += cached

    def _budget(self, plan: _Plan) -> int:
        # The cohort alone never exceeds it: whoever joins had a token of the same budget before.
        return self._limits.max_num_batched_tokens - len(self._decode_batch) - plan.num_tokens

    def _extend(self, request: Request, start: int, count: int, plan: _Plan) -> bool:
        """Blocks for the next `count` tokens, at the cost of whoever ranks last; False if that is itself."""
        while (added := self._kv.extend(request.blocks, start, start + count)) is None:
            victim = max([*self._decode_batch.requests(), *self._prefilling.values()], key=self._queue.rank)
            self._preempt(victim, plan)
            if victim is request:
                return False
        if added:
            plan.more_blocks[request.request_id] = MoreBlocks(request.row, added)
        return True

    def _preempt(self, request: Request, plan: _Plan) -> None:
        """Back to the queue, to be computed anew; ids under way still count when they arrive."""
        self.counters.preemptions += 1
        self.counters.prefill_preemptions += request.state is State.PREFILLING
        plan.preempted = True
        plan.chunks.pop(request.request_id, None)
        plan.more_blocks.pop(request.request_id, None)
        self._stop_running(request)
        self._free(request)
        request.state = State.WAITING
        self._queue.add(request)

    def _dispatch(self, plan: _Plan) -> ScheduledBatch:
        self._last_step += 1
        decodes, ending = self._decode_batch.advance()
        rows, counts = decodes.rows, []
        sampled, stop_ids = decodes.requests, decodes.stop_ids
        prefilled: list[Request] = []
        wants_prompt_logprobs: dict[int, Request] = {}
        if plan.chunks:
            rows = rows + [request.row for request, _ in plan.chunks.values()]
            counts = [1] * len(decodes.rows) + [count for _, count in plan.chunks.values()]
            wants_prompt_logprobs = {r.row: r for r, _ in plan.chunks.values() if r.prompt_logprobs >= 0}
            prefilled = self._advance_prefills(plan)
            sampled = sampled + prefilled
            stop_ids = stop_ids.union(*{request.stop_ids for request in prefilled})
        for request in prefilled:
            if not self._start_decoding(request):
                ending.append(request)
        for request in ending:
            request.state = State.DRAINING
            request.last_step = self._last_step
        self._count_step(plan, len(prefilled))
        has_chunks, now = bool(plan.chunks), self._clock()
        self._in_flight.append(
            _Step(
                self._last_step, sampled, stop_ids, prefilled, ending, wants_prompt_logprobs, has_chunks, now
            )
        )
        return ScheduledBatch(self._last_step, rows, counts, plan.new_rows, list(plan.more_blocks.values()))

    def _advance_prefills(self, plan: _Plan) -> list[Request]:
        """Count the chunks as computed; returns whom that completes."""
        for request, count in plan.chunks.values():
            request.computed += count
            if request.computed >= request.prompt_length:
                request.prompt_logprobs = -1  # all of them are certain to come
        prefilled = [r for r, _ in plan.chunks.values() if r.computed == len(r.token_ids)]
        for request in prefilled:
            del self._prefilling[request.request_id]
        return prefilled

    def _start_decoding(self, request: Request) -> bool:
        """Join the cohort; False when the token that is being drawn is already the last."""
        steps = request.max_tokens - request.num_generated - 1
        if steps == 0:
            return False
        request.state = State.DECODING
        self._decode_batch.add(request, steps)
        return True

    def _count_step(self, plan: _Plan, num_prefilled: int) -> None:
        self.counters.steps += 1
        self.counters.chunked_prefills += len(plan.chunks) - num_prefilled
        self.counters.overlapped_steps += bool(self._in_flight)

    # Taking in results

    def _finish(self, step: _Step, sampled: SampledTokens) -> list[tuple[Request, Finished]]:
        """End everybody whom this step's ids or length end."""
        finished = []
        if not step.stop_ids.isdisjoint(sampled.token_ids):
            for request, token_id in zip(sampled.requests, sampled.token_ids, strict=True):
                if token_id in request.stop_ids:
                    reason = request.stop_reason(token_id)
                    finished.append((request, Finished(request.request_id, reason, token_id)))
        by_stop = {id(request) for request, _ in finished}
        for request in step.ending:
            if request.state is not State.ENDED and id(request) not in by_stop:
                finished.append((request, Finished(request.request_id, FinishReason.MAX_TOKENS)))
        for request, _ in finished:
            self._end(request)
        return finished

    def _end(self, request: Request) -> None:
        del self.requests[request.request_id]
        if request.state is State.WAITING:
            self._queue.remove(request)
        else:
            self._stop_running(request)
            self._ended.append(request)
        request.state = State.ENDED
        for step in self._in_flight:
            step.stale |= step.number <= request.last_step

    def _stop_running(self, request: Request) -> None:
        """Take a request that owns a row out of the schedule; later steps will not name it."""
        if request.state is State.DECODING:
            self._decode_batch.remove(request)
        elif request.state is State.PREFILLING:
            del self._prefilling[request.request_id]
        if request.state is not State.DRAINING:
            request.last_step = self._last_step

    def _free_ended(self) -> None:
        """Take row and blocks of ended requests that no step in flight touches."""
        leaving, self._ended = self._ended, []
        for request in leaving:
            if request.last_step <= self._completed:
                self._free(request)
            else:
                self._ended.append(request)

    def _free(self, request: Request) -> None:
        known_and_computed = min(request.computed, len(request.token_ids))
        self._kv.cache(request.blocks, request.token_ids, known_and_computed)
        self._kv.free(request.blocks)
        self._free_rows.append(request.row)
        request.row = NO_ROW
        request.computed = 0

    def _time_prompts(self, step: _Step, now: float) -> None:
        if step.has_chunks:
            # It began when it was sent, or when the step before it was done.
            self._prompt_step_s = now - max(step.sent_at, self._completed_at)
        self._completed_at = now


def _new_row(request: Request, computed: int) -> NewRow:
    return NewRow(
        request.row,
        request.token_ids.tobytes(),
        computed,
        [list(table) for table in request.blocks.tables],
        request.sampling,
        request.prompt_length,
        request.prompt_logprobs,
    )


def _check_fit(step: _Step, sampled: SampledTokens) -> None:
    """Raises ValueError when what came is not what the step's rows draw."""
    drawn, expected = len(sampled.token_ids), len(step.sampled)
    if drawn != expected:
        raise ValueError(f"step {step.number} gave {drawn} tokens for {expected} rows")
    if sampled.logprobs is not None and not fits(sampled.logprobs, expected):
        raise ValueError(f"step {step.number} gave log probabilities that do not fit its sampled tokens")


def _prompt_logprobs_of(step: _Step, chunks: list[PromptLogprobs]) -> list[tuple[Request, PromptLogprobs]]:
    """The chunks of requests that have not ended, under their ids.

    Raises ValueError for a chunk that nobody asked for.
    """
    owned = []
    for chunk in chunks:
        request = step.wants_prompt_logprobs.get(chunk.owner)
        if request is None or not is_whole(chunk.table):
            raise ValueError(f"step {step.number} gave prompt log probabilities that fit no row")
        if request.state is not State.ENDED:
            owned.append((request, PromptLogprobs(request.request_id, chunk.start, chunk.table)))
    return owned


def _first_tokens(prefilled: list[Request], now: float) -> list[tuple[Request, FirstToken]]:
    """Of the requests that were computed to their end: who has got its very first token."""
    return [
        (
            request,
            FirstToken(
                request.request_id,
                request.cached_tokens or 0,
                queued_s=request.admitted_at - request.arrived_at,
                prefill_s=now - request.admitted_at,
            ),
        )
        for request in prefilled
        if request.state is not State.ENDED and request.num_generated == 1
    ]
