"""Drives an EngineCore with a simulated worker, and checks everything that it sends to frontends."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from xxhash import xxh64_digest

from atom.shared.config.kv_transfer import KVRole
from atom.shared.messages.engine import (
    AddRequest,
    Finished,
    FinishReason,
    FirstToken,
    Sampling,
    TokenDeltas,
    pack_ids,
    unpack_ids,
)
from atom.shared.messages.kv_tiers import DEVICE, CopyBlocks, FindBlocks, TierSlots
from atom.shared.messages.worker import BatchResult, KVSpec, NewRow
from engine_core.core import EngineCore
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.kv_cache.kv_events import Cleared, Removed, Stored, listed_group
from engine_core.kv_cache.request_blocks import RequestBlocks
from engine_core.requests.request import NO_ROW, Request
from engine_core.scheduler import MAX_IN_FLIGHT, Limits
from tests.helpers.engine.simulated_worker import (
    FAILURE,
    Scores,
    SimulatedWorker,
    prefixes_of,
    scores,
    undisturbed,
    unpack_scores,
)

VOCABULARY = 8
STATE_INTERVAL = 8
Draft = Callable[[int], tuple[int, int]]
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class Clock:
    """Time that only a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Sent:
    """A request as a frontend sees it."""

    message: AddRequest
    frontend: bytes
    received: list[int] = field(default_factory=list)
    scores: dict[int, Scores] = field(default_factory=dict)
    """By place among the generated tokens."""
    prompt_scores: dict[int, Scores] = field(default_factory=dict)
    """By position."""
    first: FirstToken | None = None
    finished: Finished | None = None

    @property
    def cached_tokens(self) -> int:
        assert self.first is not None
        return self.first.cached_tokens


