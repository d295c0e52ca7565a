"""What the result of a step changes: tokens are appended, requests end, failed rows end alone.

A result arrives one step late: by then the next step is scheduled, with the same requests. So a request
that ends with this result is in that step too, and what it samples there is dropped (`Step.is_stale`).
"""

from collections.abc import Callable

from atom.shared.messages.engine import Finished, FinishReason, FirstToken
from atom.shared.messages.worker import BatchResult, RowFailure
from engine_core.batch.acceptance import accept, count_drafts
from engine_core.batch.batch_bytes import MAX_REASON_CHARS
from engine_core.batch.draft_batch import DraftBatch
from engine_core.batch.draft_log import DraftLog
from engine_core.batch.draft_width import DraftWidth
from engine_core.batch.sampled_tokens import SampledTokens
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.requests.request import Request, State
from engine_core.requests.request_states import RequestStates
from engine_core.stats import Counters
from engine_core.step import Step, StepOutcome

_HOLD_S = 0.05
"""Time that a request is held after it was late for a step; twice as long each further time."""
_MAX_LATE = 8
"""Times that a request may be late one after another: 13 s in all."""
_TOO_LATE = "its grammar takes too long: no step had a mask of the next token in time"


class ResultProcessor:
    """Applies the results of steps to their requests, in the order of the steps."""

    def __init__(
        self, states: RequestStates, kv: KVCacheManager, counters: Counters, clock: Callable[[], float]
    ):
        self.prompt_step_s = 0.0
        """Seconds that the last step with prompt chunks took."""
        self.draft_width: DraftWidth | None = None
        """Is told what steps with drafts have accepted."""
        self._states = states
        self._kv = kv
        self._counters = counters
        self._clock = clock
        self._completed_at = clock()
        self._draft_log = DraftLog(clock)

    def process(self, result: BatchResult) -> StepOutcome:
        """Process the result of the oldest step in flight.

        Raises ValueError when the result does not fit that step.
        """
        states = self._states
        if not states.in_flight or states.in_flight[0].number != result.step:
            raise ValueError(f"result of step {result.step} arrived out of order")
        step = states.in_flight[0]
        failures = step.failed_requests(result)
        failed = self._fail(step, failures) if failures else []
        late = step.late_requests(result)
        sampled = step.sampled(result, {id(request) for request, _ in failures} | set(map(id, late)))
        prompt_logprobs = step.prompt_logprobs(result) if result.prompt_logprobs else []
        failed += [end for request in late if (end := self._hold(step, request)) is not None]
        states.in_flight.popleft()
        now = self._clock()
        states.last_completed = step.number
        self._kv.confirm(step.number)
        self._measure(step, now)
        if isinstance(states.decode_batch, DraftBatch):
            sampled, ends = self._accept_drafts(step, sampled, states.decode_batch)
        else:
            for request, token_id in zip(sampled.requests, sampled.token_ids, strict=True):
                request.output_ids.append(token_id)
            ends = _ends(step, sampled)
        self._counters.generated_tokens += len(sampled.token_ids)
        first = _first_tokens(step, now)
        for request, _ in ends:
            states.end(request)
        states.free_ended()
        return StepOutcome(step.number, sampled, first, failed + ends, prompt_logprobs)

    def _accept_drafts(
        self, step: Step, sampled: SampledTokens, batch: DraftBatch
    ) -> tuple[SampledTokens, list[tuple[Request, Finished]]]:
        """Append the tokens of a step that may have drafts; returns those appended, and the ends."""
        if step.num_drafts:
            count_drafts(sampled, self._counters)
            self._draft_log.update(self._counters)
            if self.draft_width is not None:
                num_accepted = sum(sampled.counts) - len(sampled.counts)
                self.draft_width.record(len(sampled.counts) - len(step.prefilled), num_accepted)
        accepted = accept(step, sampled, batch)
        for request in accepted.draining:
            batch.remove(request)
            self._states.drain(request)
        return accepted.sampled, accepted.ends

    def _fail(self, step: Step, failures: list[tuple[Request, RowFailure]]) -> list[tuple[Request, Finished]]:
        """End the requests whose rows failed in `step`, and recompute those that share their blocks."""
        finished = []
        for request, failure in failures:
            request.is_cacheable = False
            if request.state is State.ENDED:
                continue
            message = failure.reason[:MAX_REASON_CHARS]
            reason = FinishReason.REFUSED if failure.is_refused else FinishReason.ERROR
            end = Finished(request.request_id, reason, message=message)
            finished.append((request, end))
            self._states.end(request)
        # A block is shared as soon as the step that fills it is scheduled, hence before it can fail.
        for request in [*self._states.requests.values(), *self._states.ended]:
            if request.blocks.shared_step >= step.number:
                self._recompute(request)
        self._kv.uncache_unconfirmed()
        return finished

    def _hold(self, step: Step, request: Request) -> tuple[Request, Finished] | None:
        """Drop what a request sampled that was late for `step`, and schedule it again, later each time.

        Its end, if it has been late too often.
        """
        if not step.is_valid_for(request):
            return None
        times, generated = request.late
        times = times + 1 if generated == request.num_generated else 1
        request.late = times, request.num_generated
        if times > _MAX_LATE:
            self._states.end(request)
            return request, Finished(request.request_id, FinishReason.ERROR, message=_TOO_LATE)
        self._states.hold(request, self._clock() + _HOLD_S * 2 ** (times - 1))
        return None

    def _recompute(self, request: Request) -> None:
        """Recompute a request that shares blocks of a failed step.

        All of its tokens since its admission are in flight, and are dropped.
        """
        request.blocks.shared_step = 0
        request.is_cacheable = False
        if request.state is State.ENDED:
            return
        request.discarded_until = self._states.last_step
        self._states.mark_stale(request.discarded_until)
        if request.state not in (State.WAITING, State.HELD):
            self._states.return_to_queue(request)
        request.is_cacheable = True

    def _measure(self, step: Step, now: float) -> None:
        """Note the duration of a step, which began when it was sent or when the previous one was done."""
        if step.has_chunks:
            self.prompt_step_s = now - max(step.sent_at, self._completed_at)
        elif self.draft_width is not None and step.sent_at <= self._completed_at:
            self.draft_width.measured(len(step.sampling), step.num_drafts, now - self._completed_at)
        self._completed_at = now


def _ends(step: Step, sampled: SampledTokens) -> list[tuple[Request, Finished]]:
    """The requests that the tokens of a step without drafts end, or their length limit."""
    ends = []
    if step.stop_ids is None or not step.stop_ids.isdisjoint(sampled.token_ids):
        for request, token_id in zip(sampled.requests, sampled.token_ids, strict=True):
            if token_id in request.stop_ids:
                reason = request.stop_reason(token_id)
                ends.append((request, Finished(request.request_id, reason, token_id)))
    by_stop = {id(request) for request, _ in ends}
    for request in step.ending:
        if request.state is State.DRAINING and id(request) not in by_stop:
            ends.append((request, Finished(request.request_id, FinishReason.MAX_TOKENS)))
    return ends


def _first_tokens(step: Step, now: float) -> list[tuple[Request, FirstToken]]:
    """Messages for the requests whose first token this step sampled."""
    found = []
    for request in step.prefilled:
        if not step.is_valid_for(request):
            continue
        request.first_token_at = request.first_token_at or now
        if request.num_generated != 1:
            continue  # a preempted or replayed one
        cached = request.cached_tokens or 0
        queued_s = request.admitted_at - request.arrived_at
        first = FirstToken(request.request_id, cached, queued_s, prefill_s=now - request.admitted_at)
        found.append((request, first))
    return found
