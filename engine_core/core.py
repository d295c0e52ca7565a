"""The engine core without sockets: requests in, batches out, results in, tokens out.

core.add(message, frontend)      ->  refusal, if any
core.schedule()                  ->  ScheduledBatch for the workers, or None
core.update_from_output(result)  ->  TokenDeltas for each frontend
"""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import msgspec

from atom.shared.messages.admin import MAX_INFOS, RequestInfo
from atom.shared.messages.codec import encode
from atom.shared.messages.engine import (
    ID_BYTES,
    Abort,
    AddRequest,
    CoreStats,
    Finished,
    FinishReason,
    HeapUse,
    TokenDeltas,
)
from atom.shared.messages.grammar import DropGrammar, GetGrammar, GrammarBytes, GrammarLoaded, LoadGrammar
from atom.shared.messages.images import DropImage, LoadImage
from atom.shared.messages.kv_peers import EndLeases, LeasesReleased, ReleaseLease
from atom.shared.messages.kv_tiers import BlocksCopied, BlocksFound, CopyBlocks, FindBlocks
from atom.shared.messages.resume import RESUMED_ELSEWHERE, Claim, Claimed
from atom.shared.messages.worker import BatchResult, ExpertLoad, ScheduledBatch
from atom.shared.utils.logger import RareWarning
from engine_core.batch.batch_bytes import MAX_REASON_CHARS, check_row
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.kv_cache.kv_events import KVEvent
from engine_core.kv_tiers.request_tiers import PeerPrefix
from engine_core.requests.admission import check_request
from engine_core.requests.grammars import GrammarRegistry
from engine_core.requests.images import ImageRegistry, row_images
from engine_core.requests.queue_limit import QueueLimit
from engine_core.requests.request import Request, SharedSettings
from engine_core.requests.request_log import RequestLog, describe
from engine_core.requests.resumable import NO_FRONTEND, ResumableStreams
from engine_core.requests.stored_ends import StoredEnds
from engine_core.requests.token_ids import Prompt, TokenIds
from engine_core.scheduler import Limits, Scheduler
from engine_core.step import StepOutcome

_MOST_TAKEN = 32
"""Streams that one TakeStreams gives to another server."""