class CoreDriver:
    """Runs the core's batches on the worker, with at most `MAX_IN_FLIGHT` steps in flight."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: Sequence[int],
        limits: Limits,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        draft: Draft = lambda num_drafts: (num_drafts, 0),
        tiers: Sequence[TierSlots] = (),
        role: KVRole | None = None,
    ):
        """`draft(most)`: how many tokens a row proposes in a step, and how many of these are accepted.

        `role`: with others that share the last tier.
        """
        self.clock = Clock()
        self.copies: deque[CopyBlocks | FindBlocks] = deque()
        """Copies to and from KV tiers that are not done, and questions."""
        self._make = partial(
            self._life, specs, num_blocks, limits, max_model_len, enable_prefix_caching, draft
        )
        self._tiers = tiers
        self._role = role
        self._make()
        self.results: deque[BatchResult] = deque()
        self.failing: deque[set[int]] = deque()
        """For each step in `results`, the requests whose rows failed."""
        self.failed: dict[int, Sent] = {}
        self.num_late = 0
        """Rows that were late for a step."""
        self.num_recomputed = 0
        """Times that a request was recomputed because a step failed whose blocks it shared."""
        self.live: dict[int, Sent] = {}
        self.done: dict[int, Sent] = {}

    def _life(
        self,
        specs: Sequence[KVSpec],
        num_blocks: Sequence[int],
        limits: Limits,
        max_model_len: int,
        caching: bool,
        draft: Draft,
    ) -> None:
        """A new core and worker."""
        kv = KVCacheManager(specs, num_blocks, limits.max_chunk, 7, caching, True, STATE_INTERVAL)
        if self._tiers:
            kv.offload_to(self._tiers, is_shared=self._role is not None, role=self._role or "kv_both")
        self.core = EngineCore(limits, kv, max_model_len, self.clock)
        self._events = Subscriber(kv)
        self.worker = SimulatedWorker(
            specs,
            num_blocks,
            VOCABULARY,
            (limits.max_num_seqs, limits.max_num_batched_tokens),
            self._known_ids,
            draft,
            limits.lookahead,
            limits.sends_next_ids,
        )

    def die(self) -> None:
        """The engine ends: what is in flight is lost, and each sequence is sent to a new one with its ids."""
        self.results.clear()
        self.failing.clear()
        self.copies.clear()
        self._make()
        for request_id, sent in self.live.items():
            first = sent.message
            resumed = msgspec.structs.replace(
                first,
                request_ids=[request_id],
                prompt_ids=first.prompt_ids + pack_ids(sent.received),
                prompt_length=len(unpack_ids(first.prompt_ids)),
                prompt_logprobs=-1 if sent.received else first.prompt_logprobs,
                replays=1,
            )
            assert self.core.add(resumed, sent.frontend) is None
        self.core.check_integrity()

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_tokens: int,
        eos: Sequence[int] = (),
        stop: Sequence[int] = (),
        priority: int = 0,
        frontend: bytes = b"a",
        n: int = 1,
        **fields: Any,
    ) -> str:
        """Queue `n` sequences with consecutive ids; returns why they were refused, or nothing.

        `fields` are fields of `AddRequest`. The salt becomes the seed, so that the worker distinguishes
        the KV of different salts.
        """
        settings = {"sampling": GREEDY, **fields}
        salt = settings.get("cache_salt", "")
        seed = int.from_bytes(salt.encode(), "little")
        settings["sampling"] = msgspec.structs.replace(settings["sampling"], seed=seed)
        message = AddRequest(
            list(range(request_id, request_id + n)),
            pack_ids(prompt),
            max_tokens,
            eos_token_ids=list(eos),
            stop_token_ids=list(stop),
            priority=priority,
            **settings,
        )
        refusal = self.core.add(message, frontend)
        self.core.check_integrity()
        if refusal is not None:
            assert refusal.request_ids == []
            assert [end.request_id for end in refusal.finished] == message.request_ids
            assert all(end.reason is FinishReason.ERROR for end in refusal.finished)
            return refusal.finished[0].message
        for one in message.request_ids:
            self.live[one] = Sent(message, frontend)
        return ""

    def abort(self, request_id: int) -> Sent | None:
        """No token may come for this id afterwards."""
        self.core.abort([request_id])
        self.core.check_integrity()
        return self.live.pop(request_id, None)

    def lose(self, frontend: bytes) -> None:
        """No token may come for a request of this frontend afterwards."""
        gone = [request_id for request_id, sent in self.live.items() if sent.frontend == frontend]
        assert self.core.abort_frontend(frontend) == len(gone)
        self.core.check_integrity()
        for request_id in gone:
            del self.live[request_id]

    def send(self) -> bool:
        """Schedule one step and execute it; its result waits in `results`."""
        return self.send_failing(lambda rows: [])

    def send_failing(
        self,
        choose: Callable[[list[int]], list[int]],
        choose_late: Callable[[list[int]], list[int]] = lambda rows: [],
    ) -> bool:
        """The same; the rows that `choose` returns fail, and those of `choose_late` are late if they sample.

        None is late so often that it fails.
        """
        batch = self.core.schedule()
        self.copies += self.core.tier_messages()
        self.take_stored_ends()
        self.core.check_integrity()
        self._events.check()
        if batch is None:
            return False
        failing = choose(batch.rows)
        owners = {request.row: request.request_id for request in self._requests_with_row()}
        self.failing.append({owners[row] for row in failing if row in owners})
        often = {request.row for request in self._requests_with_row() if request.late[0] > 6}
        late = {*choose_late(batch.rows)} - often
        self.results.append(self.worker.execute(batch, failing, late))
        self.num_late += len(self.results[-1].late)
        assert self.core.num_in_flight == len(self.results) <= MAX_IN_FLIGHT
        return True

    def copy(self, place: int = 0, failing: Collection[int] = ()) -> None:
        """Do one of the copies that are under way, all but the `failing` ones of its blocks."""
        message = self.copies[place]
        del self.copies[place]
        if isinstance(message, FindBlocks):
            self.core.blocks_copied(self.worker.find(message))
        else:
            self.core.blocks_copied(self.worker.copy(message, failing))
        self.copies += self.core.tier_messages()
        self.take_stored_ends()
        self.core.check_integrity()
        self._events.check()

    def take_stored_ends(self) -> None:
        """The ends of requests whose blocks are stored for another engine."""
        for delta in self.core.end_stored().values():
            for finished in delta.finished:
                if finished.request_id in self.live:  # else it was aborted meanwhile
                    self._finish(finished)

    def deliver(self) -> None:
        """Process the oldest result in the core, and check the messages for the frontends."""
        failing = self.failing.popleft() if self.failing else set()
        expected = failing & self.live.keys()
        requests = self.core._scheduler.requests
        before = {one.request_id: one.discarded_until for one in requests.values()}
        deltas = self.core.update_from_output(self.results.popleft())
        self.num_recomputed += sum(before[key] < one.discarded_until for key, one in requests.items())
        self.core.check_integrity()
        self._events.check()
        errors = {
            end.request_id
            for delta in deltas.values()
            for end in delta.finished
            if end.reason is FinishReason.ERROR
        }
        assert errors == expected, "errors for other requests than those that failed"
        for frontend, delta in deltas.items():
            assert delta.token_ids or delta.prompt_logprobs or delta.finished, "an empty message"
            self._take_tokens(frontend, delta)
            self._take_scores(frontend, delta)
            for first in delta.first:
                sent = self.live[first.request_id]
                assert sent.first is None and len(sent.received) == 1, "not its first token"
                sent.first = first
            for finished in delta.finished:
                self._finish(finished)
        self.take_stored_ends()

    def run(self, max_steps: int = 10_000) -> None:
        """Run until no request is left; with two steps in flight whenever there is work for them."""
        for _ in range(max_steps):
            while len(self.results) < MAX_IN_FLIGHT and self.send():
                pass
            if self.copies:
                self.copy()
                continue
            if not self.results and self.core.has_held:
                self.clock.now += 10.0
                continue
            if not self.results:
                break
            self.deliver()
        assert not self.live, f"requests {sorted(self.live)} never ended"
        assert self.core.num_live == 0 and self.core.stats().kv_blocks_used == 0

    def _take_tokens(self, frontend: bytes, delta: TokenDeltas) -> None:
        tokens = list(unpack_ids(delta.token_ids))
        assert delta.counts == [] or max(delta.counts) > 1, "counts say nothing"
        counts = counts_of(delta)
        assert sum(counts) == len(tokens)
        for request_id, count in zip(delta.request_ids, counts, strict=True):
            assert self.live[request_id].frontend == frontend, "tokens went to another frontend"
            self.live[request_id].received += tokens[:count]
            del tokens[:count]

    def _take_scores(self, frontend: bytes, delta: TokenDeltas) -> None:
        if delta.logprobs is not None:
            rows = unpack_scores(delta.logprobs.table)
            places = [
                (request_id, len(self.live[request_id].received) - count + index)
                for request_id, count in zip(delta.request_ids, counts_of(delta), strict=True)
                for index in range(count)
            ]
            for index, row in zip(delta.logprobs.indices, rows, strict=True):
                request_id, place = places[index]
                self.live[request_id].scores[place] = row
        for chunk in delta.prompt_logprobs:
            sent = self.live[chunk.owner]
            assert sent.frontend == frontend, "log probabilities went to another frontend"
            for offset, row in enumerate(unpack_scores(chunk.table)):
                sent.prompt_scores[chunk.start + offset] = row

    def _finish(self, finished: Finished) -> None:
        sent = self.live.pop(finished.request_id)
        sent.finished = finished
        if finished.reason is FinishReason.ERROR:
            assert finished.message == FAILURE
            self.failed[finished.request_id] = sent
            check_tokens(sent)
            return
        self.done[finished.request_id] = sent
        check_response(sent)

    def _known_ids(self, new: NewRow, ids: list[int]) -> list[int]:
        (request,) = (one for one in self._requests_with_row() if one.row == new.row)
        tokens = request.token_ids
        return list(unpack_ids(tokens.packed(0, len(tokens))))

    def _requests_with_row(self) -> list[Request]:
        scheduler = self.core._scheduler
        return [one for one in [*scheduler.requests.values(), *scheduler._states.ended] if one.row != NO_ROW]


class Subscriber:
    """Knows the cached blocks from the KV events alone."""

    def __init__(self, kv: KVCacheManager):
        self.known: set[bytes] = set()
        self.tiers: defaultdict[str, set[bytes]] = defaultdict(set)
        self._kv = kv
        self._salted: set[bytes] = set()
        self._is_shared = kv.offload is not None and kv.offload.loads.questions is not None
        cache = kv.cache

        def note_salted(blocks: RequestBlocks, num_computed: int, step: int) -> None:
            cache(blocks, num_computed, step)
            if blocks.tokens.prompt.root:
                self._salted.update(blocks.tokens.prompt.digests, blocks.digests)

        kv.cache = note_salted  # type: ignore[method-assign]

    def check(self) -> None:
        """Raises AssertionError unless the events tell what is cached, without salted blocks."""
        assert self._kv.events is not None
        for event in self._kv.events.take():
            match event:
                case Stored(parent, digests, token_ids, medium):
                    known = self.known if medium == DEVICE else self.tiers[medium]
                    inputs = [
                        before + ids for before, ids in zip([parent, *digests], token_ids, strict=False)
                    ]
                    assert digests == [xxh64_digest(one, 7) for one in inputs]
                    assert known.isdisjoint(digests), "stored twice"
                    known.update(digests)
                case Removed(digests, medium):
                    known = self.known if medium == DEVICE else self.tiers[medium]
                    assert known.issuperset(digests), "removed without being stored"
                    known.difference_update(digests)
                case Cleared():
                    self.known.clear()
                    self.tiers.clear()
        group = listed_group(self._kv.specs)
        assert self.known == set(self._kv.pools[group]._block_of) - self._salted
        for tier in [] if self._kv.offload is None else self._kv.offload.tiers:
            stored = set(tier.pools[group]._block_of) - self._salted
            assert self.tiers[tier.medium] <= stored
            # Blocks that other engines have stored are not published.
            assert self._is_shared or self.tiers[tier.medium] == stored


def counts_of(delta: TokenDeltas) -> list[int]:
    """Tokens of each of its requests."""
    return delta.counts or [1] * len(delta.request_ids)


def check_tokens(sent: Sent) -> None:
    """Raises AssertionError unless a request's tokens begin those that it would get alone."""
    message = sent.message
    prompt = list(unpack_ids(message.prompt_ids))
    stop_ids = {*message.eos_token_ids, *message.stop_token_ids}
    alone = undisturbed(prompt, message.max_tokens, stop_ids, VOCABULARY, message.sampling.seed)
    assert sent.received == alone[: len(sent.received)]


