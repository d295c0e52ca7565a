"""The engine core without sockets: requests in, batches out, results in, tokens out.

core.add(message, frontend)  ->  refusal, if any
core.schedule()              ->  ScheduledBatch for the workers, or None
core.update(result)          ->  TokenDeltas for each frontend
"""

import time
from collections.abc import Callable

from atom.messages.engine import (
    AddRequest,
    CoreStats,
    Finished,
    FinishReason,
    TokenDeltas,
)
from atom.messages.worker import BatchResult, ScheduledBatch
from engine_core.admission import check_request
from engine_core.kv_cache_manager import KVCacheManager
from engine_core.request import Request
from engine_core.scheduler import Limits, Scheduler, StepOutcome


class EngineCore:
    """Policy of one engine. `frontend` is whatever bytes its owner addresses that frontend by."""

    def __init__(
        self,
        limits: Limits,
        kv: KVCacheManager,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Raises ValueError for limits that make no sense."""
        self._scheduler = Scheduler(limits, kv, clock)
        self._kv = kv
        self._max_model_len = max_model_len
        self._frontends: set[bytes] = set()  # all that have live requests, at least

    @property
    def num_in_flight(self) -> int:
        """Steps whose result is not in."""
        return self._scheduler.num_in_flight

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._scheduler.requests)

    def add(self, message: AddRequest, frontend: bytes) -> TokenDeltas | None:
        """Queue a request. One that can never run is refused: the deltas returned end it with `ERROR`."""
        try:
            self._check(message)
            request = Request(message, frontend, self._kv.new_blocks(message.cache_salt))
        except ValueError as error:
            refusal = Finished(message.request_id, FinishReason.ERROR, message=str(error))
            return TokenDeltas(self._scheduler.counters.steps, [], b"", finished=[refusal])
        self._frontends.add(frontend)
        self._scheduler.add(request)
        return None

    def abort(self, request_ids: list[int]) -> None:
        """End requests without an answer; unknown ids are ignored."""
        for request_id in request_ids:
            self._scheduler.abort(request_id)

    def abort_frontend(self, frontend: bytes) -> int:
        """End every request of a frontend that is gone; returns how many."""
        ids = [r.request_id for r in self._scheduler.requests.values() if r.frontend == frontend]
        self.abort(ids)
        self._frontends.discard(frontend)
        return len(ids)

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when nothing can run now."""
        return self._scheduler.schedule()

    def update(self, result: BatchResult) -> dict[bytes, TokenDeltas]:
        """What the result of the oldest step in flight means for each frontend.

        Raises ValueError for a result that does not fit that step.
        """
        outcome = self._scheduler.update(result)
        if len(self._frontends) == 1:
            return {frontend: _deltas(outcome) for frontend in self._frontends if outcome.has_output}
        frontends = {request.frontend for request in outcome.sampled.requests}
        frontends.update(request.frontend for request, _ in outcome.prompt_logprobs)
        return {frontend: _deltas(_share(outcome, frontend)) for frontend in frontends}

    def stats(self) -> CoreStats:
        """Counters since start and gauges of now."""
        counters = self._scheduler.counters
        return CoreStats(
            steps=counters.steps,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            kv_blocks_used=self._kv.num_used,
            kv_blocks_total=self._kv.num_blocks,
            preemptions=counters.preemptions,
            prefill_preemptions=counters.prefill_preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            chunked_prefills=counters.chunked_prefills,
            overlapped_steps=counters.overlapped_steps,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when the books disagree."""
        self._scheduler.check_integrity()

    def _check(self, message: AddRequest) -> None:
        """Raises ValueError, saying why a request can never run."""
        if message.request_id in self._scheduler.requests:
            raise ValueError(f"request id {message.request_id} is in use")
        check_request(message, self._max_model_len)
        total = len(message.prompt_ids) // 4 + message.max_tokens
        if not self._kv.can_ever_hold(total - 1):  # the last token drawn is never computed
            raise ValueError(f"the KV cache is too small for a sequence of {total} tokens")


def _deltas(outcome: StepOutcome) -> TokenDeltas:
    sampled = outcome.sampled
    return TokenDeltas(
        outcome.step,
        [request.request_id for request in sampled.requests],
        sampled.token_ids.tobytes(),
        first=[message for _, message in outcome.first],
        finished=[message for _, message in outcome.finished],
        logprobs=sampled.logprobs,
        prompt_logprobs=[chunk for _, chunk in outcome.prompt_logprobs],
    )


def _share(outcome: StepOutcome, frontend: bytes) -> StepOutcome:
    """The part of an outcome that belongs to one of several frontends."""
    requests = outcome.sampled.requests
    own = [place for place, request in enumerate(requests) if request.frontend == frontend]
    return StepOutcome(
        outcome.step,
        outcome.sampled.select(own),
        [(request, first) for request, first in outcome.first if request.frontend == frontend],
        [(request, finished) for request, finished in outcome.finished if request.frontend == frontend],
        [(request, chunk) for request, chunk in outcome.prompt_logprobs if request.frontend == frontend],
    )
