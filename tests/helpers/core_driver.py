"""Drives an EngineCore with a simulated worker, and checks every answer it gives."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atom.messages.engine import (
    AddRequest,
    Finished,
    FinishReason,
    FirstToken,
    Sampling,
    TokenDeltas,
    pack_ids,
    unpack_ids,
)
from atom.messages.worker import BatchResult, KVSpec
from engine_core.core import EngineCore
from engine_core.kv_cache_manager import KVCacheManager
from engine_core.scheduler import MAX_IN_FLIGHT, Limits
from tests.helpers.simulated_worker import (
    Scores,
    SimulatedWorker,
    prefixes_of,
    scores,
    undisturbed,
    unpack_scores,
)

VOCABULARY = 8
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class Clock:
    """Time that passes only when a test says so."""

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
    """Hands batches to the worker and results back, at most `MAX_IN_FLIGHT` steps late."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: Sequence[int],
        limits: Limits,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
    ):
        self.clock = Clock()
        budget = limits.max_num_batched_tokens
        kv = KVCacheManager(specs, num_blocks, budget, seed=7, enable_prefix_caching=enable_prefix_caching)
        self.core = EngineCore(limits, kv, max_model_len, self.clock)
        self.worker = SimulatedWorker(specs, num_blocks, VOCABULARY, (limits.max_num_seqs, budget))
        self.results: deque[BatchResult] = deque()
        self.live: dict[int, Sent] = {}
        self.done: dict[int, Sent] = {}

    def add(
        self,
        request_id: int,
        prompt: Sequence[int],
        max_tokens: int,
        eos: Sequence[int] = (),
        stop: Sequence[int] = (),
        priority: int = 0,
        frontend: bytes = b"a",
        **fields: Any,
    ) -> str:
        """Queue a request with these fields of `AddRequest`; returns why it was refused, or nothing.

        Its salt becomes its seed, so that the worker tells the KV of different salts apart.
        """
        settings = {"sampling": GREEDY, **fields}
        salt = settings.get("cache_salt", "")
        seed = int.from_bytes(salt.encode(), "little")
        settings["sampling"] = msgspec.structs.replace(settings["sampling"], seed=seed)
        message = AddRequest(
            request_id,
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
            assert refusal.request_ids == [] and len(refusal.finished) == 1
            assert refusal.finished[0].reason is FinishReason.ERROR
            return refusal.finished[0].message
        self.live[request_id] = Sent(message, frontend)
        return ""

    def abort(self, request_id: int) -> Sent | None:
        """Nothing may come for this id afterwards."""
        self.core.abort([request_id])
        self.core.check_integrity()
        return self.live.pop(request_id, None)

    def lose(self, frontend: bytes) -> None:
        """Nothing may come for any request of this frontend afterwards."""
        gone = [request_id for request_id, sent in self.live.items() if sent.frontend == frontend]
        assert self.core.abort_frontend(frontend) == len(gone)
        self.core.check_integrity()
        for request_id in gone:
            del self.live[request_id]

    def send(self) -> bool:
        """Schedule one step and execute it; its result waits in `results`."""
        batch = self.core.schedule()
        self.core.check_integrity()
        if batch is None:
            return False
        self.results.append(self.worker.execute(batch))
        assert self.core.num_in_flight == len(self.results) <= MAX_IN_FLIGHT
        return True

    def deliver(self) -> None:
        """Give the oldest result back, and check what the frontends would get."""
        deltas = self.core.update(self.results.popleft())
        self.core.check_integrity()
        for frontend, delta in deltas.items():
            tokens = unpack_ids(delta.token_ids)
            assert tokens or delta.prompt_logprobs, "an answer that says nothing"
            assert delta.counts == [] and len(tokens) == len(delta.request_ids)
            for request_id, token_id in zip(delta.request_ids, tokens, strict=True):
                assert self.live[request_id].frontend == frontend, "tokens went to another frontend"
                self.live[request_id].received.append(token_id)
            self._take_scores(frontend, delta)
            for first in delta.first:
                sent = self.live[first.request_id]
                assert sent.first is None and len(sent.received) == 1, "not its first token"
                sent.first = first
            for finished in delta.finished:
                self._finish(finished)

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is live; two steps in flight whenever there is work for them."""
        for _ in range(max_steps):
            while len(self.results) < MAX_IN_FLIGHT and self.send():
                pass
            if not self.results:
                break
            self.deliver()
        assert not self.live, f"requests {sorted(self.live)} never ended"
        assert self.core.num_live == 0 and self.core.stats().kv_blocks_used == 0

    def _take_scores(self, frontend: bytes, delta: TokenDeltas) -> None:
        if delta.logprobs is not None:
            rows = unpack_scores(delta.logprobs.table)
            for index, row in zip(delta.logprobs.indices, rows, strict=True):
                sent = self.live[delta.request_ids[index]]
                sent.scores[len(sent.received) - 1] = row
        for piece in delta.prompt_logprobs:
            sent = self.live[piece.owner]
            assert sent.frontend == frontend, "log probabilities went to another frontend"
            for place, row in enumerate(unpack_scores(piece.table)):
                sent.prompt_scores[piece.start + place] = row

    def _finish(self, finished: Finished) -> None:
        sent = self.live.pop(finished.request_id)
        sent.finished = finished
        self.done[finished.request_id] = sent
        check_answer(sent)


def check_answer(sent: Sent) -> None:
    """Raises AssertionError unless a request got what it would have got alone, and the right reason."""
    message, finished = sent.message, sent.finished
    assert finished is not None and sent.first is not None
    stop_ids = {*message.eos_token_ids, *message.stop_token_ids}
    prompt = list(unpack_ids(message.prompt_ids))
    root = message.sampling.seed
    assert sent.received == undisturbed(prompt, message.max_tokens, stop_ids, VOCABULARY, root)
    check_scores(sent, prompt)
    last = sent.received[-1]
    if last in message.eos_token_ids:
        assert (finished.reason, finished.stop_token_id) == (FinishReason.EOS, last)
    elif last in message.stop_token_ids:
        assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP_TOKEN, last)
    else:
        assert (finished.reason, finished.stop_token_id) == (FinishReason.MAX_TOKENS, -1)
        assert len(sent.received) == message.max_tokens


def check_scores(sent: Sent, prompt: list[int]) -> None:
    """Raises AssertionError unless whoever asked got its log probabilities, and nobody else."""
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