def check_response(sent: Sent) -> None:
    """Raises AssertionError unless a request got the tokens that it would get alone, and the right reason."""
    message, finished = sent.message, sent.finished
    known = list(unpack_ids(message.prompt_ids))
    num_earlier = len(known) - message.num_prompt_ids
    assert finished is not None and (sent.first is None) == (num_earlier > 0)
    check_tokens(sent)
    check_scores(sent, known)
    last = sent.received[-1]
    if last in message.eos_token_ids:
        assert (finished.reason, finished.stop_token_id) == (FinishReason.EOS, last)
    elif last in message.stop_token_ids:
        assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP_TOKEN, last)
    else:
        assert (finished.reason, finished.stop_token_id) == (FinishReason.MAX_TOKENS, -1)
        assert len(sent.received) == message.max_tokens - num_earlier


def check_scores(sent: Sent, prompt: list[int]) -> None:
    """Raises AssertionError unless exactly the wanted log probabilities were sent."""
    message, length = sent.message, len(prompt)
    token_ids = [*prompt, *sent.received]
    prefixes = prefixes_of(token_ids, message.sampling.seed)

    def expected(positions: range, most_likely: int) -> dict[int, Scores]:
        places = positions if most_likely >= 0 else ()
        return {at: scores(prefixes[at - 1], token_ids[at], 1 + most_likely, VOCABULARY) for at in places}

    most_likely = message.sampling.logprobs
    narrow = {
        length + place: (ids[: 1 + most_likely], values[: 1 + most_likely], rank)
        for place, (ids, values, rank) in sent.scores.items()
    }
    assert narrow == expected(range(length, len(token_ids)), most_likely)
    assert sent.prompt_scores == expected(range(1, length), message.prompt_logprobs)