class EngineCore:
    """Scheduling of one engine. `frontend` is the identity, in bytes, of a frontend's connection."""

    def __init__(
        self,
        limits: Limits,
        kv: KVCacheManager,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        orphan_grace_s: float = 0.0,
        max_queue_s: float | None = None,
        images: ImageRegistry | None = None,
    ):
        """Raises ValueError for invalid limits. `orphan_grace_s`, `max_queue_s`: see the flags.

        Without `images` the engine takes none.
        """
        self._queue_limit = QueueLimit(max_queue_s, clock)
        self._resumable = ResumableStreams(orphan_grace_s, clock)
        self._stored_ends = StoredEnds(clock)
        self._grammars = GrammarRegistry(1 + limits.num_drafts, clock)
        self._images = images or ImageRegistry()
        self._scheduler = Scheduler(limits, kv, clock, self._images)
        self._kv = kv
        self._max_model_len = max_model_len
        self._clock = clock
        self._log = RequestLog(kv.block_size)
        self._warning = RareWarning()
        self._num_drafts = limits.num_drafts
        self._frontends: set[bytes] = set()  # all that have unfinished requests, and perhaps others
        self.expert_load = ExpertLoad([], 0)
        """The latest that a worker has sent."""
        self.worker_heaps: dict[int, HeapUse] = {}
        """By rank: the latest that each worker has sent."""
        self._check: Iterator[None] | None = None  # keeps the checked requests in memory
        self._checked_version: tuple[int, ...] = ()

    @property
    def has_deferred_work(self) -> bool:
        """Whether `schedule` should be called again at once, even if it has returned None."""
        return self._scheduler.has_deferred_work

    @property
    def has_held(self) -> bool:
        """Whether `schedule` should be called again soon, though no message comes."""
        return self._scheduler.has_held

    @property
    def num_in_flight(self) -> int:
        """Steps without a result."""
        return self._scheduler.num_in_flight

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._scheduler.requests) + len(self._grammars.waiting)

    def add(self, message: AddRequest, frontend: bytes) -> TokenDeltas | None:
        """Queue the sequences of a request.

        A request that can never run is refused: the deltas returned end its sequences with `ERROR`.
        """
        self.abort(self._resumable.replaced(message))
        try:
            settings, prompt, output = self._check_request(message, frontend)
            leased = self._leased(message, TokenIds(prompt, output))
        except ValueError as error:
            return self._refusal(message.request_ids, str(error))
        self._frontends.add(frontend)
        settings.stores_prompt |= self._kv.offload is not None and self._kv.offload.stores_prompts
        requests = []
        now = self._clock()
        for index, request_id in enumerate(message.request_ids):
            sampling = message.sampling
            if index:
                sampling = msgspec.structs.replace(sampling, sequence=sampling.sequence + index)
            blocks = self._kv.new_blocks(TokenIds(prompt, output))
            blocks.shared_store.is_awaited = settings.stores_prompt
            blocks.lookup.peer = leased
            request = Request(request_id, settings, sampling, message.prompt_logprobs, blocks)
            request.arrived_at = now
            requests.append(request)
        try:
            self._resumable.add(message, requests, frontend)
        except ValueError as error:
            return self._refusal(message.request_ids, str(error))
        self._queue_limit.add(requests)
        self._queue(requests if message.grammar is None else self._grammars.add(message.grammar, requests))
        return None

    def grammar_messages(self) -> list[LoadGrammar | DropGrammar]:
        """Messages for the workers, to be sent before any later step; queues requests that now have room."""
        self._queue(self._grammars.retry())
        return self._grammars.messages()

    def grammar_loaded(self, message: GrammarLoaded) -> dict[bytes, TokenDeltas]:
        """Schedule the requests that waited for a grammar; returns the deltas of failed ones.

        All requests of a grammar fail together. While the workers have lost one, its requests are held.
        """
        running = self._grammars.running(message.key)
        if message.is_lost:
            self._scheduler.grammar_lost(running)
        elif not message.error:
            self._scheduler.grammar_found(running)
        ready, failed = self._grammars.loaded(message)
        self._queue(ready)
        return self._fail(
            failed, message.error, FinishReason.REFUSED if message.is_refused else FinishReason.ERROR
        )

    def grammar_questions(self) -> list[tuple[bytes, GetGrammar]]:
        """Grammars that the workers lack, and the frontends to ask for them."""
        return self._grammars.questions()

    def grammar_provided(self, message: GrammarBytes) -> dict[bytes, TokenDeltas]:
        """A frontend has sent a grammar for the workers; returns the deltas of failed requests."""
        failed = self._grammars.provided(message)
        return self._fail(failed, f"its grammar has {len(message.source)} bytes: too many")

    def abort(self, request_ids: list[int], reason: FinishReason = FinishReason.ABORTED) -> None:
        """End sequences without a response, and those of their resumable streams; unknown ids are ignored."""
        self._check = None
        now = self._clock()
        others = []
        for request_id in request_ids:
            if (request := self._request(request_id)) is not None:
                self._log.add(request, reason, now)
                others += self._resumable.ended(request, Finished(request_id, reason))
        self._grammars.abort(request_ids)
        self._scheduler.abort(request_ids)
        if others:
            self.abort(others)

    def abort_own(self, message: Abort, frontend: bytes) -> None:
        """End sequences of `frontend`; those that another one has claimed go on."""
        found = [(number, self._request(number)) for number in message.request_ids]
        is_owner = self._resumable.is_owner
        own = [number for number, request in found if request is not None and is_owner(request, frontend)]
        self.abort(own, message.reason)

    def abort_frontend(self, frontend: bytes) -> int:
        """End every sequence of a frontend that is gone; returns how many.

        Those of streams that can be resumed go on for the grace, unless they wait for a grammar that their
        frontend may have to send.
        """
        waiting = [request for request in self._grammars.waiting.values() if request.frontend == frontend]
        self.abort([request.request_id for request in waiting])
        self._resumable.orphan(frontend)
        ids = [request.request_id for request in self.unfinished() if request.frontend == frontend]
        self.abort(ids)
        self._stored_ends.drop(frontend)
        self._frontends.discard(frontend)
        self._note_orphans()
        return len(waiting) + len(ids)

    def claim(self, message: Claim, frontend: bytes) -> Iterator[tuple[bytes, TokenDeltas | Claimed]]:
        """What to send to which frontends: the stream to its new one, its end to the earlier one."""
        claimed, earlier, ids = self._resumable.claim(message, frontend)
        if claimed.requests:
            self._frontends.add(frontend)
            self._note_orphans()
        yield frontend, claimed
        if ids and earlier != NO_FRONTEND:
            yield earlier, self._refusal(ids, RESUMED_ELSEWHERE, FinishReason.REFUSED)

    def offers(self, frontend: bytes) -> list[Claimed]:
        """Streams that have lost their frontend, and that `frontend` keeps from now on."""
        if not self._resumable.num_orphaned:
            return []
        found = self._resumable.offers(frontend)
        if found:
            self._frontends.add(frontend)
            self._note_orphans()
        return found

    def take_streams(self) -> tuple[list[Claimed], int]:
        """(some of the streams that can be resumed, which end here, how many are left)."""
        found, running = self._resumable.take(_MOST_TAKEN)
        self.abort(running)
        self._note_orphans()
        return found, len(self._resumable)

    def end_overdue(self) -> dict[bytes, TokenDeltas]:
        """End the requests that have waited for too long; returns the deltas for their frontends."""
        overdue = [request for request in self._queue_limit.overdue() if request.frontend != NO_FRONTEND]
        message = "the request has waited in the queue for longer than --max-queue-time: try again later"
        return self._fail(overdue, message, FinishReason.OVERLOADED)

    def end_stored(self) -> dict[bytes, TokenDeltas]:
        """The ends, by frontend, of requests whose blocks are stored for another engine."""
        return self._by_frontend(self._stored_ends.take())

    def end_expired(self) -> None:
        """End the sequences that no client has resumed in time."""
        if ids := self._resumable.expired():
            self.abort(ids)
        self._note_orphans()

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when nothing can run now."""
        return self._scheduler.schedule()

    def image_messages(self) -> list[LoadImage | DropImage]:
        """Messages for the workers, to be sent before the step that was scheduled last."""
        return self._images.take_messages()

    def tier_messages(self) -> list[CopyBlocks | FindBlocks | ReleaseLease]:
        """Messages for the workers, to be sent after the steps that were scheduled."""
        return [] if self._kv.offload is None else self._kv.offload.take_messages()

    def blocks_copied(self, message: BlocksCopied | BlocksFound) -> None:
        """Process what a rank says of a KV tier: copies that are done, or blocks that are there.

        Raises ValueError if it was not asked to.
        """
        self._check = None
        self._scheduler.blocks_copied(message)

    def lease_messages(self) -> list[EndLeases]:
        """Messages for the workers, to be sent before the step that was scheduled last."""
        return [] if self._kv.leases is None else self._kv.leases.take_messages()

    def end_leases(self, released: LeasesReleased | None = None) -> None:
        """End the leases that readers in other engines have released, and those that are overdue."""
        if self._kv.leases is not None and (released is not None or self._kv.leases.is_overdue):
            self._check = None
            self._kv.end_leases(released)

    def update_from_output(self, result: BatchResult) -> dict[bytes, TokenDeltas]:
        """Process the result of the oldest step in flight; returns the deltas for each frontend.

        Raises ValueError for a result that does not fit that step.
        """
        self._check = None
        outcome = self._scheduler.update_from_output(result)
        if outcome.finished:
            now = self._clock()
            others = []
            for request, finished in outcome.finished:
                self._log.add(request, finished.reason, now)
                others += self._resumable.ended(request, finished)
            if others:
                self.abort(others)
            outcome.finished[:] = self._stored_ends.hold(map(self._with_lease, outcome.finished))
        if len(self._frontends) == 1 and NO_FRONTEND not in self._frontends:
            return {frontend: _deltas(outcome) for frontend in self._frontends if outcome.has_output}
        frontends = {request.frontend for request in outcome.sampled.requests}
        frontends.update(request.frontend for request, _ in outcome.finished)
        frontends.update(request.frontend for request, _ in outcome.prompt_logprobs)
        frontends.discard(NO_FRONTEND)
        return {frontend: _deltas(_outcome_for(outcome, frontend)) for frontend in frontends}

    # Questions and commands

    def requests(self, name: str = "") -> tuple[int, list[RequestInfo]]:
        """(how many there are, the first MAX_INFOS) of the unfinished sequences.

        With `name` those of this request, and the finished ones that are remembered.
        """
        live = self.unfinished()
        finished = list(self._log.named(name)) if name else []
        found = [request for request in live if request.settings.name == name] if name else list(live)
        now = self._clock()
        block_size = self._kv.block_size
        infos = [describe(request, now, block_size) for request in found[:MAX_INFOS]]
        return len(finished) + len(found), (finished + infos)[:MAX_INFOS]

    def abort_named(
        self, names: set[str] | None, tenant: str | None = None
    ) -> tuple[int, dict[bytes, TokenDeltas]]:
        """End the sequences of these requests, or all for None; (how many, what frontends must get).

        With `tenant` only those of its API key.
        """
        found = [
            one
            for one in self.unfinished()
            if (names is None or one.settings.name in names) and tenant in (None, one.settings.tenant)
        ]
        ends = self._by_frontend(
            (request, Finished(request.request_id, FinishReason.ABORTED)) for request in found
        )
        self.abort([request.request_id for request in found])
        return len(found), ends

    def reset_prefix_cache(self) -> int:
        """Uncache all blocks, also those that running requests compute; returns how many were cached."""
        self._check = None
        return self._kv.reset(request.blocks for request in self._scheduler.requests.values())

    def take_kv_events(self) -> list[KVEvent]:
        """What the prefix cache has gained and lost since the last call; empty where it is not listed."""
        events = self._kv.events
        return [] if events is None else events.take()

    def stats(self) -> CoreStats:
        """Counters since start and current gauges."""
        counters = self._scheduler.counters
        return CoreStats(
            steps=counters.steps,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting + len(self._grammars.waiting),
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
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens_per_pos=counters.accepted_per_pos(self._num_drafts),
            prefill_tokens=counters.prefill_tokens,
            kv_blocks_cached=self._kv.num_cached,
            expert_imbalance=self.expert_load.imbalance,
            experts_moved=self.expert_load.moved,
            orphans=self._resumable.num_orphans,
            orphans_expired=self._resumable.num_expired,
            kv_tiers=[] if self._kv.offload is None else self._kv.offload.stats(counters.tier_hits),
            worker_heaps=[
                self.worker_heaps.get(rank, HeapUse())
                for rank in range(1 + max(self.worker_heaps, default=-1))
            ],
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when requests, rows and blocks are inconsistent."""
        for _ in self._scheduler.check_integrity():
            pass

    def check_integrity_slice(self) -> bool:
        """Do a part of `check_integrity`, a few milliseconds long.

        Returns whether all has been checked since the last change.
        """
        version = self._scheduler.version
        if self._check is None or version != self._checked_version:
            self._check = self._scheduler.check_integrity()
            self._checked_version = version
        for _ in self._check:
            return False
        return True

    def _request(self, request_id: int) -> Request | None:
        """The unfinished sequence with this id."""
        return self._scheduler.requests.get(request_id) or self._grammars.waiting.get(request_id)

    def _note_orphans(self) -> None:
        """Orphans are as a frontend to which nothing is sent."""
        if self._resumable.num_orphaned:
            self._frontends.add(NO_FRONTEND)
        else:
            self._frontends.discard(NO_FRONTEND)

    def unfinished(self) -> Iterator[Request]:
        """The scheduled sequences, then those that wait for their grammar."""
        return chain(self._scheduler.requests.values(), self._grammars.waiting.values())

    def _leased(self, message: AddRequest, tokens: TokenIds) -> PeerPrefix | None:
        """What another engine keeps for a request. Raises ValueError for what cannot be read."""
        if message.leased is None:
            return None
        prefix = PeerPrefix(message.leased, tokens, self._kv.block_size)
        if prefix.is_lost:
            self._warning.log(
                "the KV blocks that another engine keeps for a request are those of other tokens, or of "
                "another cache_salt or API key, and are computed: give both servers the same chat template"
            )
        return prefix

    def _with_lease(self, end: tuple[Request, Finished]) -> tuple[Request, Finished]:
        """Keep the prompt's blocks for another engine if the request goes on there; its end says where."""
        request, finished = end
        leases = self._kv.leases
        if leases is None or not request.settings.stores_prompt:
            return end
        if finished.reason is not FinishReason.MAX_TOKENS:
            return end
        return request, msgspec.structs.replace(finished, leased=leases.grant(request.blocks))

    def _queue(self, requests: list[Request]) -> None:
        for request in requests:
            self._scheduler.add(request)

    def _fail(
        self, requests: list[Request], message: str, reason: FinishReason = FinishReason.ERROR
    ) -> dict[bytes, TokenDeltas]:
        """End requests that cannot run, or not go on; returns the deltas for their frontends."""
        if not requests:
            return {}
        message = message[:MAX_REASON_CHARS]
        ends = self._by_frontend(
            (request, Finished(request.request_id, reason, message=message)) for request in requests
        )
        self.abort([request.request_id for request in requests], reason)
        return ends

    def _by_frontend(self, ends: Iterable[tuple[Request, Finished]]) -> dict[bytes, TokenDeltas]:
        """The deltas of ends alone, for the frontend of each request."""
        finished: dict[bytes, list[Finished]] = {}
        for request, end in ends:
            finished.setdefault(request.frontend, []).append(end)
        step = self._scheduler.counters.steps
        return {to: TokenDeltas(step, [], b"", finished=found) for to, found in finished.items()}

    def _refusal(
        self, request_ids: list[int], message: str, reason: FinishReason = FinishReason.ERROR
    ) -> TokenDeltas:
        """The end of sequences that cannot run."""
        message = message[:MAX_REASON_CHARS]
        refusals = [Finished(i, reason, message=message) for i in request_ids]
        return TokenDeltas(self._scheduler.counters.steps, [], b"", finished=refusals)

    def _check_request(self, message: AddRequest, frontend: bytes) -> tuple[SharedSettings, Prompt, bytes]:
        """(settings, prompt, packed output of an earlier run).

        Raises ValueError, with the reason, for a request that can never run.
        """
        check_request(message, self._max_model_len)
        self._images.check(message)
        for request_id in message.request_ids:
            if request_id in self._scheduler.requests or request_id in self._grammars.waiting:
                raise ValueError(f"request id {request_id} is in use")
        if message.prediction_ids and not self._num_drafts:
            message = msgspec.structs.replace(message, prediction_ids=b"")
        prompt_bytes = message.num_prompt_ids * ID_BYTES
        prompt = Prompt(
            message.prompt_ids[:prompt_bytes], message.cache_salt, message.images, self._images.sees_ahead
        )
        total = len(prompt.ids) + message.max_tokens
        # The last sampled token is never computed, except as a draft.
        if not self._kv.can_ever_hold(total if self._num_drafts else total - 1):
            raise ValueError(f"the KV cache is too small for a sequence of {total} tokens")
        row_parts: list[msgspec.Struct] = [message.sampling, *row_images(message.images)]
        row_parts += [] if message.grammar is None else [message.grammar.row]
        settings = SharedSettings(message, frontend, sum(len(encode(part)) for part in row_parts))
        check_row(settings, len(prompt.ids), self._kv.block_size, len(self._kv.specs))
        return settings, prompt, message.prompt_ids[prompt_bytes:]


def _deltas(outcome: StepOutcome) -> TokenDeltas:
    sampled = outcome.sampled
    counts = sampled.counts
    num_proposed = sampled.num_proposed
    return TokenDeltas(
        outcome.step,
        [request.request_id for request in sampled.requests],
        sampled.token_ids.tobytes(),
        list(counts) if counts and max(counts) > 1 else [],
        first=[message for _, message in outcome.first],
        finished=[message for _, message in outcome.finished],
        logprobs=sampled.logprobs,
        prompt_logprobs=[chunk for _, chunk in outcome.prompt_logprobs],
        num_proposed=list(num_proposed) if any(num_proposed) else [],
    )


def _outcome_for(outcome: StepOutcome, frontend: bytes) -> StepOutcome:
    """The part of an outcome that is sent to one of several frontends."""
    requests = outcome.sampled.requests
    own = [index for index, request in enumerate(requests) if request.frontend == frontend]
    return StepOutcome(
        outcome.step,
        outcome.sampled.select(own),
        [(request, first) for request, first in outcome.first if request.frontend == frontend],
        [(request, finished) for request, finished in outcome.finished if request.frontend == frontend],
        [(request, chunk) for request, chunk in outcome.prompt_logprobs if request.frontend == frontend],
    )
