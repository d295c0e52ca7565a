"""Decides which tokens of which requests run in the next step.

A request has `num_tokens` tokens with known ids, and the KV of the first `num_computed_tokens`. A step
computes the tokens in between, as far as its token budget goes: those of running requests in scheduling
order, then those of waiting ones. Long prompts, cached prefixes, and requests that resume after a
preemption differ only in how many tokens are left to compute.

Up to `MAX_IN_FLIGHT` steps are scheduled before the results of the first are in. A decoding request
is therefore scheduled without its last id, which stays on the device. Its length limit is known in
advance and never exceeded. A stop id is seen one step late, and the token that the later step samples
is dropped.

Workers execute steps in order. So blocks that are freed while a step in flight still uses them can
serve the next step, and a block can be shared as soon as the step that fills it is scheduled. Should
that step fail, requests that share such a block are recomputed (`engine_core.results`).

A request that wants the log probabilities of its prompt needs all of it computed, since no cache
keeps logits: it uses no cached prefix until its last prompt chunk is scheduled. Other requests may
share its blocks.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from atom.shared.messages.kv_tiers import BlocksCopied, BlocksFound
from atom.shared.messages.worker import BatchResult, MoreBlocks, NewRow, ScheduledBatch
from engine_core.batch.batch_bytes import MAX_NEW_ROWS_BYTES, check_frames, new_row_bytes
from engine_core.batch.decode_batch import DecodeBatch, union_of_stop_ids
from engine_core.batch.draft_batch import DraftBatch
from engine_core.batch.draft_width import DraftWidth
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.kv_tiers.block_questions import Question
from engine_core.kv_tiers.tier_copies import Load
from engine_core.requests.fair_share import FairShareQueue
from engine_core.requests.images import ImageRegistry, row_images
from engine_core.requests.iteration_quota import IDS_PER_UNIT, UNITS_PER_ADMISSION
from engine_core.requests.request import Request, State
from engine_core.requests.request_queue import RequestQueue
from engine_core.requests.request_states import RequestStates
from engine_core.results import ResultProcessor
from engine_core.stats import Counters
from engine_core.step import Step, StepOutcome, StepPlan

MAX_IN_FLIGHT = 2
_BEGUN = 1 << 48  # ahead of all arrivals


@dataclass(frozen=True)
class Limits:
    """Bounds of a step, and the scheduling order."""

    max_num_seqs: int
    """Running requests: the rows of the workers' batch."""
    max_num_batched_tokens: int
    """Tokens computed in one step."""
    policy: str = "fcfs"
    delay_factor: float = 0.0
    """While requests run, a new prompt waits for this multiple of the last prompt step's duration."""
    num_drafts: int = 0
    """Draft tokens of each decoding request in a step."""
    max_num_mixed_tokens: int = 0
    """Tokens computed in a step in which requests decode; 0: `max_num_batched_tokens`."""
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt computed in a step; 0: as many as fit."""
    fair_share: bool = False
    """Whether API keys take turns by the tokens that they compute."""
    adapts_width: bool = False
    """Whether steps have no drafts while these do not pay."""
    lookahead: int = 0
    """Positions after those of its step for which a request has blocks: a draft model writes to them."""
    sends_next_ids: bool = False
    """Whether the workers get the id after every prompt chunk."""

    @property
    def drafts_with_model(self) -> bool:
        """Whether a model proposes the drafts."""
        return self.sends_next_ids or self.lookahead > 0

    @property
    def max_uncertain(self) -> int:
        """Most positions at which the next token of a decoding request may be, besides the first."""
        return MAX_IN_FLIGHT * self.num_drafts

    @property
    def max_chunk(self) -> int:
        """Most tokens for which one request has blocks, besides those that are certainly computed."""
        return max(self.max_num_batched_tokens, 1 + self.max_uncertain) + self.lookahead


class Scheduler:
    """Holds all unfinished requests, their queue and rows, and the steps in flight."""

    def __init__(
        self,
        limits: Limits,
        kv: KVCacheManager,
        clock: Callable[[], float] = time.monotonic,
        images: ImageRegistry | None = None,
    ):
        """Raises ValueError for an unknown policy, and for limits below one or too large for a message."""
        if limits.max_num_seqs < 1 or limits.max_num_batched_tokens < 1 or limits.num_drafts < 0:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
        if limits.num_drafts:
            _check_drafts(limits)
        check_frames(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            kv.block_size,
            len(kv.specs),
            limits.num_drafts,
        )
        self.counters = Counters()
        self._limits = limits
        self._kv = kv
        self._images = images or ImageRegistry()
        self._clock = clock
        self._queue = (FairShareQueue if limits.fair_share else RequestQueue)(limits.policy)
        self._decode_batch = (
            DraftBatch(kv.block_size, limits.num_drafts, limits.lookahead)
            if limits.num_drafts
            else DecodeBatch(kv.block_size)
        )
        self._states = RequestStates(kv, self._queue, self._decode_batch, limits.max_num_seqs)
        self.requests = self._states.requests
        self._results = ResultProcessor(self._states, kv, self.counters, clock)
        if limits.num_drafts and limits.adapts_width:
            self._results.draft_width = DraftWidth(limits.num_drafts, not limits.drafts_with_model)
        self._num_arrivals = 0
        self._no_room: tuple[Request, int] | None = None  # the request that did not fit, and `num_frees` then
        self._is_preparing = False
        self._waiting_for: dict[Load | Question, list[Request]] = {}
        """Requests that wait for a KV tier."""

    @property
    def num_running(self) -> int:
        """Requests with a row and tokens left to schedule."""
        return len(self._decode_batch) + len(self._states.prefilling)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, or held."""
        return len(self._queue) + len(self._states.held)

    @property
    def has_held(self) -> bool:
        """Whether requests will return to the queue at a time, without a message."""
        return bool(self._states.held)

    @property
    def num_in_flight(self) -> int:
        """Steps without a result."""
        return len(self._states.in_flight)

    @property
    def has_deferred_work(self) -> bool:
        """Whether blocks are left to hash or to free: call `schedule` again without waiting."""
        return (
            self._kv.has_blocks_to_free
            or (self._is_preparing and len(self._states.in_flight) < MAX_IN_FLIGHT)
            or (self._kv.offload is not None and self._kv.offload.stores.has_work)
        )

    @property
    def version(self) -> tuple[int, ...]:
        """Differs whenever requests, steps or blocks have changed."""
        return (
            self._num_arrivals,
            len(self.requests),
            self._states.last_step,
            self._states.last_completed,
            self._kv.num_frees,
            self._kv.num_hashed,
            0 if self._kv.offload is None else self._kv.offload.num_changes,
        )

    def add(self, request: Request) -> None:
        """Queue a request that can run alone; its id must not be in use."""
        # Sequences that another engine has begun come first: their clients wait in the middle of a stream.
        is_begun = request.settings.replays or request.num_generated
        request.arrival = self._num_arrivals - (_BEGUN if is_begun else 0)
        request.arrived_at = request.arrived_at or self._clock()
        self._num_arrivals += 1
        self._states.add(request)

    def abort(self, request_ids: list[int]) -> None:
        """End requests in any state; ids of ended ones are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._states.end(request)
        self._states.free_ended()

    def grammar_lost(self, requests: Iterable[Request]) -> None:
        """Hold the requests of a grammar, which no step can mask, until `grammar_found`."""
        for request in requests:
            self._states.hold_until_loaded(request)

    def grammar_found(self, requests: Iterable[Request]) -> None:
        """Schedule the requests of a grammar again that were held for its loss."""
        for request in requests:
            self._states.release_loaded(request)

    def schedule(self) -> ScheduledBatch | None:
        """The next step; None when there is nothing to run or `MAX_IN_FLIGHT` steps are in flight."""
        self._kv.begin_iteration()
        if self._states.held:
            self._states.release(self._clock())
        if len(self._states.in_flight) >= MAX_IN_FLIGHT:
            return None
        plan = StepPlan()
        self._images.begin_step()
        self._is_preparing = False
        if (width := self._results.draft_width) is not None:
            self._decode_batch.num_drafts = width.next(len(self._decode_batch))
        self._extend_decodes(plan)
        if self._decode_batch or self._states.prefilling or self._queue:  # else there is no next batch yet
            self._kv.emit_saves(self._states.last_step + 1)
        self._continue_prefills(plan)
        # No request is preempted from here on, so every planned chunk will be computed: its blocks may be
        # found by the requests that are admitted next. Blocks of a preempted chunk would hold nothing.
        for request, count in plan.chunks.values():
            self._kv.cache(request.blocks, request.num_computed_tokens + count, self._states.last_step + 1)
        # A preempted request had too few blocks; another one would take those that it waits for.
        if not plan.preempted:
            self._admit_waiting(plan)
        if self._kv.offload is not None and self._kv.leases is None:
            for request, _ in plan.chunks.values():
                if request.settings.stores_prompt:
                    self._kv.offload.stores.push(request.blocks)
        if not plan.chunks and not self._decode_batch:
            self._kv.cancel_saves()
            return None
        return self._dispatch(plan)

    def update_from_output(self, result: BatchResult) -> StepOutcome:
        """Process the result of the oldest step in flight.

        Raises ValueError when the result does not fit that step.
        """
        return self._results.process(result)

    def blocks_copied(self, message: BlocksCopied | BlocksFound) -> None:
        """Process what a rank says of a KV tier: copies that are done, or blocks that are there.

        Raises ValueError for a message that answers none of those sent.
        """
        load = self._kv.copied(message)
        if load is not None:
            for request in self._waiting_for.pop(load, ()):
                self._states.end_wait(request, load.deadline)

    def check_integrity(self) -> Iterator[None]:
        """Raises AssertionError unless queue, decode batch, rows and blocks are consistent.

        Yields at intervals; the caller may do the rest later, if `version` is the same.
        """
        return self._states.check_integrity()

    # Planning a step

    def _extend_decodes(self, plan: StepPlan) -> None:
        """Allocate a block for each decoding request whose last one is full, and cache the full one."""
        last_step = self._states.last_step
        for request, start, end in self._decode_batch.needing_block():
            if request.state is not State.DECODING:
                continue  # preempted for an earlier request of this loop
            # The blocks before `start` can be hashed: at most one step is in flight, so their ids have
            # arrived, while that of `start` itself may still be on the device.
            self._kv.cache(request.blocks, start, last_step)
            if not self._limits.num_drafts:  # with drafts, the steps in flight may go beyond this position
                self._kv.save_decode_state(request.blocks, start)
            if not self._extend(request, start, end, plan) and request.state is State.DECODING:
                self._preempt(request, plan)

    def _continue_prefills(self, plan: StepPlan) -> None:
        for request in list(self._states.prefilling.values()):
            budget = self._token_budget(plan)
            if budget == 0:
                break
            if request.state is not State.PREFILLING:
                continue
            start = request.num_computed_tokens
            count = self._chunk(request, start, self._chunk_limit(plan, request, start, budget))
            if count and self._extend(request, start, self._covered(request, start + count), plan):
                plan.add_chunk(request, count)

    def _admit_waiting(self, plan: StepPlan) -> None:
        while budget := self._token_budget(plan):
            request = self._queue.first()
            if request is None or not self._states.free_rows or not self._may_be_admitted(request):
                return
            hits = self._prepare(request)
            limit = self._chunk_limit(plan, request, (hits or 0) * self._kv.block_size, budget)
            size = new_row_bytes(request, self._kv.block_size, len(self._kv.specs))
            full = plan.new_rows and plan.new_row_bytes + size > MAX_NEW_ROWS_BYTES
            if hits is None or full or not limit:
                return
            # Its first image waits for the features of those of the step: nothing of it could be computed.
            if not self._chunk(request, hits * self._kv.block_size, limit):
                return
            if self._waits_for_tier(request, hits):
                continue
            if not self._kv.admit(request.blocks, hits, self._covered(request, request.num_tokens)):
                self._no_room = request, self._kv.num_frees
                return
            self._admit(request, hits * self._kv.block_size, limit, plan)
            plan.new_row_bytes += size

    def _may_be_admitted(self, request: Request) -> bool:
        if request.last_step > self._states.last_completed:
            return False  # tokens that it sampled before its preemption are still in flight
        if self._no_room == (request, self._kv.num_frees):
            return False
        is_new = request.cached_tokens is None
        return not (is_new and self._limits.delay_factor > 0 and self._delays_new_prompts())

    def _delays_new_prompts(self) -> bool:
        waited = self._clock() - self._queue.oldest_arrival()
        return self.num_running > 0 and waited <= self._limits.delay_factor * self._results.prompt_step_s

    def _prepare(self, request: Request) -> int | None:
        """Number of cached blocks that the request will use; None if a later iteration must continue."""
        quota = self._kv.quota
        self._is_preparing = True
        if quota.is_spent:
            return None
        if request.settings.needs_prompt_ids:
            prompt = request.token_ids.prompt
            before = prompt.num_left
            prompt.collect_distinct(quota.left * IDS_PER_UNIT)
            quota.spend((before - prompt.num_left) // IDS_PER_UNIT)
            if prompt.num_left:
                return None
        hits = self._kv.find_prefix(request.blocks) if request.prompt_logprobs < 0 else 0
        if hits is None or not self._look_up_in_tiers(request):
            return None
        self._is_preparing = False
        return hits

    def _look_up_in_tiers(self, request: Request) -> bool:
        """Look up the request's prefix in KV tiers; False if a later iteration must continue."""
        offload = self._kv.offload
        return offload is None or request.prompt_logprobs >= 0 or offload.loads.look_up(request.blocks)

    def _waits_for_tier(self, request: Request, hits: int) -> bool:
        """Let the request wait if a KV tier has more of its prefix than the `hits` cached blocks."""
        offload = self._kv.offload
        if offload is None or request.prompt_logprobs >= 0:
            return False
        load = offload.loads.wait_for(request.blocks, hits, self._clock())
        if load is None:
            return False
        self._states.wait_for_tier(request, load.deadline)
        self._waiting_for.setdefault(load, []).append(request)
        return True

    def _admit(self, request: Request, cached: int, limit: int, plan: StepPlan) -> None:
        """Start a request whose first `cached` tokens are in its blocks; computes up to `limit` tokens."""
        count = self._chunk(request, cached, limit)
        added = self._kv.extend(request.blocks, cached, self._covered(request, cached + count))
        assert added is not None, "admitted without room"
        self._kv.restore_states(request.blocks, cached // self._kv.block_size)
        self._kv.cache(request.blocks, cached + count, self._states.last_step + 1)
        self._kv.quota.spend(UNITS_PER_ADMISSION)
        self._states.admit(request)
        request.num_computed_tokens = cached
        plan.add_chunk(request, count)
        plan.new_rows.append(_new_row(request))
        if request.cached_tokens is None:
            self._count_admission(request, cached)

    def _count_admission(self, request: Request, cached: int) -> None:
        """Count the first admission of a request."""
        request.cached_tokens = cached
        request.admitted_at = self._clock()
        self._queue.charge(request, request.num_tokens - cached)
        self.counters.prompt_tokens += request.prompt_length
        if request.prompt_logprobs < 0:
            self.counters.prefix_queries += request.num_tokens
            self.counters.prefix_hits += cached
            for tier, blocks in enumerate(request.blocks.lookup.num_loaded):
                self.counters.tier_hits[tier] += min(blocks * self._kv.block_size, cached)

    def _token_budget(self, plan: StepPlan) -> int:
        # A request that joins the decode batch had a token of the budget before, and the budget of mixed
        # steps has room for all rows. An image may have taken more.
        batch = self._decode_batch
        limits = self._limits
        mixed = limits.max_num_mixed_tokens if batch else 0
        most = mixed or limits.max_num_batched_tokens
        return max(most - len(batch) * batch.tokens_per_row - plan.num_tokens, 0)

    def _covered(self, request: Request, end: int) -> int:
        """Tokens for which a request needs blocks in a step that computes it up to `end`."""
        return min(end + self._limits.lookahead, max(request.max_length, end))

    def _chunk_limit(self, plan: StepPlan, request: Request, start: int, budget: int) -> int:
        """The most tokens of a chunk from `start` on."""
        longest = min(budget, self._limits.long_prefill_token_threshold or budget)
        images = request.token_ids.prompt.images
        # In a step without other prompts there is room for an image, even if a mixed one has less.
        if images and ((least := self._images.least(images, start)) <= budget or not plan.num_tokens):
            longest = max(longest, least)
        return plan.chunk_limit(request, longest)

    def _chunk(self, request: Request, start: int, limit: int) -> int:
        """How many tokens from `start` on a request computes, at most `limit`."""
        end = min(request.num_tokens, start + limit)
        images = request.token_ids.prompt.images
        if images:
            end = self._images.reach(images, start, end)
        return self._kv.chunk_end(start, end, request.num_tokens) - start if end > start else 0

    def _extend(self, request: Request, start: int, end: int, plan: StepPlan) -> bool:
        """Allocate blocks for positions start .. end - 1, preempting the requests that are last in order.

        False when the request itself is preempted, and when freeing blocks has spent the iteration's quota.
        """
        while (added := self._kv.extend(request.blocks, start, end)) is None:
            if self._kv.quota.is_spent:
                return False
            running = [*self._decode_batch.requests(), *self._states.prefilling.values()]
            self._kv.quota.spend(len(running) // UNITS_PER_ADMISSION)
            victim = max(running, key=self._queue.rank)
            self._preempt(victim, plan)
            if victim is request:
                return False
        if added:
            plan.more_blocks[request.request_id] = MoreBlocks(request.row, added)
        return True

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Return a request to the queue, to be recomputed; tokens that steps in flight sample are kept."""
        self.counters.preemptions += 1
        request.preemptions += 1
        self.counters.prefill_preemptions += request.state is State.PREFILLING
        plan.remove(request)
        self._states.return_to_queue(request)

    def _dispatch(self, plan: StepPlan) -> ScheduledBatch:
        states = self._states
        states.last_step += 1
        width = self._decode_batch.tokens_per_row
        decodes, ending = self._decode_batch.advance()
        num_drafts = self._decode_batch.num_drafts if decodes.rows else 0
        rows = decodes.rows
        counts: list[int] = []
        requests = decodes.requests
        sampling = decodes.requests
        stop_ids = decodes.stop_ids
        token_ids = next_ids = b""
        prefilled: list[Request] = []
        prompt_logprob_rows: dict[int, Request] = {}
        if plan.chunks:
            self.counters.prefill_tokens += plan.num_tokens
            chunked = [request for request, _ in plan.chunks.values()]
            rows = rows + [request.row for request in chunked]
            counts = [width] * len(requests) + [count for _, count in plan.chunks.values()]
            requests = requests + chunked
            prompt_logprob_rows = {r.row: r for r in chunked if r.prompt_logprobs >= 0}
            token_ids, next_ids = plan.packed_ids(self._limits.sends_next_ids)
            prefilled = self._advance_prefills(plan)
            sampling = sampling + prefilled
            stop_ids = union_of_stop_ids(prefilled, stop_ids)
        for request in prefilled:
            if not states.finish_prefill(request):
                ending.append(request)
        for request in ending:
            states.drain(request)
        self._count_step(plan, len(prefilled))
        states.in_flight.append(
            Step(
                number=states.last_step,
                rows=rows,
                requests=requests,
                sampling=sampling,
                stop_ids=stop_ids,
                prefilled=prefilled,
                ending=ending,
                prompt_logprob_rows=prompt_logprob_rows,
                has_chunks=bool(plan.chunks),
                sent_at=self._clock(),
                num_drafts=num_drafts,
            )
        )
        more_blocks = list(plan.more_blocks.values())
        return ScheduledBatch(
            states.last_step,
            rows,
            counts,
            plan.new_rows,
            more_blocks,
            token_ids,
            next_ids,
            num_drafts,
            *self._kv.take_state_copies(),
        )

    def _advance_prefills(self, plan: StepPlan) -> list[Request]:
        """Count the chunks as computed; returns the requests whose last token is among them."""
        for request, count in plan.chunks.values():
            request.num_computed_tokens += count
            self._kv.save_prompt_state(request.blocks, request.num_computed_tokens)
            if request.num_computed_tokens >= request.prompt_length:
                request.prompt_logprobs = -1  # the last chunk is in flight
        return [r for r, _ in plan.chunks.values() if r.num_computed_tokens == r.num_tokens]

    def _count_step(self, plan: StepPlan, num_prefilled: int) -> None:
        self.counters.steps += 1
        self.counters.chunked_prefills += len(plan.chunks) - num_prefilled
        self.counters.overlapped_steps += bool(self._states.in_flight)


def _check_drafts(limits: Limits) -> None:
    if limits.max_num_seqs * (1 + limits.num_drafts) > limits.max_num_batched_tokens:
        raise ValueError(
            f"max_num_batched_tokens={limits.max_num_batched_tokens} has no room for {limits.num_drafts} "
            f"draft tokens of each of {limits.max_num_seqs} sequences"
        )


def _new_row(request: Request) -> NewRow:
    tokens = request.token_ids
    settings = request.settings
    return NewRow(
        row=request.row,
        num_known=len(tokens),
        computed=request.num_computed_tokens,
        block_ids=[list(table) for table in request.blocks.tables],
        sampling=request.sampling,
        prompt_length=request.prompt_length,
        prompt_logprobs=request.prompt_logprobs,
        prompt_ids=tokens.prompt.distinct_ids() if settings.needs_prompt_ids else b"",
        output_ids=tokens.output.tobytes() if settings.needs_output_ids else b"",
        max_length=request.max_length,
        prediction_ids=settings.prediction_ids,
        grammar=settings.grammar,
        request_id=0 if settings.grammar is None else request.request_id,
        is_private=bool(tokens.prompt.root),
        images=row_images(tokens.prompt.images),
    )
