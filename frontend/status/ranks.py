"""The state and the rates of the engine of each rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from atom.shared.messages.engine import CoreStats
from frontend.engine_client.client import EngineClient
from frontend.engine_client.engine_link import LinkState
from frontend.status.records import Rank

__all__ = ["Ranks"]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The counters of a rank when it last responded."""

    at: float
    life: int
    stats: CoreStats


class Ranks:
    """Keeps the last counters of each rank, for the rates."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._seen: dict[int, _Seen] = {}

    def read(self, stats: Mapping[int, CoreStats], now: float) -> list[Rank]:
        """All ranks; `stats` are the counters of responding ranks, at the time `now` (seconds)."""
        return [self._rank(rank, stats.get(rank), now) for rank in range(self._client.settings.num_ranks)]

    def _rank(self, rank: int, stats: CoreStats | None, now: float) -> Rank:
        state, reason = self._state(rank)
        life = self._client.engines.restarts.get(rank, 0)
        if stats is None:
            return Rank(rank, life, state, reason)
        prefill, decode = self._rates(rank, _Seen(now, life, stats))
        return Rank(
            rank,
            life,
            state,
            reason,
            running=stats.running,
            waiting=stats.waiting,
            kv_used=stats.kv_blocks_used,
            kv_cached=stats.kv_blocks_cached,
            kv_total=stats.kv_blocks_total,
            prefill=prefill,
            decode=decode,
            prefix_hits=stats.prefix_hits,
            prefix_queries=stats.prefix_queries,
            accepted_tokens=sum(stats.num_accepted_tokens_per_pos),
            draft_tokens=stats.num_draft_tokens,
            preemptions=stats.preemptions,
        )

    def _state(self, rank: int) -> tuple[str, str]:
        """(state, why it is not ready)."""
        engine = self._client.engines.get(rank)
        if engine is None:
            return "down", self._client.engines.ended_reasons.get(rank, "")
        link = engine.link
        if link.is_ready:
            return "ready", ""
        if link.state is LinkState.STALLED or link.silence:
            return "stalled", link.problem
        if engine.life or link.problem:
            return "restarting", link.problem or self._client.engines.ended_reasons.get(rank, "")
        return "starting", ""

    def _rates(self, rank: int, seen: _Seen) -> tuple[float, float]:
        """(prefill, decode) tokens per second since the last counters; a restart begins anew."""
        before = self._seen.get(rank)
        self._seen[rank] = seen
        if before is None or before.life != seen.life or seen.at <= before.at:
            return 0.0, 0.0
        elapsed = seen.at - before.at
        now = seen.stats
        then = before.stats
        prefill = (now.prefill_tokens - then.prefill_tokens) / elapsed
        return prefill, (now.generated_tokens - then.generated_tokens) / elapsed
